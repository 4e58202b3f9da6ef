"""Why a distributed job is stuck, slow or has ended badly: the rank, the line and the remedy.

    lightning-dsgd why -- torchrun --nproc-per-node 4 train.py
    lightning-dsgd why --end -- srun python train.py
    lightning-dsgd why why_run/                  # what was said of a run, once more
    lightning-dsgd why why_monday/ why_today/    # which part of a step has grown, and on which rank

The program is not edited: Lightning, Fabric, plain PyTorch, Hugging Face.  Why a job is slow is
said of torch's DDP, after 30 s and at the end, as by `lightning-dsgd diagnose`.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.why import compare, job, slow
from lightning_dsgd.why.verdict import Verdict
from lightning_dsgd.why.watch import TOLD, Watch

STUCK_AFTER_S: Final = 30.0
STATUS_STUCK: Final = 1
"""The exit status of a command that was ended as it was stuck."""
_LOOKS_EVERY_S: Final = 0.5
_SLOW_AFTER_S: Final = 30.0
"""A job is old enough then for a first word on its steps."""
_AFTER_TROUBLE_S: Final = 10.0
MOST_RUNS: Final = 2


def main(argv: list[str] | None = None) -> None:
    """Runs a command and watches it, or tells what was found in a run."""
    given = sys.argv[2:] if argv is None else argv
    place = given.index("--") if "--" in given else len(given)
    parser = _parser()
    args = parser.parse_args(given[:place])
    command = given[place + 1 :]
    if bool(command) == bool(args.run):
        parser.error(
            "either a command behind -- or the folder of a run must be given, got "
            f"{'both' if command else 'none'}; try: lightning-dsgd why -- torchrun "
            "--nproc-per-node 4 train.py"
        )
    if not args.stuck_after > 0:
        parser.error(f"--stuck-after must be positive, got {args.stuck_after}; try 30")
    sys.exit(_watch(parser, args, command) if command else _tell_of(parser, args.run))


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of what stands in front of `--`."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd why",
        usage="lightning-dsgd why [options] -- COMMAND ...\n       lightning-dsgd why RUN [RUN]",
        description=__doc__,
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


def _watch(parser: argparse.ArgumentParser, args: argparse.Namespace, command: list[str]) -> int:
    folder: Path = args.to
    if folder.exists() and any(folder.iterdir()):
        parser.error(
            f"--to must name a new or empty folder, got {folder}; remove it, or name another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    beat_s = min(1.0, args.stuck_after / 10)
    watch = Watch(folder, args.stuck_after, beat_s, time.monotonic, _tell)
    try:
        process = job.start(command, folder, beat_s, with_steps=not args.only_stuck)
    except OSError as error:
        parser.error(f"the command must be one that can be run, got {command[0]}: {error}")
    # Both signals are for the command: it ends by them, and this process after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    slow_at_s = time.monotonic() + _SLOW_AFTER_S
    while process.poll() is None:
        if time.monotonic() >= slow_at_s:
            has_told = _has_told_so_far(folder)
            slow_at_s = math.inf if has_told else time.monotonic() + _SLOW_AFTER_S
        found = _looked(watch)
        if found is not None and args.end and not found.is_late_only:
            _tell(["ending the job, as --end says"])
            job.end(process, watch.processes())
            watch.write(command=command, exit_status=STATUS_STUCK)
            return STATUS_STUCK
        if found is not None:
            watch.write(command=command)
        time.sleep(min(_LOOKS_EVERY_S, beat_s))
    status = job.exit_status(process.returncode)
    watch.end(status)
    text = [] if args.only_stuck else slow.lines_of(folder)
    _tell(text)
    watch.write(command=command, exit_status=status, slow=text)
    return status


def _has_told_so_far(folder: Path) -> bool:
    """Tells why the steps so far were slow, if there are enough of them."""
    try:
        _tell(["so far:", *slow.diagnosed(folder)])
    except (ValueError, OSError):
        return False
    return True


def _looked(watch: Watch) -> Verdict | None:
    """Looks once; a watcher that fails says so, and the job goes on."""
    try:
        return watch.look()
    except (ValueError, KeyError, TypeError, OSError) as error:
        _tell([f"the records could not be read, and the job goes on: {error!r}"])
        time.sleep(_AFTER_TROUBLE_S)
        return None


def _tell(text: list[str]) -> None:
    for line in text:
        sys.stderr.write(f"why: {line}\n")
    sys.stderr.flush()


def _tell_of(parser: argparse.ArgumentParser, runs: list[Path]) -> int:
    if len(runs) > MOST_RUNS:
        parser.error(f"one run or two must be given, got {len(runs)}; compare two at a time")
    for run in runs:
        if len(runs) > 1:
            sys.stdout.write(f"{run}:\n")
        sys.stdout.writelines(f"{line}\n" for line in _told_of(parser, run, len(runs) == 1))
    if len(runs) > 1:
        sys.stdout.writelines(f"{line}\n" for line in compare.lines_of(*runs))
    return 0


def _told_of(parser: argparse.ArgumentParser, run: Path, with_speed: bool) -> list[str]:
    """Returns what was told of a run; of one whose watcher has not ended, what its steps say."""
    try:
        told: dict[str, Any] = json.loads((run / TOLD).read_text())
    except (OSError, ValueError) as error:
        if not (run / slow.STEPS).is_dir():
            parser.error(f"{run} must be the folder of a run that `why` has watched: {error}")
        told = {"told": []}
    text = [line for each in told["told"] for line in each["lines"]]
    if not text:
        text.append(f"nothing was wrong; exit status {told.get('exit_status', 'unknown')}")
    if with_speed:
        text += told["slow"] if "slow" in told else slow.lines_of(run)
    return text
