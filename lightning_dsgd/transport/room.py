"""Memory for messages, used again.

To touch new memory for the first time takes longer than to copy into it, and the allocator gives
large pieces back to the system, so that they are new each time.  Here a piece is kept, and handed
out again once no tensor uses it any more.
"""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Final

import torch
from torch import Tensor

_SMALLEST_BYTES: Final = 1 << 22
"""Less than that the allocator keeps."""
_STEP: Final = 1 << 20  # pieces are of multiples of it

_lock: Final = threading.Lock()
_pieces: Final[list[mmap.mmap]] = []


def room(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of any contents."""
    nbytes = numel * dtype.itemsize
    if nbytes < _SMALLEST_BYTES:
        return torch.empty(numel, dtype=dtype)
    return torch.frombuffer(_piece(-(-nbytes // _STEP) * _STEP), dtype=dtype, count=numel)


def copy_of(x: Tensor) -> Tensor:
    """A copy of a tensor on the CPU."""
    return room(len(x), x.dtype).copy_(x)


def _piece(nbytes: int) -> mmap.mmap:
    """One that is free and not much too large, else a new one; then the free ones go.

    Otherwise pieces of sizes that nobody asks for any more would stay for ever.
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
