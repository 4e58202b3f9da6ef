"""What an algorithm may ask of the network: the promises that every transport keeps.

Every tensor on the wire is one-dimensional and contiguous.  All operations return a `Work` at once;
`Work.wait()` gives the result.

**Who owns what.**  `send` takes a copy of what it could not hand over at once, so its argument may
change as soon as the call returns, and its Work may be dropped.  Every other operation works on its
argument in place or keeps it: leave it alone until the Work is done.

**Order.**  Messages between one pair of ranks with one tag arrive in the order in which they were
sent.  Collectives of one group are matched by the order in which each member calls them; a member
that calls another operation than the others gets a `TransportError` that names both.  A collective
moves on while somebody waits for it or asks whether it is done, so wait for several in the same
order everywhere.  Point-to-point messages, the collectives of each group, and every lane and
sub-transport are independent channels: none can take a message meant for another.

**Lanes.**  `spawn_lane(fn)` runs `fn(lane_transport)` in a thread beside the training thread, on
channels of its own.  Ranks that spawn their lanes in the same order talk to each other's.  The
threads of one rank talk by sending to their own rank: that is immediate and not counted.  Any
thread of a rank may send on any of its endpoints; only the thread that an endpoint was made for
receives on it.

**Failure.**  Once a rank is lost, every wait on every rank raises `PeerLost` naming it, waits that
had nothing to do with it included.  A wait that takes longer than `timeout_s` raises `Timeout`,
saying who waited for what.  Nothing waits for ever.

**Counting.**  `bytes_sent` counts the payload that left this rank, lanes included; `messages_sent`
the messages.  `wait_s` is the time that the training thread was held up, lanes excluded; `comm_s`
the time from the start to the completion of every operation that somebody waited for, lanes
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, runtime_checkable

from torch import Tensor

ANY: Final = -1
"""As `src` of a receive: from whichever rank sends first."""

T_co = TypeVar("T_co", covariant=True)


class TransportError(RuntimeError):
    """The network, or the way it was used, is broken."""


class Timeout(TransportError):
    """A wait took longer than it may."""


class PeerLost(TransportError):
    """A rank died, stopped answering, failed or left while others still needed it.

    Args:
        rank: the rank that is gone
        reason: what became of it
        waited_for: what this rank was doing or waiting for when it heard of it
    """

    def __init__(self, rank: int, reason: str, waited_for: str = "") -> None:
        self.rank = rank
        self.reason = reason
        self.waited_for = waited_for
        super().__init__(
            f"rank {rank} {reason}" + (f"; noticed in: {waited_for}" if waited_for else "")
        )


class Deadlock(TransportError):
    """Every rank waits for another: only the simulated world can tell, and it tells at once."""


class LaneStopped(BaseException):
    """Raised inside a lane, out of whatever it waits for, when the lane is told to stop."""


@dataclass
class Counters:
    """What this rank has sent and how long it waited; one for all lanes of a rank."""

    bytes_sent: int = 0
    messages_sent: int = 0
    wait_s: float = 0.0
    comm_s: float = 0.0


class Work(Protocol[T_co]):
    """Something under way."""

    def wait(self, timeout_s: float | None = None) -> T_co:
        """The result, once it is there; `Timeout` after `timeout_s` (default: the transport's).

        With `math.inf`, for lanes that serve, only the loss of a rank or the end of the lane ends
        it.
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once.  Never blocks; moves a collective on."""
        ...


class Receipt(Work[Tensor], Protocol):
    """A receive under way; `source` is known once it is done."""

    source: int


class Lane(Protocol):
    """A thread beside the training thread."""

    @property
    def net(self) -> Transport:
        """Its endpoint, on which the other threads of its rank may send too."""
        ...

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the lane, also one that is blocked in a receive, and raises what it failed with."""
        ...

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the lane's function has returned, and raises what it failed with."""
        ...

    def check(self) -> None:
        """Raises what the lane failed with, if it has."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of the network; `group` is a sequence of ranks, None for all."""

    rank: int
    world_size: int
    timeout_s: float
    counters: Counters

    def now(self) -> float:
        """Seconds on this transport's clock, real or virtual."""
        ...

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Work[None]:
        """Sends `x`, which the caller may change at once; without `copy`, once the Work is done."""
        ...

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Receipt:
        """The next message from `src` (or ANY) with this tag.

        A new tensor of any length, of the dtype and on the device of `like`.
        """
        ...

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        """Puts the sum over the group into `x`, the same to the bit on every member."""
        ...

    def all_gather(self, x: Tensor, group: Sequence[int] | None = None) -> Work[list[Tensor]]:
        """Every member's tensor, in the order of the group; lengths may differ."""
        ...

    def all_to_all(
        self, xs: Sequence[Tensor], group: Sequence[int] | None = None
    ) -> Work[list[Tensor]]:
        """`xs[i]` goes to the i-th member; gives what each member sent here; lengths may differ."""
        ...

    def broadcast(self, x: Tensor, src: int, group: Sequence[int] | None = None) -> Work[Tensor]:
        """Overwrites `x` with that of rank `src`."""
        ...

    def barrier(self, group: Sequence[int] | None = None) -> Work[None]:
        """Done once every member has called it."""
        ...

    def sub(self, name: str) -> Transport:
        """The same network with channels of its own, for the same thread."""
        ...

    def spawn_lane(self, fn: Callable[[Transport], None], name: str = "lane") -> Lane:
        """Runs `fn(lane_transport)` beside this thread."""
        ...

    def check(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""
        ...
