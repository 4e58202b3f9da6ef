"""Why a DDP job is slow: which rank is late, when and in what, and what each remedy would gain.

    # a run with callbacks=[lightning_dsgd.StepTrace("run/")], or with LoopTrace in a loop
    lightning-dsgd diagnose run/
    lightning-dsgd diagnose run/ --json

It says "stay with ddp" where nothing would gain 5%.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning_dsgd.lab.options import Parser


def main(argv: list[str] | None = None) -> None:
    """Prints the verdict."""
    parser = Parser("diagnose", __doc__)
    parser.add_argument("run", type=Path, help="a folder of StepTrace or LoopTrace")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    args = parser.parse_args(argv)
    from lightning_dsgd.lab.diagnose import times, words  # load torch
    from lightning_dsgd.lab.diagnose.remedies import remedies
    from lightning_dsgd.lab.diagnose.verdict import judge

    try:
        seen = times.read(args.run)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    found = judge(seen)
    gains = remedies(seen, found)
    if args.json:
        print(json.dumps(words.record(seen, found, gains), indent=1))
    else:
        print("\n".join(words.lines(seen, found, gains)))
