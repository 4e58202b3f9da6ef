"""Who wants to know when a rank waits, for whom, and when it is busy with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Watch(Protocol):
    """Is told by the transport and by those who drive an algorithm; times are the transport's.

    `waited` is called by whichever thread has waited, lanes included; `exchanged` by the training
    thread.
    """

    def waited(self, begin_s: float, end_s: float, src: int, *, in_lane: bool) -> None:
        """A thread was held up until a message of rank `src` came; -1: of all ranks together."""
        ...

    def exchanged(self, begin_s: float, end_s: float) -> None:
        """The algorithm had the training thread, waits included."""
        ...


@contextmanager
def exchanging(watch: Watch | None, now: Callable[[], float]) -> Iterator[None]:
    """Around what an algorithm does in the training thread."""
    if watch is None:
        yield
        return
    begin_s = now()
    yield
    watch.exchanged(begin_s, now())
