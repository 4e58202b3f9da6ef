"""Why a distributed job is stuck, slow or has ended badly: the rank, the line and the remedy.

    lightning-dsgd why -- torchrun --nproc-per-node 4 train.py
    lightning-dsgd why --end -- srun python train.py
    lightning-dsgd why why_monday/ why_today/    # which part of a step has grown, and on which rank

    # of one run: what was said of it, or why the steps of StepTrace or LoopTrace were slow
    lightning-dsgd why run/
    lightning-dsgd why run/ --json
    lightning-dsgd why run/ --ranks 64 --link 10gbit    # the same job on another cluster
    torchrun ... -m lightning_dsgd why run/             # over the link that its ranks measure
    lightning-dsgd why run/ --strategies popsgd:data=claimed,diloco

A program is not edited: Lightning, Fabric, plain PyTorch, Hugging Face.  Why it is slow is said of
torch's DDP, and of FSDP on CPUs, after 30 s and at the end.

On another cluster each rank has a batch as large as those that were recorded; more ranks than were
recorded are copies of these at other steps.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.options import Parser
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
_OF_COMMANDS: Final = ("--stuck-after", "--end", "--only-stuck", "--to")
_OF_RUNS: Final = ("--ranks", "--link", "--strategies", "--json")


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
    for name, is_given in _given(args, _OF_RUNS if command else _OF_COMMANDS).items():
        if is_given:
            needed, got = ("a run", "a command") if command else ("a command", "a run")
            parser.error(f"{name} must be given for {needed}, got {got}; leave {name} out")
    if command:
        sys.exit(_watch(parser, args, command))
    _tell_of(parser, args)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, bool]:
    """Returns which of these options were given."""
    values = {name: getattr(args, name.lstrip("-").replace("-", "_")) for name in names}
    return {name: value is not None and value is not False for name, value in values.items()}


def _parser() -> Parser:
    """Returns the parser of what stands in front of `--`."""
    parser = Parser(
        "why",
        __doc__,
        usage="lightning-dsgd why [options] -- COMMAND ...\n"
        "       lightning-dsgd why [options] RUN [RUN]",
    )
    parser.add_argument(
        "run", type=Path, nargs="*", help="a run that was watched, or of StepTrace or LoopTrace"
    )
    command = parser.add_argument_group("options for a command")
    command.add_argument(
        "--stuck-after",
        type=float,
        metavar="S",
        help="a rank that keeps the others waiting for so many seconds is stuck, unless it works "
        f"or a step usually takes as long (default: {STUCK_AFTER_S:g})",
    )
    command.add_argument(
        "--end", action="store_true", help="end a job that is stuck, with exit status 1"
    )
    command.add_argument(
        "--only-stuck",
        action="store_true",
        help="record no steps, which are recorded of DDP and FSDP else, to say why it is slow",
    )
    command.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="where the ranks write; all nodes must share it (default: why_DATE_TIME here)",
    )
    run = parser.add_argument_group("options for one run")
    run.add_argument("--ranks", type=int, help="of another cluster; by default as recorded")
    run.add_argument(
        "--link",
        metavar="RATE[,LATENCY]",
        help="of each rank of another cluster, such as 10gbit or 10gbit,50us; by default as ranks "
        "of torchrun measure it, else as the recorded sums show it, and 100us",
    )
    run.add_argument("--strategies", help="tell what these gain too; separated by commas")
    run.add_argument("--json", action="store_true", help="print JSON in place of text")
    return parser


def _watch(parser: argparse.ArgumentParser, args: argparse.Namespace, command: list[str]) -> int:
    stuck_after_s = STUCK_AFTER_S if args.stuck_after is None else args.stuck_after
    if not stuck_after_s > 0:
        parser.error(f"--stuck-after must be positive, got {stuck_after_s}; try 30")
    folder: Path = args.to or Path(time.strftime("why_%Y%m%d_%H%M%S"))
    if folder.exists() and any(folder.iterdir()):
        parser.error(
            f"--to must name a new or empty folder, got {folder}; remove it, or name another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    beat_s = min(1.0, stuck_after_s / 10)
    watch = Watch(folder, stuck_after_s, beat_s, time.monotonic, _tell)
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


def _tell_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Prints what is known of one run, or compares two."""
    runs: list[Path] = args.run
    given = [name for name, is_given in _given(args, _OF_RUNS).items() if is_given]
    if len(runs) > MOST_RUNS:
        parser.error(f"one run or two must be given, got {len(runs)}; compare two at a time")
    if len(runs) > 1 and given:
        parser.error(f"{given[0]} must be given for one run, got two; ask of each by itself")
    try:
        if len(runs) > 1:
            told = [line for run in runs for line in (f"{run}:", *_lines_of(_told_of(run)))]
            told += compare.lines_of(*runs)
        else:
            asked = tuple(args.strategies.split(",")) if args.strategies else ()
            told = _report(runs[0], slow.Asked(args.ranks, args.link, asked, as_json=args.json))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.stdout.writelines(f"{line}\n" for line in told)


def _report(run: Path, asked: slow.Asked) -> list[str]:
    """Returns what is known of one run."""
    told = _told_of(run)
    is_watched = bool(told) or slow.is_watched(run)
    is_elsewhere = replace(asked, as_json=False) != slow.Asked() or slow.is_measured(asked)
    if is_elsewhere or not is_watched:
        return slow.report(run, asked, told.get("told", ()))
    if asked.as_json:
        return slow.record_of(run, told.get("told", ()))
    return [*_lines_of(told), *(told["slow"] if "slow" in told else slow.lines_of(run))]


def _told_of(run: Path) -> dict[str, Any]:
    """Returns what the watcher has written of a run; nothing where it has not come to that."""
    path = run / TOLD
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return told


def _lines_of(told: dict[str, Any]) -> list[str]:
    """Returns the words in which that was told."""
    if not told:
        return []
    text = [line for each in told["told"] for line in each["lines"]]
    return text or [f"nothing was wrong; exit status {told.get('exit_status', 'unknown')}"]
