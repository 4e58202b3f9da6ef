"""How much may lie at a rank that nothing there has asked for yet.

    sender      room at the receiver -> the message leaves       no room -> HELD: it stays here
    receiver    receives have taken messages -> TAKEN: room      one is for what is held -> ASKED

**Bound.**  Of one sender's messages at most 72 MiB, or 8 MiB more than two of its largest, lie at a
rank unasked, on their way included; short messages may have 8 MiB more.  What is held stays with
its sender, in the tensor that it has lent or in a copy, until it closes: then all of it leaves.

**Nobody waits for ever.**  `send` never waits, and a message that is held leaves once its receiver
asks for it, whatever lies there.  So each receive gets its message as if there were no bound,
also from a sender whose threads all wait: the threads that serve the news wait for none of them.
A thread may wait for what it has lent to leave: the contract says what must not depend on that.

**News.**  All three are news of the mesh, which wait behind no message.  A rank holds one message
of a mailbox at a time, and the later ones behind it.  Each HELD is answered by one ASKED at most,
and each ASKED is for a receive of its own, so what is asked for lies nowhere for long.

**Threads.**  Any thread sends; `_lock` guards all fields.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

WINDOW_BYTES: Final = 1 << 26
CREDIT_BYTES: Final = 1 << 23
"""A receiver tells a sender what was taken once it is so much."""
_SHORT_BYTES: Final = 4096


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
