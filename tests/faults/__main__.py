"""Puts small faults into a copy of the package, one at a time, and tells which test notices each.

    python -m tests.faults [--jobs N] [--limit SECONDS] [--list] [ROOM | ROOM:FIRST-LAST ...]

A fault is noticed by a test that fails with it and passes without it.  The tests that belong to a
fault stand beside it in the table (`table.py`); they stop at the first that fails.  A test that
takes more than 60 seconds counts as one that hangs, and has failed.  The command ends with 1 where
a fault survives, and with 2 where a table is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.copies import Copy, Run, load_what_is_large
from tests.faults.table import ROOMS, Fault, TableError, chosen

ROOT = Path(__file__).parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_SKIPPED = re.compile(r"(\d+) skipped")
_ASK_EVERY_S = 0.05

NOTICED, SURVIVED, WRONG = "noticed", "survived", "wrong"


@dataclass
class Verdict:
    """What became of a fault, and the line that says so."""

    outcome: str
    said: str


def why_wrong(fault: Fault, root: Path) -> str:
    """Returns in words why a fault cannot be put into a working tree; else an empty text."""
    try:
        compile(fault.text_with_fault(root), fault.path, "exec")
    except (TableError, SyntaxError) as error:
        return f"{fault.name}: {error}"
    return ""


def who_notices(status: int, said: str) -> str:
    """Returns the test that has failed, or in words what else has ended the tests."""
    failed = _FAILED.search(said)
    if failed:
        return failed[1]
    if "Timeout" in said or status < 0:
        return "tests that hang"
    return f"tests that end with {status}"


def try_fault(copy: Copy, fault: Fault, sound: set[str]) -> Generator[Run, None, Verdict]:
    """Gives the runs of pytest that it needs, one after the other, and goes on once each has ended.

    Args:
        copy: where the fault is to stand
        fault: the fault
        sound: tests that are known to pass without a fault
    """
    with copy.fault(fault):
        status, said = yield from _ended(copy.start(fault.arguments))
    if status == pytest.ExitCode.OK:
        skipped = _SKIPPED.search(said)
        after = f" ({skipped[0]})" if skipped else ""
        return Verdict(SURVIVED, f"SURVIVED{after}: {fault.what}")
    if status in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        return Verdict(WRONG, f"WRONG: pytest finds no test by {fault.tests}\n{said}")
    witness = who_notices(status, said)
    again = [witness, "-m", ""] if "::" in witness else fault.arguments
    if " ".join(again) not in sound:
        status, said = yield from _ended(copy.start(again))
        if status != pytest.ExitCode.OK:
            return Verdict(WRONG, f"WRONG: {' '.join(again)} fails without a fault too\n{said}")
        sound.add(" ".join(again))
    return Verdict(NOTICED, f"noticed by {witness}")


def _ended(run: Run) -> Generator[Run, None, tuple[int, str]]:
    """Gives the run until it has ended; returns its exit status and what it printed."""
    try:
        while (ended := run.poll()) is None:
            yield run
    except BaseException:
        run.end()
        raise
    return ended


def try_all(root: Path, faults: list[Fault], num_jobs: int, limit_s: float) -> dict[str, Verdict]:
    """Tries all faults, in so many copies at a time; prints a line for each as it is known."""
    sound: set[str] = set()
    verdicts: dict[str, Verdict] = {}
    waiting = list(reversed(faults))
    under_way: list[tuple[Copy, Fault, Generator[Run, None, Verdict]]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        free = [Copy(root, Path(folder, f"copy-{job}"), limit_s) for job in range(num_jobs)]
        while waiting or under_way:
            while waiting and free:
                copy, fault = free.pop(), waiting.pop()
                trial = try_fault(copy, fault, sound)
                stack.callback(trial.close)
                under_way.append((copy, fault, trial))
            for one in list(under_way):
                copy, fault, trial = one
                try:
                    next(trial)
                except StopIteration as end:
                    verdict: Verdict = end.value
                    verdicts[fault.name] = verdict
                    under_way.remove(one)
                    free.append(copy)
                    file = Path(fault.path).name
                    print(f"{fault.name:<16} {file:<22} {verdict.said}", flush=True)
            time.sleep(_ASK_EVERY_S)
    return verdicts


def summary(faults: list[Fault], verdicts: dict[str, Verdict]) -> str:
    """Returns the table of counts by room."""
    counts = Counter((fault.room, verdicts[fault.name].outcome) for fault in faults)
    outcomes = (NOTICED, SURVIVED, WRONG)
    lines = ["", " " * 16 + "".join(f"{outcome:>10}" for outcome in outcomes)]
    for room in dict.fromkeys(fault.room for fault in faults):
        lines.append(f"{room:<16}" + "".join(f"{counts[room, each]:>10}" for each in outcomes))
    totals = Counter(verdict.outcome for verdict in verdicts.values())
    lines.append(f"{'all':<16}" + "".join(f"{totals[each]:>10}" for each in outcomes))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ROOM[:NUMBER]", help="all, if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="for one test, in seconds")
    parser.add_argument("--list", action="store_true", help="tell the faults, and try none")
    parser.add_argument("--rooms", type=Path, default=ROOMS, help="the folder of the tables")
    parser.add_argument("--root", type=Path, default=ROOT, help="the working tree")
    parser.add_argument("--bare", action="store_true", help="do not load torch for all runs first")
    args = parser.parse_args(arguments)
    try:
        faults = chosen(args.names, args.rooms)
    except TableError as error:
        print(error)
        return 2
    if wrong := [text for fault in faults if (text := why_wrong(fault, args.root))]:
        print("\n".join(wrong))
        return 2
    if args.list:
        for fault in faults:
            print(f"{fault.name:<16} {fault.path}: {fault.what}")
        return 0
    if not args.bare:
        load_what_is_large()
    verdicts = try_all(args.root, faults, args.jobs, args.limit)
    print(summary(faults, verdicts))
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    if WRONG in outcomes:
        return 2
    return int(SURVIVED in outcomes)


if __name__ == "__main__":
    sys.exit(main())
