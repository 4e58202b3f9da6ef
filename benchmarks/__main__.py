"""Measures strategies side by side, from a clone of the repository.

python -m benchmarks throughput --ranks 4
python -m benchmarks storm --ranks 2      # any script of this folder, by its name
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from lightning_dsgd import hyperparameters
from lightning_dsgd.lab.options import Parser

COMPARE = {
    "throughput": "steps per second, with simulated computation, stragglers and links",
    "convergence": "steps, seconds and bytes to a target, over seeds",
    "target": "seconds to all-reduce's quality in five situations, in simulated time",
    "report": "tables and plots of result files",
}
"""What compares any strategies; the scripts beside this file measure one question each."""


def scripts() -> dict[str, str]:
    """The first line of each script, by the script's name."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text()
        if '__name__ == "__main__"' in text and file.stem != "__main__":
            found[file.stem] = text.partition("\n")[0].strip('"').partition(":")[0]
    return found


def main(args: list[str]) -> None:
    """Hands the arguments over to the measurement that they name."""
    known = COMPARE | scripts()
    listed = "\n".join(f"  {name:22}{text}" for name, text in known.items())
    program = "python -m benchmarks"
    parser = Parser("", "Measures strategies side by side.", prog=program, epilog=listed)
    parser.add_argument("what", metavar="what", help="one of those below")
    what = parser.parse_args(args[:1] or ["--help"]).what
    if what not in known:
        meant = hyperparameters.did_you_mean(what, known)
        parser.error(f"it must be one of {', '.join(known)}, got {what!r}{meant}")
    if what in COMPARE:
        # Lazily: a help text needs none of it.
        importlib.import_module(f"benchmarks.compare.{what}").main(args[1:])
        return
    sys.argv = [f"benchmarks/{what}.py", *args[1:]]
    runpy.run_module(f"benchmarks.{what}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
