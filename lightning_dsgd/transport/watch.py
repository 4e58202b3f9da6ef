"""Who wants to know when a rank waits, for whom, and when it is busy with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Watch(Protocol):
    """Hears from the transport and from whoever drives an algorithm; times are the transport's.

    `waited` is called by whichever thread has waited, lanes included; `exchanged` by the training
    thread.
    """

    def waited(self, begin_s: float, end_s: float, src: int, *, in_lane: bool) -> None:
        """Hears that a thread was held up until rank `src` had sent a message; -1: all ranks."""
        ...

    def exchanged(self, begin_s: float, end_s: float) -> None:
        """Hears that the algorithm had the training thread, waits included."""
        ...


@contextmanager
def exchanging(watch: Watch | None, now: Callable[[], float]) -> Iterator[None]:
    """Tells the watch how long an algorithm has the training thread."""
    if watch is None:
        yield
        return
    begin_s = now()
    yield
    watch.exchanged(begin_s, now())
