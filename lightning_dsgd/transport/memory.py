"""How much memory messages may take: at the other ranks, in one message, and where it is pinned.

**The window**: how much may lie at a rank that nothing there has asked for yet.

    sender      room at the receiver -> the message leaves       no room -> HELD: it stays here
    receiver    receives have taken messages -> TAKEN: room      one is for what is held -> ASKED

*Bound.*  Of one sender's messages at most 72 MiB, or 8 MiB more than two of its largest, lie at a
rank unasked, on their way included; short messages may have 8 MiB more.  What is held stays with
its sender, in the tensor that it has lent or in a copy, until it closes: then all of it leaves.

*Nobody waits for ever.*  `send` never waits, and a message that is held leaves once its receiver
asks for it, whatever lies there.  So each receive gets its message as if there were no bound,
also from a sender whose threads all wait: the threads that serve the news wait for none of them.
A thread may wait for what it has lent to leave: the contract says what must not depend on that.

*News.*  All three are news of the mesh, which wait behind no message.  A rank holds one message
of a mailbox at a time, and the later ones behind it.  Each HELD is answered by one ASKED at most,
and each ASKED is for a receive of its own, so what is asked for lies nowhere for long.

**The limit**: how large a message may be that comes; a larger one is no message of this job's.

**Pinned memory**: the chunks by which messages come to a device.

    message, in ordinary memory of the host  ->  chunk of pinned memory  ->  the device

The thread that waits for a message copies it into chunks, as many as are free.  A chunk is free
once the device has what it held.  A network has at most `NUM_CHUNKS`, so pinned memory has a bound,
however large messages are and however many arrive.  The thread that answers heartbeats neither pins
nor copies.

**Threads.**  Any thread may call; the `_lock` of a window, and of the pinned chunks, guards all
their fields, and nobody pins or copies under it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.devices import Mark, Port
from lightning_dsgd.transport.contract import LEAST_LIMIT
from lightning_dsgd.transport.messages import MEMORY_BYTES

WINDOW_BYTES: Final = 1 << 26
CREDIT_BYTES: Final = 1 << 23
"""A receiver tells a sender what was taken once it is so much."""
_SHORT_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 21
NUM_CHUNKS: Final = 8
"""How many chunks a network has at most for what arrives: 16 MiB."""


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


class Window:
    """The room that this rank's messages have at each other rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unasked: Counter[int] = Counter()
        """The bytes sent to each rank that no receive has taken, as far as is known here."""
        self._largest: Counter[int] = Counter()
        self._asked: set[tuple[int, bytes]] = set()

    def admit(self, dst: int, nbytes: int) -> bool:
        """Returns whether there is room for a message, and takes that room."""
        with self._lock:
            largest = self._largest[dst] = max(nbytes, self._largest[dst])
            bound = max(WINDOW_BYTES, 2 * largest) + CREDIT_BYTES
            if nbytes <= _SHORT_BYTES:
                bound += CREDIT_BYTES
            if self._unasked[dst] + nbytes > bound:
                return False
            self._unasked[dst] += nbytes
        return True

    def admit_if_asked(self, dst: int, mailbox: bytes, nbytes: int) -> bool:
        """Returns whether the receiver has asked for the message that is held for a mailbox."""
        with self._lock:
            if (dst, mailbox) not in self._asked:
                return False
            self._asked.discard((dst, mailbox))
            self._unasked[dst] += nbytes
        return True

    def hear_taken(self, dst: int, nbytes: int) -> None:
        """Hears that receives have taken so many bytes of this rank's."""
        with self._lock:
            self._unasked[dst] -= nbytes

    def hear_asked(self, dst: int, mailbox: bytes) -> None:
        """Hears that a receive is for what is held for this mailbox."""
        with self._lock:
            self._asked.add((dst, mailbox))


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
