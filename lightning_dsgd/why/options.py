"""The options of `lightning-dsgd why`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

STUCK_AFTER_S: Final = 30.0


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of what stands in front of `--`."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd why",
        usage="lightning-dsgd why [options] -- COMMAND ...\n       lightning-dsgd why RUN [RUN]",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="*", help="the folder of a run that was watched")
    parser.add_argument(
        "--stuck-after",
        type=float,
        default=STUCK_AFTER_S,
        metavar="S",
        help="a rank that keeps the others waiting for so many seconds is stuck, unless it works "
        "or a step usually takes as long (default: %(default)g)",
    )
    parser.add_argument(
        "--end", action="store_true", help="end a job that is stuck, with exit status 1"
    )
    parser.add_argument(
        "--only-stuck",
        action="store_true",
        help="record no steps, which are recorded of DDP else, to say why it is slow",
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path(time.strftime("why_%Y%m%d_%H%M%S")),
        metavar="FOLDER",
        help="where the ranks write; all nodes must share it (default: why_DATE_TIME here)",
    )
    return parser
