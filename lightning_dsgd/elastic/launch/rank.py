"""One rank of a node: its newest process, which ends with its parent, and what it writes.

Each start writes a file of its own, `rank_3.0.log`; the first removes those of earlier jobs.  One
rank of the node is shown, too: the first or, once it is lost, the one with the oldest process.  So
it is the one that prints for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from lightning_dsgd.elastic.launch.reserve import Process, Reserve, started


class Rank:
    """Runs one rank's processes, one after the other; the head of the file tells how."""

    def __init__(self, local: int) -> None:
        self.local = local
        self.num_starts = 0
        self.num_counted = 0
        """The number of starts that count: see the head of `supervisor`."""
        self.num_failures = 0
        """How often in a row it has ended before it had trained for a while."""
        self.process: Process | None = None
        self.status: int | None = None
        """The exit status of its newest process."""
        self.again_at: float | None = None
        """When the rank is to be started again."""
        self.log = Path()
        self.is_shown = not local
        self.started_at = 0.0
        self._shown: IO[bytes] | None = None
        self._groups: list[int] = []
        """The groups of processes whose first one, the rank, has ended."""

    def start(
        self, command: Sequence[str], variables: dict[str, str], logs: Path, reserve: Reserve
    ) -> None:
        """Starts the rank's next process."""
        self.show_rest()
        if not self.num_starts:
            for earlier in logs.glob(f"rank_{variables['RANK']}.*.log"):
                earlier.unlink()
        self.log = logs / f"rank_{variables['RANK']}.{self.num_starts}.log"
        self.num_starts += 1
        self.num_counted += 1
        self.status, self.again_at, self.started_at = None, None, time.monotonic()
        self.log.write_bytes(b"")
        self.process = reserve.take(variables, self.log) or started(command, variables, self.log)

    def look(self) -> bool:
        """Returns whether the process has ended since the last look."""
        self._forget_orphans()
        if self.process is None:
            return False
        status = self.process.poll()
        if status is None:
            return False
        self._groups.append(self.process.pid)
        if status:
            self.signal(signal.SIGKILL)  # what it has started and left behind
        self.process, self.status = None, status
        return True

    def _forget_orphans(self) -> None:
        """Has the kernel forget processes of the rank that have ended after it."""
        for group in list(self._groups):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._groups.remove(group)

    def signal(self, signum: int) -> None:
        """Sends a signal: SIGKILL to all of the rank's processes, others to the rank itself."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGKILL:
                os.killpg(self.process.pid, signum)
            elif self.process.returncode is None:
                self.process.send_signal(signum)

    def show(self) -> None:
        """Copies what the process has written since the last time, if the rank is shown."""
        if not self.is_shown:
            return
        if self._shown is None:
            if not self.num_starts or not self.log.is_file():
                return
            self._shown = self.log.open("rb")
        while piece := self._shown.read(1 << 16):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()

    def show_rest(self) -> None:
        """Copies the rest of what a process has written that has ended, and closes its log."""
        self.show()
        if self._shown is not None:
            self._shown.close()
            self._shown = None
