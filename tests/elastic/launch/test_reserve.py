"""Ranks that start from a process with its imports done, as new interpreters do, and end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.elastic.launch.reserve import has_to_import_by_itself
from tests.elastic.launch.test_supervisor import TRAINS
from tests.support.launched import Launched, is_alive, until

FACTS = """
import json, os, pickle, signal, sys, threading
had = "torch" in sys.modules
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

class Pickled: pass

def tell(number: int = 0):
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
        "main": [__file__, __name__, __spec__, type(__builtins__).__name__],
        "annotations": str(tell.__annotations__),
        "pickled": pickle.loads(pickle.dumps(Pickled)) is sys.modules["__main__"].Pickled,
        "names": sorted(set(globals()) - {"_"}), "excepthook": sys.excepthook is sys.__excepthook__,
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "signals": [str(signal.getsignal(s)) for s in range(1, 32)],
        "files": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
        "num_files": len(os.listdir("/proc/self/fd")),
        "out": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
        "threads": [torch.get_num_threads(), threading.current_thread() is threading.main_thread()],
        "rank_zero": rank_zero_only.rank, "nice": os.nice(0),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k != "MASTER_PORT"},
    }, indent=1).replace("/" + sys.argv[2], ""))

def draw():
    import numpy, random
    drawn = {
        "random": random.random(), "numpy": float(numpy.random.rand()),
        "seed": torch.initial_seed(), "mask": torch.nn.Dropout()(torch.ones(64)).tolist(),
        "order": torch.randperm(64).tolist(),
    }
    with open(f"{sys.argv[1]}/drawn_{os.environ['RANK']}", "w") as file: json.dump(drawn, file)

tell()
draw()
if sys.argv[2] == "reserve": assert had
rank = int(os.environ["RANK"])
if rank == 0: raise ValueError("no")
if rank == 1: os.kill(os.getpid(), signal.SIGINT); threading.Event().wait()
def late(): threading.main_thread().join(); print("late")
if rank == 2: threading.Thread(target=late).start(); sys.exit("a text")
"""


def facts(folder: Path, *options: str) -> list[str]:
    folder.mkdir()
    arguments = (folder.name,)
    with Launched(folder, FACTS, "--ranks", "3", *options, arguments=arguments) as job:
        assert job.end() == 1
    ends = [line for line in job.said("stderr").splitlines() if " ended with " in line]
    logs = [job.said(f"logs/rank_{rank}.0.log") for rank in range(3)]
    check_chance([json.loads(job.said(f"drawn_{rank}")) for rank in range(3)])
    texts = [text.replace(str(folder), "") for text in [*sorted(ends), *logs]]
    return [text.replace(f'"{folder.name}"', '"argument"') for text in texts]


def check_chance(drawn: list[dict[str, Any]]) -> None:
    """Ranks with one order of samples, or one dropout mask, would train alike without an error."""
    for name in drawn[0]:
        assert len({json.dumps(each[name]) for each in drawn}) == len(drawn), name


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_finds_and_leaves_what_one_in_a_new_interpreter_does(tmp_path):
    """Each rank also has a chance of its own: see `check_chance`."""
    new, forked = facts(tmp_path / "new", "--imports", ""), facts(tmp_path / "reserve", *DEFAULT)
    assert len(new) == len(forked) == 6
    for text, same in zip(new, forked, strict=True):
        assert text == same


DEFAULT = ("--imports", "lightning.pytorch,lightning_dsgd.trainer.named")

# Each start tells its number and whether it was imported by the process that waits.
WAITS = (
    "import sys; had = 'slow' in sys.modules\n"
    + TRAINS
    + """
tell(f"start_{os.getpid()}", str(had))
while not Path(sys.argv[1], "over").exists(): time.sleep(0.05)
if rank == "0": register.say_over()
"""
)
SLOW = "import os; from pathlib import Path\n"
SLOW += 'Path(__file__).with_name(f"reserve_{os.getpid()}").touch()\n'


def test_a_rank_starts_again_with_its_imports_done(tmp_path):
    """Also where the process that has made them has been killed."""
    (tmp_path / "slow.py").write_text(SLOW)
    options = ("--ranks", "3", "--max-restarts", "1000", "--imports", "slow")

    def starts() -> dict[int, bool]:
        files = tmp_path.glob("start_*_1")
        return {int(file.name.split("_")[1]): file.read_text() == "True" for file in files}

    def kill(known: dict[int, bool], *processes: int) -> tuple[int, bool]:
        """Returns the process that starts when these are killed, and what it had."""
        for process in processes:
            os.kill(process, signal.SIGKILL)
        until(lambda: len(starts()) > len(known))
        return (starts().items() - known.items()).pop()

    with Launched(tmp_path, WAITS, *options, arguments=("joinable",)) as job:
        newest = kill({})
        assert newest[1]
        newest = kill(starts(), newest[0])
        while not newest[1]:  # the process that waits was not ready yet
            newest = kill(starts(), newest[0])
        others = [int(file.name.split("_")[1]) for file in tmp_path.glob("reserve_*")]
        waits = [pid for pid in others if pid not in starts() and is_alive(pid)]
        kill(starts(), *waits, newest[0])
        (tmp_path / "over").touch()
        assert job.end() == 0, job.said("stderr")
    until(lambda: not any(map(is_alive, [*starts(), *others])))


def test_what_cannot_be_imported_is_refused(tmp_path):
    with Launched(tmp_path, "", "--ranks", "1", "--imports", "nowhere") as job:
        assert job.end() == 2
    assert "got nowhere: ModuleNotFoundError: No module named 'nowhere'" in job.said("stderr")


@pytest.mark.parametrize(
    ("script", "sets"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", True),
        ("import os\nif 1:\n    os.environ.setdefault('MKL_NUM_THREADS', '4')", True),
        ("import sys\nsys.path.insert(0, 'mine')\nimport torch", True),
        ("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '4'", False),
        ("no Python", False),
    ],
)
def test_a_script_that_has_to_import_by_itself_first_imports_by_itself(script, sets, tmp_path):
    (tmp_path / "script.py").write_text(script)
    assert has_to_import_by_itself(tmp_path / "script.py") is sets
