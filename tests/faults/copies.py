"""A copy of the working tree in which one fault stands at a time, and runs of pytest there.

A run is a fork of this process, which has torch and Lightning loaded, and nothing of the package or
its tests: that saves most of the time that a run would take.  The copy comes first on the path of
the run, and on PYTHONPATH, so that whatever the tests start imports the copy too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.faults.table import Fault

_RUN_LIMITS: Final = 5
"""How many times the limit of one test all tests of a fault may take."""
_OURS = ("tests", "lightning_dsgd")


def load_what_is_large() -> None:
    """Loads what the runs share and no fault stands in."""
    for name in ("torch", "torch.distributed", "lightning", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A garbage collection in a run would touch, and so copy, every page that the runs share.
    gc.collect()
    gc.freeze()


@dataclass
class Run:
    """Pytest under way in a copy: a process, and the file that it writes to."""

    pid: int
    output: Path
    until: float

    def poll(self) -> tuple[int, str] | None:
        """Returns the exit status and what was printed; None while the run goes on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() < self.until:
            return None
        self.end()  # also what the tests have left behind
        if not pid:
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.output.read_text(errors="replace")

    def end(self) -> None:
        """Ends all processes of the run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Copy:
    """A copy of what git knows of, as it stands in the working tree.

    Args:
        root: the working tree
        folder: where the copy is to be
        limit_s: a test that takes longer hangs, and has failed
    """

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self.root, self.folder, self._limit_s = root, folder, limit_s
        self._stamp = 1_000_000_000
        list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(list_files, cwd=root, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, folder / name)

    @contextlib.contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Has the fault stand in the copy for a while."""
        file = self.folder / fault.path
        sound, faulty = file.read_text(), fault.text_with_fault(self.folder)
        self._write(file, faulty)
        try:
            yield
        finally:
            self._write(file, sound)

    def _write(self, file: Path, text: str) -> None:
        """Writes a file at a time of its own, by which Python knows that its bytecode is old."""
        file.write_text(text)
        self._stamp += 10
        os.utime(file, (self._stamp, self._stamp))

    def start(self, arguments: list[str]) -> Run:
        """Starts pytest in the copy."""
        options = ["-x", "-q", "-rfEs", "--timeout", str(self._limit_s), "--no-header", "--tb=line"]
        options += ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
        if "-m" not in arguments:
            options += ["-m", "not exhaustive"]
        output = self.folder.with_suffix(".out")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._run([*options, *arguments], output)
        return Run(pid, output, time.monotonic() + _RUN_LIMITS * self._limit_s)

    def _run(self, arguments: list[str], output: Path) -> None:
        """Runs pytest, in a process of its own that ends with pytest's status."""
        status = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            os.setsid()
            with output.open("w") as file, open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(self.folder)
            for name in list(sys.modules):
                if name.partition(".")[0] in _OURS:
                    del sys.modules[name]
            theirs = ("", str(self.root), os.getcwd())
            sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in theirs)]
            paths = (str(self.folder), os.environ.get("PYTHONPATH", ""))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            os.environ["TESTS_START_METHOD"] = "fork"
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # but for what `start` names
            os.environ["COLUMNS"] = "250"
            importlib.invalidate_caches()
            status = int(pytest.main(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
