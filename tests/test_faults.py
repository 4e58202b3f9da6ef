"""The tables of faults are true, and the tool that tries them tells a survivor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.table import ROOMS, TableError, chosen, read

ROOT = Path(__file__).parents[1]


def test_every_old_text_stands_once_in_its_file() -> None:
    for fault in chosen([]):
        compile(fault.text_with_fault(ROOT), fault.path, "exec")
        files = [name.partition("::")[0] for name in fault.arguments if name.startswith("tests/")]
        assert files, f"{fault.name} names no tests"
        assert all((ROOT / name).exists() for name in files), fault.name


def test_no_fault_stands_twice() -> None:
    assert [*ROOMS.glob("*.txt")]
    texts = [(f.path, f.text_with_fault(ROOT)) for f in chosen([])]
    assert len(set(texts)) == len(texts)


TABLE = """
= lightning_dsgd/toy.py
$ tests/test_toy.py
# It doubles, and one more.
-     return 2 * x
+     return 2 * x + 1
# It takes no zero, which no test asks.
- x >= 0
+ x > 0
$ tests/test_toy.py -k other -m exhaustive
# It fails in a process that a test starts.
-     assert x >= 0
+     assert x >= 0
+     assert sys.argv[0] != "-c"
"""
TOY = """
import sys

def double(x):
    assert x >= 0
    return 2 * x
"""
TESTS = """
import pytest, subprocess, sys
from lightning_dsgd.toy import double

def test_that_it_doubles():
    assert double(2) == 4

@pytest.mark.exhaustive
def test_in_another_process():
    code = "from lightning_dsgd.toy import double; double(3)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A working tree: a package, its tests and a table of three faults, of which one survives."""
    files = {
        "pytest.ini": "[pytest]\nmarkers = exhaustive\n",
        "lightning_dsgd/__init__.py": "",
        "lightning_dsgd/toy.py": TOY,
        "tests/test_toy.py": TESTS,
        "rooms/toy.txt": TABLE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_a_survivor_is_told_and_ends_the_command_with_1(toy: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--bare"]
    command += ["--root", str(toy), "--rooms", str(toy / "rooms")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    first, second, third = done.stdout.splitlines()[:3]
    assert first.endswith("noticed by tests/test_toy.py::test_that_it_doubles")
    assert "SURVIVED: It takes no zero, which no test asks." in second
    assert third.endswith("noticed by tests/test_toy.py::test_in_another_process")
    counts = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert counts == [["toy", "2", "1", "0"], ["all", "2", "1", "0"]]
    assert "2 * x + 1" not in (toy / "lightning_dsgd/toy.py").read_text()
    assert subprocess.run([*command, "toy:1"], cwd=ROOT, capture_output=True).returncode == 0


def test_a_table_that_is_not_true_any_more_names_the_fault(toy: Path) -> None:
    for text, expected in (("", "stands 0 times"), (2 * TOY, "stands 2 times")):
        (toy / "lightning_dsgd/toy.py").write_text(text)
        with pytest.raises(TableError, match=rf"toy:1 \(It doubles.*{expected}"):
            chosen(["toy"], toy / "rooms")[0].text_with_fault(toy)
    with pytest.raises(TableError, match="a room must be one of toy, got 'no'"):
        chosen(["no"], toy / "rooms")
    (toy / "rooms/toy.txt").write_text("* what is this\n")
    with pytest.raises(TableError, match="must begin with one of"):
        read(toy / "rooms/toy.txt")
