"""What an algorithm may ask of the network: the promises that every transport keeps.

Every tensor on the wire is one-dimensional and contiguous.  All operations return a `Work` at once;
`Work.wait()` gives the result.

**Who owns what.**  `send` takes a copy of what it could not hand over at once, so its argument may
change as soon as the call returns, and its Work may be dropped.  Every other operation works on its
argument in place or keeps it: leave it alone until the Work is done.

**Room.**  `send` never waits.  Between processes a rank has room for two messages of each other
rank; a third one stays at its sender until a receive asks for it.  So a rank that lends messages
(`copy=False`) and waits until they have left must first begin to receive what the other ranks send
it: these ranks may be waiting for their own messages to leave.

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
receives on it.  `Lane.tell` sends to a lane of the own rank, too, but the message is there only
once the device has done what the thread had queued: the lane never waits for a slow kernel.

**Failure.**  Once a rank is lost, every wait on every rank raises `PeerLost` naming it, waits that
had nothing to do with it included.  A wait that takes longer than `timeout_s` raises `Timeout`,
saying who waited for what.  Nothing waits for ever.  A rank that cannot go on calls `fail`, which
tells the others why; one whose work is done calls `close`, once no other rank needs it.  The first
loss is the one that all ranks are told of, whatever follows from it.  A network on which all ranks
have called `views.survive` goes on after a loss, in a view of the ranks left: see `Views`.  But it
ends on all ranks once one has failed with `Diverged`: what they train is not finite.

**Processes.**  A transport between processes belongs to the one that opened it.  In a process that
was forked from that one, `is_forks` is true, whatever would use the network raises
`TransportError`, and what would end it does nothing.

**Counting.**  `sent` counts the payload that left this rank and the messages, lanes included, by
the engine that carries them; `bytes_sent` and `messages_sent` are the sums over all engines.
`wait_s` is the time that the training thread was held up, lanes excluded; `comm_s`
the time from the start to the completion of every operation that somebody waited for, lanes
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from lightning_dsgd.transport.counters import Counters

ANY: Final = -1
"""The `src` of a receive that takes a message from whichever rank sends first."""

LEAST_LIMIT: Final = 1 << 30
"""A message may always have so many bytes: texts, and what users gather, are of any length."""

T_co = TypeVar("T_co", covariant=True)


class TransportError(RuntimeError):
    """The network, or the way it was used, is broken."""


class Diverged(FloatingPointError):
    """What all ranks train is not finite: no rank goes on after one has failed with this."""


class Timeout(TransportError):
    """A wait took longer than it may."""


class Reason(str):
    """What became of a rank, in words that follow its name."""

    __slots__ = ("ends_all",)
    ends_all: bool
    """Whether the training has failed, and not this rank alone: no view follows."""

    def __new__(cls, text: str, *, ends_all: bool = False) -> Reason:
        """Makes the text, with the verdict beside it.

        Args:
            text: the words
            ends_all: the verdict
        """
        made = super().__new__(cls, text)
        made.ends_all = ends_all
        return made


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

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str, str]]:
        """Is for launchers that hand errors on, such as Ray; no rank sends one to another."""
        return type(self), (self.rank, self.reason, self.waited_for)

    @property
    def ends_all(self) -> bool:
        """Whether the training has failed, and not this rank alone: no view follows."""
        return isinstance(self.reason, Reason) and self.reason.ends_all


def failed(error: BaseException) -> Reason:
    """Returns what became of a rank that met this error: a reason of `PeerLost`."""
    is_told = isinstance(error, PeerLost) and error.ends_all
    ends_all = isinstance(error, Diverged) or is_told
    what = "ends all ranks" if ends_all else "failed"
    text = f"{what}: {type(error).__name__}: {error}".removesuffix(": ")
    return Reason(text, ends_all=ends_all)


class Deadlock(TransportError):
    """Every rank waits for another: only the simulated world can tell, and it tells at once."""


class LaneStopped(BaseException):
    """Is raised inside a lane, out of whatever it waits for, when the lane is told to stop."""


class Work(Protocol[T_co]):
    """An operation that is under way."""

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Waits for the result, and returns it; raises `Timeout` after `timeout_s`.

        By default `timeout_s` is the transport's.  With `math.inf`, for lanes that serve, only the
        loss of a rank or the end of the lane ends the wait.
        """
        ...

    def done(self) -> bool:
        """Returns whether `wait` would return at once; waits for nothing itself.

        It moves a collective on.  It copies a part of a message for a device to pinned memory,
        16 MiB at most.
        """
        ...


class Receipt(Work[Tensor], Protocol):
    """What `recv` returns: the work of receiving one message, which tells who has sent it."""

    @property
    def source(self) -> int:
        """The rank that has sent the message, known once the receive is done."""
        ...


class Lane(Protocol):
    """A thread beside the training thread."""

    @property
    def net(self) -> Transport:
        """The lane's endpoint, on which the other threads of its rank may send too."""
        ...

    def tell(self, x: Tensor, tag: int = 0, over: Transport | None = None) -> None:
        """Sends to the lane, which gets it once the device has done what this thread has queued.

        Returns at once.  What is told arrives in order; `x` must not change any more.

        Args:
            x: a tensor on the CPU
            tag: the message's tag
            over: the lane's endpoint in another view; None: `net`
        """
        ...

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the lane, even in the midst of a receive, and raises the lane's failure, if any."""
        ...

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the lane's function has returned, and raises its failure, if any."""
        ...

    def check(self) -> None:
        """Raises the lane's failure, if it has failed."""
        ...


