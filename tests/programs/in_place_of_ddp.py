"""A plugin of pytest: `Trainer(strategy="ddp")` and its like stand for a strategy of this package.

The environment says for which, as in IN_PLACE_OF_DDP=balanced; "ddp" leaves Lightning's own.  Of
the tests those in CHOSEN run, a list in JSON.  What became of each goes to the file RESULTS, with
whether the test has asked for such a name.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dsgd.trainer.named import strategy_of

LIMIT_S = 300
"""A test that takes longer has failed."""

_STRATEGY = os.environ["IN_PLACE_OF_DDP"]
_RESULTS = Path(os.environ["RESULTS"])
_CHOSEN = set(json.loads(os.environ["CHOSEN"]))
"""Tests, or functions all of whose tests are chosen."""
_PID = int(os.environ.setdefault("RESULTS_OF", str(os.getpid())))
"""The process that writes them; a rank that it starts runs the same command."""
_START_METHODS = {
    "ddp": "popen",
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_notebook": "fork",
}
"""How ranks start, by Lightning's names; what follows them, as `_find_unused...`, is an option."""
if os.environ.get("FORKED") == "1":
    _START_METHODS["ddp_spawn"] = "fork"
_num_made = 0


def _bare(name: str) -> str:
    return name.partition("_find")[0]


def _replaced(name: str, theirs: Any) -> Any:
    """Returns what makes a strategy in the place of one of Lightning's."""

    def make(**options: Any) -> Any:
        global _num_made
        _num_made += 1
        start_method = _START_METHODS[_bare(name)]
        if _STRATEGY == "ddp":
            options = theirs["init_params"] | {"start_method": start_method} | options
            return theirs["strategy"](**options)
        return strategy_of(_STRATEGY, start_method=start_method)

    return make


for _name in [each for each in StrategyRegistry if _bare(each) in _START_METHODS]:
    _theirs = dict(StrategyRegistry[_name])
    StrategyRegistry[_name] = _theirs | {"strategy": _replaced(_name, _theirs), "init_params": {}}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _CHOSEN & {item.nodeid, item.nodeid.partition("[")[0]}]


class TooLong(BaseException):
    """The test has not ended; a test's `except Exception` must not catch this."""


def _too_long(*_: Any) -> None:
    raise TooLong(f"the test took more than {LIMIT_S} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    global _num_made
    _num_made = 0
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line[:1] == "E"]
        _note(report.nodeid, asked=False, outcome="not imported", error="\n".join(lines))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and not report.failed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    error = crash.message if crash and report.failed else ""
    _note(report.nodeid, asked=bool(_num_made), outcome=report.outcome, error=error)


def _note(test: str, **row: Any) -> None:
    """Writes what became of a test, or of a file of tests, unless this is a rank's process."""
    if os.getpid() == _PID:
        with _RESULTS.open("a") as file:
            file.write(json.dumps({"test": test, **row}) + "\n")
