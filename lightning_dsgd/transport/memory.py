"""How much memory messages may take: of this rank, and at the others.

window     how many bytes may lie at another rank that nothing there has asked for: `flow`
limit      how large a message may be that comes; a larger one is no message of this job's
pinned     the chunks by which messages come to a device
"""

from __future__ import annotations

from lightning_dsgd.transport.contract import LEAST_LIMIT
from lightning_dsgd.transport.flow import Window
from lightning_dsgd.transport.frames import MEMORY_BYTES
from lightning_dsgd.transport.pinned import Pinned


class Memory:
    """Holds the bounds of one network's messages on this rank."""

    def __init__(self) -> None:
        self.window = Window()
        self.pinned = Pinned()
        self._limit: int | None = None

    def expect_at_most(self, nbytes: int) -> None:
        """Limits the bytes of a message: see `Transport.expect_at_most`."""
        self._limit = max(nbytes, self._limit or LEAST_LIMIT)

    @property
    def most_bytes(self) -> int:
        """The most bytes that a message may have."""
        return MEMORY_BYTES if self._limit is None else min(self._limit, MEMORY_BYTES)