class Views:
    """Who trains, and who goes on after a loss; in this class, a loss is final: no view follows.

    Ranks have the numbers that their launcher gave them, in every view.  What follows a loss on a
    network that survives is a matter of a wing, whose class has more verbs: `elastic.views`.
    """

    def survive(self, min_ranks: int | None, groups: Sequence[Sequence[int]] = ()) -> None:
        """Has a view of the ranks that are left follow each loss; all ranks call it.

        Args:
            min_ranks: how many must be left; None: more than half of the ranks of the view before
            groups: ranks none of which can go on without the others of their group
        """
        raise TransportError(
            'this network must end with the first rank that is lost, got on_loss="continue"; use '
            'transport="process_group" with tensors on the CPU'
        )

    def next_view(self, lost: PeerLost) -> tuple[int, tuple[int, ...]]:
        """Goes on after a loss: returns the next view's number and members, once agreed.

        Until then every wait on this rank raises; from then on waits on channels of that view, or
        of a later one, work.  No thread of this rank may wait on older channels any more.

        Raises:
            PeerLost: where this rank cannot go on; `lost` itself where no view follows a loss
        """
        raise lost


@runtime_checkable
class Transport(Protocol):
    """One rank's end of the network; `group` is a sequence of ranks, None means all ranks."""

    rank: int
    job_rank: int
    """This rank's number for whatever started the ranks; `rank` is its number in this network."""
    world_size: int
    timeout_s: float
    counters: Counters
    ends_with_peers: bool
    """Whether what started the ranks ends this process, at any moment, when another rank dies."""
    sum_engine: str
    """What makes sums, as users know it; empty: messages."""

    def now(self) -> float:
        """Returns the seconds on this transport's clock, real or virtual."""
        ...

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Work[None]:
        """Sends `x`, which the caller may change at once; without `copy`, once the Work is done."""
        ...

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Receipt:
        """Receives the next message from `src` (or ANY) with this tag.

        The Work gives a new tensor of any length, of the dtype and on the device of `like`.
        """
        ...

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        """Puts the sum over the group into `x`, the same to the bit on every member."""
        ...

    def all_gather(self, x: Tensor, group: Sequence[int] | None = None) -> Work[list[Tensor]]:
        """Gathers every member's tensor, in the order of the group; lengths may differ."""
        ...

    def gather_into(
        self, into: Tensor, x: Tensor, sizes: Sequence[int], group: Sequence[int] | None = None
    ) -> Work[Tensor]:
        """Puts every member's tensor into `into`, one behind the other, in the order of the group.

        Args:
            into: will hold them; has as many elements as they have together
            x: this rank's tensor; may be its own part of `into`
            sizes: how many elements each member's tensor has
            group: who takes part
        """
        ...

    def all_to_all(
        self,
        into: Tensor,
        x: Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        group: Sequence[int] | None = None,
    ) -> Work[Tensor]:
        """Sends each member its part of `x`; puts what comes from each into its part of `into`.

        Parts lie one behind the other, in the order of the group.

        Args:
            into: will hold what comes
            x: what leaves
            from_each: how many elements come from each member
            to_each: how many elements leave for each member
            group: who takes part
        """
        ...

    def broadcast(self, x: Tensor, src: int, group: Sequence[int] | None = None) -> Work[Tensor]:
        """Overwrites `x` with the `x` of rank `src`."""
        ...

    def barrier(self, group: Sequence[int] | None = None) -> Work[None]:
        """Begins a barrier: the Work is done once every member has begun it."""
        ...

    def exchange(self, x: Tensor, peer: int) -> Work[Tensor]:
        """Sends `x` to `peer` and receives what `peer` sends in its call, of any length.

        Two ranks call it for each other equally often, with one dtype; if they also push, both call
        all in one order.  A network may carry both ways at once, and begins once both have called
        and their devices have made what they send.
        """
        ...

    def push(self, x: Tensor, dst: int) -> Work[None]:
        """Sends `x` to a rank that pulls it; a network may keep it here until then."""
        ...

    def pull(self, like: Tensor, src: int) -> Work[Tensor]:
        """Receives the next tensor that `src` pushes to this rank, of the dtype of `like`."""
        ...

    def expect_at_most(self, nbytes: int) -> None:
        """Announces that no message to come has more than `nbytes` bytes, or than `LEAST_LIMIT`.

        A rank that sends more is lost.  All ranks call this before any of them sends more than the
        last call allows; a later call may only raise the limit.  Before the first call, a message
        may have as many bytes as there is memory.
        """
        ...

    def sub(self, name: str) -> Transport:
        """Returns the same network with channels of its own, for the same thread."""
        ...

    def spawn_lane(self, fn: Callable[[Transport], None], name: str = "lane") -> Lane:
        """Starts a lane, which runs `fn(lane_transport)` beside this thread."""
        ...

    def check(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""
        ...

    def on_lost(self, callback: Callable[[PeerLost], None]) -> None:
        """Has `callback` called when another rank is lost, or at once if one is lost already.

        Whichever thread notices the loss calls `callback`, which must not wait for the network.
        A rank has one callback; a later call replaces it.
        """
        ...

    @property
    def views(self) -> Views:
        """Who trains, and who goes on after a loss."""
        ...

    def blaming(self, what: str) -> AbstractContextManager[None]:
        """Surrounds another library's collective: raises `PeerLost` if a lost rank broke it.

        Args:
            what: what the collective does, for an error that says where the loss was noticed
        """
        ...

    def fail(self, reason: str) -> None:
        """Tells every rank that this one is lost, for that reason, and closes the network."""
        ...

    def close(self) -> None:
        """Says farewell and ends, once no other rank needs this one.  May be called again."""
        ...

    @property
    def is_forks(self) -> bool:
        """Whether this process was forked from the one that opened the network."""
        ...

    def check_process(self) -> None:
        """Raises `TransportError` in a process forked from the one that opened the network."""
        ...
