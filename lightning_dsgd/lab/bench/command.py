"""The command `lightning-dsgd bench`: it has one module for each thing that it measures."""

from __future__ import annotations

import importlib

from lightning_dsgd import hyperparameters
from lightning_dsgd.lab.options import Parser

BENCHES = {
    "throughput": "steps per second, with simulated computation, stragglers and links",
    "convergence": "steps, seconds and bytes to a target, over seeds",
    "target": "seconds to all-reduce's quality in five situations, in simulated time",
    "report": "tables and plots of result files",
}


def main(args: list[str]) -> None:
    """Hands the arguments over to the measurement that they name."""
    listed = "\n".join(f"  {name:12}{text}" for name, text in BENCHES.items())
    parser = Parser("bench", "Measures strategies side by side.", epilog=listed)
    parser.add_argument("what", metavar="|".join(BENCHES), help="one of those below")
    what = parser.parse_args(args[:1] or ["--help"]).what
    if what not in BENCHES:
        meant = hyperparameters.did_you_mean(what, BENCHES)
        parser.error(f"it must be one of {', '.join(BENCHES)}, got {what!r}{meant}")
    # Lazily: a strategy name, or a help text, needs none of it.
    importlib.import_module(f"lightning_dsgd.lab.bench.{what}").main(args[1:])
