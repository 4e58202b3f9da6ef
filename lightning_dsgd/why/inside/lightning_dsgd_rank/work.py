"""Whether a rank works: the processor's time and the bytes of its process and its children.

A rank that computes, compiles, validates, reads or saves is late, but it will come.  One that does
none of these has stopped.  The threads of a process are counted together, so a rank counts as
working where only a thread in its background does.  A main thread that is ready to run, and waits
for a processor of a busy machine, works too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

LEAST_SHARE = 0.1
"""A rank works if it has, or wants, a processor for this share of the time, or more."""
LEAST_BYTES_PER_S = 100_000
"""A rank works if it reads or writes so much, or more; the recorder itself writes a hundredth."""
_CHILDREN_EVERY_S = 5.0


class Work:
    """Sees how much this process and its children have done since the last look."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._worked_s = self._looked_s
        self._cpu_s = _wanted_s()
        self._bytes = _bytes_of("self")
        self._of_children = (0.0, 0)
        self._children_looked_s = self._looked_s

    def look(self) -> dict[str, Any]:
        """Returns what to record: the share of a processor, and for how long the rank has idled."""
        now, cpu_s, moved = time.monotonic(), _wanted_s(), _bytes_of("self")
        passed = max(1e-6, now - self._looked_s)
        share = (cpu_s - self._cpu_s) / passed
        rate = (moved - self._bytes) / passed
        self._looked_s, self._cpu_s, self._bytes = now, cpu_s, moved
        works = share >= LEAST_SHARE or rate >= LEAST_BYTES_PER_S
        # Children are asked seldom, and only where the rank itself does nothing.
        if works:
            self._worked_s = now
        elif now - self._children_looked_s >= _CHILDREN_EVERY_S:
            if self._children_work(now - self._children_looked_s):
                self._worked_s = now
            self._children_looked_s = now
        return {"processor": round(share, 3), "idle_s": round(now - self._worked_s, 2)}

    def _children_work(self, passed: float) -> bool:
        """Returns whether the children have done much since they were asked last."""
        found = [_of_process(pid) for pid in _descendants()]
        total = sum(cpu for cpu, _ in found), sum(moved for _, moved in found)
        before, self._of_children = self._of_children, total
        cpu_s, moved = total[0] - before[0], total[1] - before[1]
        return cpu_s / passed >= LEAST_SHARE or moved / passed >= LEAST_BYTES_PER_S


def _wanted_s() -> float:
    """Returns for how long this process had a processor, or its main thread waited for one."""
    try:
        waited_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        waited_ns = 0
    return time.process_time() + 1e-9 * waited_ns


def _bytes_of(process: str) -> int:
    """Returns how many bytes a process has read and written, by the kernel's count."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    except (OSError, ValueError, IndexError):
        return 0


def _of_process(pid: int) -> tuple[float, int]:
    """Returns the processor's time of a process, in seconds, and its bytes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100, _bytes_of(str(pid))
    except (OSError, ValueError, IndexError):
        return 0.0, 0


def _descendants() -> list[int]:
    """Returns the processes that this one has started, and those that they have."""
    found: list[int] = []
    todo = ["self"]
    while todo and len(found) < 256:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            try:
                pids = [int(word) for word in file.read_text().split()]
            except (OSError, ValueError):
                continue
            found += pids
            todo += map(str, pids)
    return found
