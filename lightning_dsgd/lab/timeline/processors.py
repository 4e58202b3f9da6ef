"""How long the training thread was ready to run, and waited for a processor.

Linux counts that for each thread, in nanoseconds, in the second figure of a file in /proc.  Some
sandboxes have no such file.  There the time in which the thread was on no processor stands for it,
which is also what it slept: it counts only where more threads want to run than there are cores.

The file is opened by the training thread, and says of this thread whoever reads it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_OF_THREAD: Final = "/proc/thread-self/schedstat"
_LOAD: Final = Path("/proc/loadavg")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_MOST_BYTES: Final = 96
SEEN: Final = "seen"
GUESSED: Final = "guessed"


class Waited:
    """Counts how long the thread that makes this has waited for a processor.

    Attributes:
        how: "seen" where the kernel counts it, "guessed" where a thread that sleeps waits too
    """

    def __init__(self, of_thread: str = _OF_THREAD) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(of_thread, os.O_RDONLY)
            self._counted_s(self._file)
        except (OSError, ValueError, IndexError):
            self.close()
        self.how = GUESSED if self._file is None else SEEN

    def seconds(self) -> float:
        """Returns for how long, since any moment that stays the same."""
        if self._file is None:
            return time.monotonic() - time.thread_time()
        return self._counted_s(self._file)

    def close(self) -> None:
        """Closes the file; may be called again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @staticmethod
    def _counted_s(file: int) -> float:
        return 1e-9 * int(os.pread(file, _MOST_BYTES, 0).split()[1])


def usable_cores(quota: Path = _QUOTA) -> int:
    """Returns how many cores this process may use: those of its mask, or of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        most, period = quota.read_text().split()
        allowed = max(1, round(int(most) / int(period)))
    except (OSError, ValueError):  # none, or "max"
        return cores or 1
    return min(cores or 1, allowed)


def num_running(load: Path = _LOAD) -> int | None:
    """Returns how many threads of this machine run or want to, besides the one that asks."""
    try:
        running = int(load.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, running - 1)
