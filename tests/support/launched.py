"""The supervisor of `lightning-dsgd launch` in a process of a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_dsgd.elastic.launch import command
from tests.support.mpi import ROOT
from tests.support.worlds import preloaded

WITHIN_S = 120.0


class Launched:
    """The supervisor of a script of this text, in a process that has torch loaded.

    Ranks start from a process that has imported next to nothing, as that is soon done.

    Args:
        folder: for the script and what is said
        script: its text
        *options: of the supervisor
        arguments: of the script, behind the first, a folder
        to: that folder; None: the same
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        to: Path | None = None,
    ) -> None:
        self.folder = folder
        file = folder / "script.py"
        file.write_text(script)
        given = [
            "--logs",
            str(folder / "logs"),
            "--imports",
            "json",
            *options,
            str(file),
            str(to or folder),
            *arguments,
        ]
        self.process = preloaded.Process(target=run, args=(str(folder), given))

    def __enter__(self) -> Launched:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def send(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def end(self) -> int | None:
        """What it exits with, once it does."""
        self.process.join(WITHIN_S)
        return self.process.exitcode

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def pids(self, count: int) -> list[int]:
        """Of processes that have told theirs."""
        return [int(file.read_text()) for file in await_files(self.folder, "pid_*", count)]


def run(folder: str, given: list[str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ["PYTHONPATH"] = str(ROOT)
    command.main(given)


def await_files(folder: Path, pattern: str, count: int) -> list[Path]:
    deadline = time.monotonic() + WITHIN_S
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} files {pattern}"
        time.sleep(0.02)  # between two looks
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between two looks
