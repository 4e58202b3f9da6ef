"""What OpenMP needs of a process before it forks others that go on to compute."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

_PAUSE_HARD: Final = 2  # omp_pause_hard


def end_threads() -> bool:
    """Ends OpenMP's threads for this thread; returns whether a forked process may have its own.

    A forked process with GNU's OpenMP believes that its parent's threads are there too, and waits
    for them in its first parallel region, for ever.  Threads are started again where needed.
    Other OpenMPs (LLVM's, Intel's) see to that themselves.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux, where torch brings another OpenMP than GNU's
        return True
    files = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    try:
        results = [
            ctypes.CDLL(file).omp_pause_resource_all(_PAUSE_HARD)
            for file in sorted(files)
            if Path(file).name.startswith("libgomp")
        ]
    except (AttributeError, OSError):  # it is older than OpenMP 5.0, or its file is gone
        return False
    return not any(results)
