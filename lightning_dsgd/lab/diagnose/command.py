"""Why a DDP job is slow: which rank is late, when and in what, and what each remedy would gain.

    # a run with callbacks=[lightning_dsgd.StepTrace("run/")], or with LoopTrace in a loop
    lightning-dsgd diagnose run/
    lightning-dsgd diagnose run/ --ranks 64 --link 10gbit    # the same job on another cluster
    torchrun ... -m lightning_dsgd diagnose run/             # over the link that its ranks measure
    lightning-dsgd diagnose run/ --strategies popsgd:data=claimed,diloco
    lightning-dsgd diagnose run/ --json

It says "stay with ddp" where nothing would gain 5%.  On another cluster each rank has a batch as
large as those that were recorded; more ranks than were recorded are copies of these at other steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lightning_dsgd.lab.options import Parser


def main(argv: list[str] | None = None) -> None:
    """Prints the verdict."""
    parser = Parser("diagnose", __doc__)
    parser.add_argument("run", type=Path, help="a folder of StepTrace or LoopTrace")
    parser.add_argument("--ranks", type=int, help="of another cluster; by default as recorded")
    parser.add_argument(
        "--link",
        metavar="RATE[,LATENCY]",
        help="of each rank of another cluster, such as 10gbit or 10gbit,50us; by default as ranks "
        "of torchrun measure it, else as the recorded sums show it, and 100us",
    )
    parser.add_argument("--strategies", help="tell what these gain too; separated by commas")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    args = parser.parse_args(argv)
    try:
        _tell(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _tell(args: argparse.Namespace) -> None:
    from lightning_dsgd.lab.diagnose import measured, times, words  # these load torch
    from lightning_dsgd.lab.diagnose.elsewhere import LATENCY_S, elsewhere
    from lightning_dsgd.lab.diagnose.remedies import check_asked, remedies
    from lightning_dsgd.lab.diagnose.verdict import judge
    from lightning_dsgd.lab.link import Link

    link = Link.parse(args.link, "--link", LATENCY_S) if args.link else None
    if measured.is_launched():
        if link is not None:
            raise ValueError("--link must be left out under torchrun, whose ranks measure it")
        link, rank = measured.link()
        if rank:
            return
    seen = times.read(args.run)
    num_recorded = seen.num_ranks
    if args.ranks is not None or link is not None:
        seen = elsewhere(seen, args.ranks, link)
    asked = args.strategies.split(",") if args.strategies else []
    check_asked(seen, asked)
    found = judge(seen)
    gains = remedies(seen, found, asked)
    if args.json:
        print(json.dumps(words.record(seen, found, gains), indent=1))
    else:
        print("\n".join(words.lines(seen, found, gains, num_recorded)))
