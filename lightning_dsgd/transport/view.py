"""A network of some of the ranks: a transport over another, whose ranks it counts anew.

    View(net, (0, 2, 3))      rank 2 of `net` is rank 1 of 3 here

Whoever uses a view sees `rank` and `world_size` of the view alone: messages, collectives, `sub` and
lanes go by the view's ranks.  Errors name the ranks of the network below, as the launcher has
counted them; what ends the network below ends the view, and `close` and `fail` of a view do the
same as below.  Ranks that are not members need not know of a view.

**Channels.**  Channels are made from the path, which has the view's number in it.  So views of
different numbers cannot take each other's messages; two views of one number that share ranks need a
`sub` of the network each.  A channel carries the number itself as well, in its upper bits
(`is_old`), by which a network tells what is left of views that have ended.

**Threads.**  One thread uses a view, and others of its rank may send on it, as on any endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self

from torch import Tensor

from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.contract import (
    ANY,
    Lane,
    PeerLost,
    Receipt,
    Transport,
    Views,
    Work,
)
from lightning_dsgd.transport.endpoint import Endpoint

_NUMBER_BITS: Final = 15
_REST_BITS: Final = 63 - _NUMBER_BITS
_REST: Final = (1 << _REST_BITS) - 1


def is_old(number: int, channel: int) -> bool:
    """Returns whether a channel is of a view before that of a number, as far as its bits tell."""
    behind = (number - (channel >> _REST_BITS)) % (1 << _NUMBER_BITS)
    return 0 < behind < 1 << (_NUMBER_BITS - 1)


class View(Endpoint):
    """One member's end of a view.

    Args:
        net: the network below, of which this rank is one
        members: the ranks of `net` that are in the view, in their new order
        number: the view's number; all members give the same
    """

    _sums_in_lanes = True
    _may_sum = True

    def __init__(self, net: Endpoint, members: Sequence[int], number: int = 0) -> None:
        if net.rank not in members or len(set(members)) != len(members):
            raise ValueError(
                f"the members of a view must hold this rank, and none twice, got members="
                f"{tuple(members)} on rank {net.rank}"
            )
        self._take(net.sub(f"view-{number}"), tuple(members), number)

    def _take(self, below: Endpoint, members: tuple[int, ...], number: int) -> None:
        me, size = members.index(below.rank), len(members)
        super().__init__(me, size, below.timeout_s, below.counters, below.path)
        self.below = below
        self.job_rank = below.job_rank
        self.members = members
        self.number = number
        self.ends_with_peers = below.ends_with_peers
        self.sum_engine = below.sum_engine

    @classmethod
    def one_of(
        cls, net: Endpoint, views: Sequence[Sequence[int]], *, sums_in_lanes: bool = True
    ) -> Self:
        """Returns this rank's view of several that hold each rank once and do the same.

        Args:
            net: the network below
            views: the members of each view
            sums_in_lanes: whether lanes may sum, and exchange parts, by the engine of `net`; else
                by messages
        """
        view = cls(net, next(members for members in views if net.rank in members))
        view._sums_in_lanes = sums_in_lanes
        return view

    def _over(self, below: Endpoint, *, is_lane: bool = False) -> Self:
        """Returns the same view over another endpoint of this rank."""
        twin = object.__new__(type(self))
        twin._take(below, self.members, self.number)
        twin._sums_in_lanes = self._sums_in_lanes
        twin._may_sum = self._may_sum and (self._sums_in_lanes or not is_lane)
        twin.sum_engine = below.sum_engine if twin._may_sum else ""
        return twin

    # ---- messages ----

    def post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        return self.below.post(x, self.members[dst], self._numbered(channel), tag, kind, copy=copy)

    def collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> Receipt:
        below = ANY if src == ANY else self.members[src]
        receipt = self.below.collect(like, below, self._numbered(channel), tag, kind, into)
        return _Receipt(receipt, self.members)

    def _numbered(self, channel: int) -> int:
        return self.number % (1 << _NUMBER_BITS) << _REST_BITS | channel & _REST

    def expect_at_most(self, nbytes: int) -> None:
        self.below.expect_at_most(nbytes)

    def sum_natively(self, call: Call, x: Tensor) -> Work[Tensor] | None:
        return self.below.sum_natively(self._below(call), x) if self._may_sum else None

    def broadcast_natively(self, call: Call, x: Tensor, place: int) -> Work[Tensor] | None:
        if not self._may_sum:
            return None
        return self.below.broadcast_natively(self._below(call), x, place)

    def spread_natively(
        self,
        call: Call,
        into: Tensor,
        from_each: Sequence[int],
        x: Tensor,
        to_each: Sequence[int] | None,
    ) -> Work[Tensor] | None:
        if not self._may_sum:
            return None
        return self.below.spread_natively(self._below(call), into, from_each, x, to_each)

    def pair_natively(self, call: Call, x: Tensor) -> Work[Any] | None:
        return self.below.pair_natively(self._below(call), x) if self._has_all else None

    @property
    def _has_all(self) -> bool:
        """Whether all ranks below are members; else other ranks may call the same meanwhile."""
        return len(self.members) == self.below.world_size

    def _below(self, call: Call) -> Call:
        """Returns the same call by the ranks of the network below."""
        return call.among([self.members[rank] for rank in call.members])

    def sub(self, name: str) -> Self:
        return self._over(self.below.sub(name))

    def start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        lane = self.below.start_lane(lambda net: fn(self._over(net, is_lane=True)), name)
        return _Lane(lane, self._over(_endpoint_of(lane), is_lane=True))

    # ---- the network below ----

    def now(self) -> float:
        return self.below.now()

    def check(self) -> None:
        self.below.check()

    def on_lost(self, callback: Callable[[PeerLost], None]) -> None:
        self.below.on_lost(callback)

    def blaming(self, what: str) -> AbstractContextManager[None]:
        return self.below.blaming(what)

    def fail(self, reason: str) -> None:
        self.below.fail(reason)

    @property
    def views(self) -> Views:
        return self.below.views

    def close(self) -> None:
        self.below.close()

    @property
    def is_forks(self) -> bool:
        return self.below.is_forks

    def check_process(self) -> None:
        self.below.check_process()


def _endpoint_of(lane: Lane) -> Endpoint:
    net = lane.net
    assert isinstance(net, Endpoint)
    return net


class _Receipt:
    """A receive of the network below, whose source is a rank of the view."""

    def __init__(self, receipt: Receipt, members: tuple[int, ...]) -> None:
        self._receipt, self._members = receipt, members

    @property
    def source(self) -> int:
        """The rank of the view that has sent the message."""
        return self._members.index(self._receipt.source)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        return self._receipt.wait(timeout_s)

    def done(self) -> bool:
        return self._receipt.done()


class _Lane:
    """A lane of the network below, with the view's endpoint."""

    def __init__(self, lane: Lane, net: View) -> None:
        self._lane = lane
        self.net = net

    def tell(self, x: Tensor, tag: int = 0, over: Transport | None = None) -> None:
        self._lane.tell(x, tag, over or self.net)

    def stop(self, timeout_s: float | None = None) -> None:
        self._lane.stop(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        self._lane.join(timeout_s)

    def check(self) -> None:
        self._lane.check()
