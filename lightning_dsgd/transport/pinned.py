"""Pinned memory for messages that go to a device, and that is used again.

To allocate much of it takes long, and the thread that answers heartbeats must not stand still
meanwhile.  So that thread takes what is free here; where nothing is, it reads into ordinary memory,
and the thread that waits for the message makes pinned memory and copies there first.  Once a
message is on the device, its pinned memory is free: the next one of that size is read into it.

**Threads.**  Any thread may call; single operations of the deque are used, which the interpreter's
lock keeps whole.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.devices import Port

_NUM_KEPT: Final = 16
"""How many free pieces are kept; the others go back to torch's own pool."""


class Pinned:
    """The pieces of one network; their sizes are powers of two, as in torch's own pool."""

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque(maxlen=_NUM_KEPT)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a free piece, of any contents; None where none has that size.  Never waits."""
        size = _size(numel, dtype)
        for _ in range(len(self._free)):
            try:
                piece = self._free.popleft()
            except IndexError:  # other threads have taken the rest
                return None
            if len(piece) == size:
                return piece[: numel * dtype.itemsize].view(dtype)
            self._free.append(piece)
        return None

    def make(self, port: Port, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a piece of pinned memory, a free or a new one."""
        found = self.take(numel, dtype)
        if found is not None:
            return found
        return port.pinned(_size(numel, dtype), torch.uint8)[: numel * dtype.itemsize].view(dtype)

    def give(self, x: Tensor) -> None:
        """Frees a piece that was taken or made here, once nobody reads or writes it any more."""
        piece = torch.empty(0, dtype=torch.uint8)
        self._free.append(piece.set_(x.untyped_storage()))


def _size(numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the piece that holds so many elements."""
    return 1 << max(0, numel * dtype.itemsize - 1).bit_length()
