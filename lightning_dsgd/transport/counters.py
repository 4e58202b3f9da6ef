"""What a rank has sent, by which engine, how long it has waited, and who is told of the waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Traffic:
    """What one engine has carried away from this rank."""

    bytes: int = 0
    messages: int = 0


@dataclass
class Counters:
    """What this rank has sent and how long it has waited; its lanes share one object."""

    sent: dict[str, Traffic] = field(default_factory=dict)
    """By engine: "TCP" and "MPI" carry messages; "NCCL", or "gloo" on CPUs, makes sums."""
    wait_s: float = 0.0
    comm_s: float = 0.0
    watch: Watch | None = None
    """Is told of every wait, the waits of lanes included."""

    def count(self, engine: str, num_bytes: int, num_messages: int = 1) -> None:
        """Counts what an engine carries away from this rank."""
        traffic = self.sent.setdefault(engine, Traffic())
        traffic.bytes += num_bytes
        traffic.messages += num_messages

    @property
    def bytes_sent(self) -> int:
        """The bytes that all engines have carried."""
        return sum(traffic.bytes for traffic in list(self.sent.values()))

    @property
    def messages_sent(self) -> int:
        """The messages that all engines have carried."""
        return sum(traffic.messages for traffic in list(self.sent.values()))


class Watch(Protocol):
    """Wants to know when a rank waits, for whom, and when an algorithm has its training thread.

    The transport and whoever drives an algorithm tell; times are the transport's.

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
