"""Runs pytest; what fails runs once more, alone, when all else is done.

    python -m tests.suite [--counts FILE] ARGUMENTS OF PYTEST

Where all of these pass the second time, the run passes.  It ends with a list of them, each with
what it printed when it failed, and the file counts them.  A test that stands there three times
fails `tests/test_suite.py` until it is mended or gone: commit the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

UNSTEADY = Path(__file__).with_name("unsteady.json")
_MOST_SECOND_TRIES = 5
"""More failures than these are no race of a single test."""
_GROUP = re.compile(r"(\]|::\w+)@.*$")
"""What xdist adds to the names of tests that share a worker."""


class Failures:
    """What each failed test has printed, in the order of failures: a plugin of pytest."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            test = _GROUP.sub(r"\1", report.nodeid)
            sections = "".join(f"\n-- {title} --\n{text}" for title, text in report.sections)
            self.said[test] = f"{self.said.get(test, '')}{report.longrepr}{sections}"


def passes_alone(test: str) -> bool:
    """Whether it passes in a process of its own, with nothing beside it."""
    print(f"\nOnce more, alone: {test}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", test]).returncode == pytest.ExitCode.OK


def count(tests: list[str], file: Path) -> dict[str, list[str]]:
    """Adds today to the dates on which each of these tests was unsteady."""
    dates: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    for test in tests:
        dates.setdefault(test, []).append(str(datetime.date.today()))
    file.write_text(json.dumps(dates, indent=1, sort_keys=True) + "\n")
    return dates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=Path, default=UNSTEADY)
    args, arguments = parser.parse_known_args()
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    said = failures.said
    if status != pytest.ExitCode.TESTS_FAILED or len(said) > _MOST_SECOND_TRIES:
        return status
    if not all(passes_alone(test) for test in said):
        return status
    dates = count(list(said), args.counts)
    for test, text in said.items():
        print(f"\n= unsteady, {len(dates[test])} times by {args.counts.name}: {test} =\n{text}")
    print(f"\n{len(said)} unsteady, failed among the others and passed alone: {', '.join(said)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
