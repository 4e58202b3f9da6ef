"""A pool of buffers for messages.

To touch new memory for the first time takes longer than to copy into it, and the allocator gives
large pieces back to the system, so that they are new each time.  Here a piece is kept, and handed
out again once no tensor uses it any more.

**Threads.**  Any thread may ask for a buffer; `_lock` guards the list of pieces.  A piece is free
when only the list refers to it: that its reference count tells this at once, and cannot change
between the count and the decision for a piece that nobody else has, relies on the interpreter's
lock.  `fork` takes the lock, so that it is free in the child.  It can be taken again by the thread
that has it, as a signal handler may fork in the midst of `_piece`.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from typing import Final

import torch
from torch import Tensor

_SMALLEST_BYTES: Final = 1 << 22
"""The allocator keeps smaller pieces itself."""
_STEP: Final = 1 << 20  # the size of a piece is a multiple of it

_lock: Final = threading.RLock()
_pieces: Final[list[mmap.mmap]] = []

os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def buffer(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor on the CPU, of any contents."""
    nbytes = numel * dtype.itemsize
    if nbytes < _SMALLEST_BYTES:
        return torch.empty(numel, dtype=dtype)
    return torch.frombuffer(_piece(-(-nbytes // _STEP) * _STEP), dtype=dtype, count=numel)


def copy_of(x: Tensor) -> Tensor:
    """Returns a copy of `x` on the CPU."""
    return buffer(len(x), x.dtype).copy_(x)


def _piece(nbytes: int) -> mmap.mmap:
    """Returns a free piece that is not much too large, or else a new one, and drops the free ones.

    If they were kept, pieces of sizes that nobody asks for any more would stay for ever.
    """
    with _lock:
        free = [i for i in range(len(_pieces)) if sys.getrefcount(_pieces[i]) == 2]
        fitting = [i for i in free if nbytes <= len(_pieces[i]) <= nbytes + nbytes // 4]
        if fitting:
            return _pieces[fitting[0]]
        for i in reversed(free):
            del _pieces[i]
        # Private: by default a forked process would write into the same memory.
        piece = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            piece.madvise(mmap.MADV_HUGEPAGE)
        _pieces.append(piece)
        return piece
