"""Pinned memory for messages that go to a device, and that is used again.

To allocate much of it takes long, and the thread that answers heartbeats must not stand still
meanwhile.  So that thread takes what is free here; where nothing is, it reads into ordinary memory,
and the thread that waits for the message makes pinned memory and copies there first.  Once a
message is on the device, its pinned memory is free: the next one of that size is read into it.

**Limit.**  A network keeps at most `MOST_BYTES` free.  Beyond that it drops pieces of the size that
was given back longest ago; it keeps no piece that is larger by itself.  What it drops goes back to
torch's own pool.  Torch keeps such memory pinned while the process lives, and hands it out again
for tensors of that size.  A message that finds no free piece costs one more copy in the host's
memory.

**Threads.**  Any thread may call; `_lock` guards all fields, and nobody pins or copies under it.
"""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.devices import Port

MOST_BYTES: Final = 1 << 31
"""How much free memory one network keeps, unless it is told otherwise: 2 GiB."""


class Pinned:
    """The pieces of one network; their sizes are powers of two, as in torch's own pool.

    Args:
        most_bytes: how much free memory is kept
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        """Free pieces by size; the size that was given back last is the last key."""
        self._nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a free piece, of any contents; None where none has that size."""
        size = _size(numel, dtype)
        with self._lock:
            if size not in self._free:
                return None
            piece = self._pop(size)
        return piece[: numel * dtype.itemsize].view(dtype)

    def make(self, port: Port, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a piece of pinned memory, a free or a new one."""
        found = self.take(numel, dtype)
        if found is not None:
            return found
        return port.pinned(_size(numel, dtype), torch.uint8)[: numel * dtype.itemsize].view(dtype)

    def give(self, x: Tensor) -> None:
        """Frees a message's pinned memory, once nobody reads or writes it any more.

        Memory that no other message could take is not kept: `x` may be from elsewhere.
        """
        piece = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        size = len(piece)
        if size != _size(size, torch.uint8) or size > self._most_bytes:
            return
        with self._lock:
            pieces = self._free.pop(size, [])
            pieces.append(piece)
            self._free[size] = pieces  # as the last key
            self._nbytes += size
            while self._nbytes > self._most_bytes:
                self._pop(next(iter(self._free)))

    def _pop(self, size: int) -> Tensor:
        pieces = self._free[size]
        if len(pieces) == 1:
            del self._free[size]
        self._nbytes -= size
        return pieces.pop()


def _size(numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the piece that holds so many elements."""
    return 1 << max(0, numel * dtype.itemsize - 1).bit_length()
