"""The Works that `send` returns: of a message that has left, and of one that is still leaving.

**Threads.**  A `Sending` is made and waited for by the thread that sends; the thread that moves the
bytes of the connection, or of MPI, ends it.
"""

from __future__ import annotations

import threading
from typing import Final, Generic, Protocol, TypeVar

from torch import Tensor

from lightning_dsgd.transport.contract import Timeout

T = TypeVar("T")


class Done(Generic[T]):
    """A Work that was done when it was made."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, timeout_s: float | None = None) -> T:
        """Returns the result."""
        return self._result

    def done(self) -> bool:
        """Returns True."""
        return True


SENT: Final = Done(None)
"""The Work of a message that has left at once."""


class Life(Protocol):
    """What a wait asks: whose it is, how long it may take, whether the other ranks are alive."""

    rank: int
    timeout_s: float

    def check_process(self) -> None:
        """Raises in a process that was forked from the one that opened the network."""
        ...

    def check(self, waited_for: str) -> None:
        """Raises `PeerLost` if a rank is lost, and in a forked process."""
        ...


class Sending:
    """The rest of a message that is on its way; keeps the message's tensor alive.

    Args:
        life: tells whether the other ranks are alive
        dst: the rank that is to take the message
        x: the message's tensor
    """

    def __init__(self, life: Life, dst: int, x: Tensor) -> None:
        self._life, self._dst, self._x = life, dst, x
        self._finished = threading.Event()

    def finish(self) -> None:
        """Notes that nobody will read the tensor: it is sent, or the connection has ended."""
        self._finished.set()

    def done(self) -> bool:
        """Returns whether the tensor may change."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the tensor may change; raises `PeerLost` if a rank was lost meanwhile."""
        self._life.check_process()
        what = f"rank {self._dst} to take a message"
        limit = self._life.timeout_s if timeout_s is None else timeout_s
        if not self._finished.wait(min(limit, threading.TIMEOUT_MAX)):
            raise Timeout(f"rank {self._life.rank} has waited {limit:g} s for {what}")
        self._life.check(what)
