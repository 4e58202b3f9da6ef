"""Pinned memory through which messages come to a device, chunk by chunk.

    message, in ordinary memory of the host  ->  chunk of pinned memory  ->  the device

The thread that waits for a message copies it into chunks, as many as are free.  A chunk is free
once the device has what it held.  A network has at most `NUM_CHUNKS`, so pinned memory has a bound,
however large messages are and however many arrive.  The thread that answers heartbeats neither pins
nor copies.

**Threads.**  Any thread may call; `_lock` guards all fields, and nobody pins or copies under it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.devices import Mark, Port

CHUNK_BYTES: Final = 1 << 21
NUM_CHUNKS: Final = 8
"""How many chunks a network has at most for what arrives: 16 MiB."""


class Pinned:
    """Holds the chunks of one network."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: deque[tuple[Tensor, Mark]] = deque()
        """Chunks, each with the mark behind the copy of what it holds."""
        self._num_made = 0

    def take(self, port: Port) -> Tensor | None:
        """Returns a chunk that nothing reads any more; None where all are in use."""
        with self._lock:
            for _ in range(len(self._used)):
                chunk, mark = self._used.popleft()
                if mark.has_passed():
                    return chunk
                self._used.append((chunk, mark))
            if self._num_made == NUM_CHUNKS:
                return None
            self._num_made += 1
        return port.pinned(CHUNK_BYTES, torch.uint8)

    def give(self, chunk: Tensor, mark: Mark) -> None:
        """Takes a chunk back, which is free once the mark has passed."""
        with self._lock:
            self._used.append((chunk, mark))
