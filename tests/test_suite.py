"""A test that fails runs once more, alone, and is counted; one that fails twice fails the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.conftest import pytest_collection_modifyitems
from tests.suite import UNSTEADY

ROOT = Path(__file__).parents[1]
TESTS = """
from pathlib import Path
import pytest

def fails_at_first(name):
    before = Path(name)
    seen = before.exists()
    before.touch()
    assert seen, "seed 17"

def test_once():
    fails_at_first("once")

@pytest.mark.xdist_group("a@b")
@pytest.mark.parametrize("name", ["c@d"])
def test_once_in_a_group(name):
    print("printed by", name)
    fails_at_first(name)
"""
NEVER = """
def test_never():
    assert False, "seed 18"
"""


@pytest.mark.exhaustive
def test_what_fails_runs_once_more(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"test_it.py::test_once": ["2026-01-01"]}))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.suite", "--counts", str(counts), *options]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    done = run("--numprocesses", "1", "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    names = ("test_once", "test_once_in_a_group[c@d]")
    once = [f"test_it.py::{name}" for name in names]
    dates = {name: len(days) for name, days in json.loads(counts.read_text()).items()}
    assert dates == dict(zip(once, (2, 1), strict=True))
    listed = done.stdout.partition("= unsteady")[2]
    assert "seed 17" in listed
    assert "printed by c@d" in listed
    (tmp_path / "test_it.py").write_text(NEVER)
    assert run().returncode == 1
    assert json.loads(counts.read_text()).keys() == {*once}


def test_no_test_fails_where_srun_is_installed(tmp_path, monkeypatch) -> None:
    """Lightning warns that srun is not used, and every other warning is an error."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    SLURMEnvironment()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.world_size == 1


def test_a_hang_is_noticed_in_a_minute_but_for_what_takes_long() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] == 60
    now, later, own = Item(), Item(exhaustive=()), Item(exhaustive=(), timeout=(600,))
    pytest_collection_modifyitems([now, later, own])  # type: ignore[list-item]
    limits = [each.marks.get("timeout") for each in (now, later, own)]
    assert limits == [None, (300,), (600,)]


class Item:
    """A test as pytest gives it to `conftest`, with marks and their arguments."""

    def __init__(self, **marks: tuple[int, ...]) -> None:
        self.marks = marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark.args


def test_no_test_is_unsteady_again_and_again() -> None:
    dates = json.loads(UNSTEADY.read_text())
    assert not {test: len(days) for test, days in dates.items() if len(days) > 2}
