"""A test that fails runs once more, alone, and is counted; one that fails twice fails the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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

def test_steady():
    pass

@pytest.mark.xdist_group("site")
def test_once():
    fails_at_first("once")

@pytest.mark.xdist_group("a@b")
@pytest.mark.parametrize("name", ["a b", "c@d"])
def test_once_in_a_group(name):
    print("printed by", name)
    fails_at_first(name)
"""
ALWAYS = """
def test_never():
    assert False, "seed 18"
"""


@pytest.mark.parametrize(
    ("always", "parallel"), [(True, []), (False, ["--numprocesses", "1", "--dist", "loadgroup"])]
)
def test_what_fails_runs_once_more(tmp_path: Path, always: bool, parallel: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    (tmp_path / "test_it.py").write_text(TESTS + (ALWAYS if always else ""))
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"test_it.py::test_once": ["2026-01-01"]}))
    command = [sys.executable, "-m", "tests.suite", "--counts", str(counts), *parallel]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    names = ("test_once", "test_once_in_a_group[a b]", "test_once_in_a_group[c@d]")
    once = [f"test_it.py::{name}" for name in names]
    dates = {name: len(days) for name, days in json.loads(counts.read_text()).items()}
    if always:
        assert done.returncode == 1
        assert dates == {"test_it.py::test_once": 1}
        return
    assert done.returncode == 0, done.stdout
    assert dates == dict(zip(once, (2, 1, 1), strict=True))
    listed = done.stdout.partition("= unsteady")[2]
    assert "seed 17" in listed
    assert "printed by a b" in listed
    assert all(name in listed for name in once)


def test_no_test_is_unsteady_again_and_again() -> None:
    dates = json.loads(UNSTEADY.read_text())
    assert not {test: len(days) for test, days in dates.items() if len(days) > 2}
