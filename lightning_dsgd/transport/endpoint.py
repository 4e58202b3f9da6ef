"""What all transports share: the collectives, written once over two verbs that each wire provides.

    _post(x, dst, channel, tag, kind)      a message leaves
    _collect(like, src, channel, tag, kind)  a message is waited for

A collective is a generator that yields the Works it depends on; `Collective` drives it from `wait`
and `done`, so that it moves on without a thread of its own.  One code on every wire means that
bytes, messages, the order of additions and hence every bit of the result are the same on all of
them.

Legend: P members of the group, `me` this rank's place among them, n elements, member i owns the
elements bounds[i]:bounds[i + 1].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.transport import ANY, Counters, Lane, Receipt, TransportError, Work

T = TypeVar("T")

_PART_ELEMENTS = 1 << 19
KINDS = ("message", "all_reduce", "all_gather", "all_to_all", "broadcast", "barrier")
Steps = Generator[Work[Any], Any, T]


class Done(Generic[T]):
    """A Work that was done when it was made."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, timeout_s: float | None = None) -> T:
        return self._result

    def done(self) -> bool:
        return True


class Collective(Generic[T]):
    """A collective under way: moves on whenever somebody looks at it."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._pending: Work[Any] | None = None
        self._result: T
        self._finished = False
        self._advance(None)

    def _advance(self, value: Any) -> None:
        try:
            self._pending = self._steps.send(value)
        except StopIteration as stop:
            self._finished, self._pending, self._result = True, None, stop.value

    def done(self) -> bool:
        while self._pending is not None and self._pending.done():
            self._advance(self._pending.wait())
        return self._finished

    def wait(self, timeout_s: float | None = None) -> T:
        while self._pending is not None:
            self._advance(self._pending.wait(timeout_s))
        return self._result


class Endpoint(ABC):
    """One rank's end of a network; subclasses bring the wire.

    Args:
        rank: this rank
        world_size: P of the whole network
        timeout_s: how long a wait may take
        counters: where sending and waiting is counted
        path: names this endpoint's channels; equal on all the ranks that talk through it
    """

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, counters: Counters, path: str = ""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.counters = counters
        self.path = path
        self._messages = channel_id(path, "messages")
        self._groups: dict[tuple[int, ...] | None, _Group] = {}
        self._num_lanes = 0

    @abstractmethod
    def _post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        """Starts sending `x`; with `copy` it may change at once, else once the Work is done."""

    @abstractmethod
    def _collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> Receipt:
        """The next message of this channel and tag from `src`, placed into `into` if given."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on this transport's clock."""

    @abstractmethod
    def check(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""

    @abstractmethod
    def sub(self, name: str) -> Endpoint:
        """The same network with channels of its own, for the same thread."""

    @abstractmethod
    def _start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        """Runs `fn` in a thread with an endpoint of the path `name`."""

    def spawn_lane(self, fn: Callable[[Any], None], name: str = "lane") -> Lane:
        self._num_lanes += 1
        return self._start_lane(fn, f"{self.path}/{name}-{self._num_lanes}")

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Work[None]:
        self._check_tensor(x)
        self._check_rank("dst", dst)
        return self._post(x, dst, self._messages, tag, 0, copy=copy)

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Receipt:
        if src != ANY:
            self._check_rank("src", src)
        return self._collect(like, src, self._messages, tag, 0)

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        self._check_tensor(x)
        return Collective(self._all_reduce(x, _Call(self, group, "all_reduce")))

    def all_gather(self, x: Tensor, group: Sequence[int] | None = None) -> Work[list[Tensor]]:
        self._check_tensor(x)
        call = _Call(self, group, "all_gather")
        return Collective(self._exchange([x] * call.size, call))

    def all_to_all(
        self, xs: Sequence[Tensor], group: Sequence[int] | None = None
    ) -> Work[list[Tensor]]:
        for x in xs:
            self._check_tensor(x)
        call = _Call(self, group, "all_to_all")
        if len(xs) != call.size:
            raise ValueError(
                f"all_to_all needs one tensor for each member of the group, "
                f"got {len(xs)} tensors for the group {call.members}"
            )
        return Collective(self._exchange(xs, call))

    def broadcast(self, x: Tensor, src: int, group: Sequence[int] | None = None) -> Work[Tensor]:
        self._check_tensor(x)
        call = _Call(self, group, "broadcast")
        if src not in call.members:
            raise ValueError(f"src must be in the group, got src={src} and group={call.members}")
        return Collective(self._broadcast(x, call, call.members.index(src)))

    def barrier(self, group: Sequence[int] | None = None) -> Work[None]:
        return Collective(self._barrier(_Call(self, group, "barrier")))

    def _all_reduce(self, x: Tensor, call: _Call) -> Steps[Tensor]:
        """Reduce-scatter, then all-gather: 2n(P-1)/P elements sent, the least there is.

        By recursive halving and doubling (2 log2 P exchanges) where P is a power of two, else with
        every member at once (2(P-1) exchanges).  Sums of bf16 and fp16 are made, and sent, in fp32.

        A total comes back only after our own share of it was taken, so it may be received right
        over that share, and is asked for before anything is sent.
        """
        if call.size == 1:
            return x
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        n = len(x)
        bounds = [n * i // call.size for i in range(call.size + 1)]
        if call.size & (call.size - 1):
            yield from self._all_reduce_direct(x, y, bounds, call)
        else:
            yield from self._all_reduce_halving(x, y, bounds, call)
        return x

    def _all_reduce_halving(
        self, x: Tensor, y: Tensor, bounds: list[int], call: _Call
    ) -> Steps[None]:
        def span(tensor: Tensor, first: int, last: int) -> Tensor:
            return tensor[bounds[first] : bounds[last]]

        me, distances = call.me, [1 << i for i in range(call.size.bit_length() - 1)]
        starts = [me & -distance for distance in distances]  # of the totals that we hold by then
        totals = [
            call.collect(span(x, start ^ d, (start ^ d) + d), me ^ d, total=True)
            for d, start in zip(distances, starts, strict=True)
        ]
        sent = []
        for d in reversed(distances):
            keep, give = me & -d, (me & -d) ^ d
            sent += call.post(span(y, give, give + d), me ^ d)
            for mine in parts(span(y, keep, keep + d)):
                _add(mine, (yield call.share(mine, me ^ d)), me ^ d)
        if y is not x:
            span(x, me, me + 1).copy_(span(y, me, me + 1))
        for d, start, works in zip(distances, starts, totals, strict=True):
            sent += call.post(span(x, start, start + d), me ^ d, total=True)
            yield from _each(works)
        yield from _each(sent)

    def _all_reduce_direct(
        self, x: Tensor, y: Tensor, bounds: list[int], call: _Call
    ) -> Steps[None]:
        spans = [slice(*pair) for pair in pairwise(bounds)]
        totals = [call.collect(x[spans[other]], other, total=True) for other in call.others()]
        sent = [work for other in call.others() for work in call.post(y[spans[other]], other)]
        for mine in parts(y[spans[call.me]]):
            shares = [
                mine.clone() if other == call.me else call.share(mine, other)
                for other in range(call.size)
            ]
            mine.zero_()
            for other, share in enumerate(shares):  # in the order of the group
                _add(mine, share if isinstance(share, Tensor) else (yield share), other)
        if y is not x:
            x[spans[call.me]] = y[spans[call.me]]
        for other in call.others():
            sent += call.post(x[spans[call.me]], other, total=True)
        for works in totals:
            yield from _each(works)
        yield from _each(sent)

    def _exchange(self, xs: Sequence[Tensor], call: _Call) -> Steps[list[Tensor]]:
        """`xs[i]` to member i, empty ones too: the receiver cannot know the length."""
        sent = [call.send(xs[other], other) for other in call.others()]
        received = {call.me: xs[call.me].clone()}
        for other in call.others():
            received[other] = yield call.share(xs[call.me], other)
        yield from _each(sent)
        return [received[i] for i in range(call.size)]

    def _broadcast(self, x: Tensor, call: _Call, root: int) -> Steps[Tensor]:
        """Along a binomial tree."""
        place = (call.me - root) % call.size
        sent, distance = [], 1
        while distance < call.size:
            if place < distance:
                if place + distance < call.size:
                    sent.append(call.send(x, (place + distance + root) % call.size))
            elif place < 2 * distance:
                yield call.share(x, (place - distance + root) % call.size, into=x)
            distance *= 2
        yield from _each(sent)
        return x

    def _barrier(self, call: _Call) -> Steps[None]:
        """By dissemination: after step s each member has heard of 2^s others."""
        empty, distance = torch.empty(0), 1
        while distance < call.size:
            call.send(empty, (call.me + distance) % call.size)
            yield call.share(empty, (call.me - distance) % call.size)
            distance *= 2

    def _group(self, ranks: Sequence[int] | None) -> _Group:
        """The group of these ranks; None: of all, the same one as of all by their numbers."""
        key = None if ranks is None else tuple(ranks)
        if key not in self._groups:
            members = tuple(range(self.world_size)) if key is None else key
            _check_group(members, self.rank, self.world_size)
            group = _Group(members, members.index(self.rank), channel_id(self.path, members))
            self._groups[key] = self._groups.setdefault(members, group)
        return self._groups[key]

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{name} must be a rank of 0 to {self.world_size - 1}, "
                f"got {name}={rank} on rank {self.rank}"
            )

    @staticmethod
    def _check_tensor(x: Tensor) -> None:
        if x.dim() != 1 or not x.is_contiguous():
            raise ValueError(
                f"tensors on the wire must be one-dimensional and contiguous, got the shape "
                f"{tuple(x.shape)} with the strides {x.stride()}; try x.contiguous().view(-1)"
            )


@dataclass
class _Group:
    """The members of a group, this rank's place among them, and the collectives called so far."""

    members: tuple[int, ...]
    me: int
    channel: int
    calls: int = 0


def _check_group(members: tuple[int, ...], rank: int, world_size: int) -> None:
    if (
        rank not in members
        or len(set(members)) != len(members)
        or min(members) < 0
        or max(members) >= world_size
    ):
        raise ValueError(
            f"a group must hold this rank, no rank twice and only ranks of 0 to "
            f"{world_size - 1}, got group={members} on rank {rank}"
        )


class _Call:
    """One call of one collective: who takes part, and what marks its messages."""

    def __init__(self, net: Endpoint, ranks: Sequence[int] | None, kind: str) -> None:
        group = net._group(ranks)
        self.members, self.me, self.size = group.members, group.me, len(group.members)
        self._net = net
        self._kind = KINDS.index(kind)
        self._channel, self._number = group.channel, group.calls
        group.calls += 1

    def others(self) -> list[int]:
        """The other members, each starting from a different one, so that no member is overrun."""
        return [(self.me + i) % self.size for i in range(1, self.size)]

    def post(self, x: Tensor, to: int, *, total: bool = False) -> list[Work[None]]:
        """Sends `x` in parts, none if it is empty: the receiver knows the length."""
        return [self.send(part, to, total=total) for part in parts(x)]

    def collect(self, into: Tensor, source: int, *, total: bool = False) -> list[Receipt]:
        """Receives into `into` what `post` sends."""
        return [self.share(part, source, part, total=total) for part in parts(into)]

    def send(self, x: Tensor, to: int, *, total: bool = False) -> Work[None]:
        return self._net._post(
            x, self.members[to], self._channel + total, self._number, self._kind, copy=False
        )

    def share(
        self, like: Tensor, source: int, into: Tensor | None = None, *, total: bool = False
    ) -> Receipt:
        """Receives one message."""
        return self._net._collect(
            like, self.members[source], self._channel + total, self._number, self._kind, into
        )


def _add(mine: Tensor, share: Tensor, other: int) -> None:
    if len(share) != len(mine):  # which `+=` may let pass, as it broadcasts
        raise TransportError(
            f"expected {len(mine)} elements from member {other} in all_reduce, got {len(share)}"
        )
    mine += share


def _each(works: Iterable[Work[Any]]) -> Steps[None]:
    for work in works:  # noqa: UP028 - results are sent in here, and an iterator takes none
        yield work


def parts(x: Tensor) -> Iterable[Tensor]:
    """Pieces small enough that adding one overlaps with the arrival of the next."""
    return torch.split(x, _PART_ELEMENTS) if len(x) else ()


def channel_id(*names: object) -> int:
    """An even 57-bit number that is the same on every rank for the same names."""
    return int.from_bytes(
        blake2b(repr(names).encode(), digest_size=8).digest(), "little", signed=True
    )


def describe(path: str, src: int, tag: int, kind: int) -> str:
    """What a receive waits for, in words, for error messages."""
    what = f"a message with tag {tag}" if kind == 0 else f"{KINDS[kind]} number {tag}"
    whom = "any rank" if src == ANY else f"rank {src}"
    return f"{what} from {whom}" + (f" [{path.strip('/')}]" if path else "")


def check_message(
    like: Tensor,
    into: Tensor | None,
    dtype: torch.dtype,
    numel: int,
    src: int,
    kinds: tuple[int, int],
) -> None:
    """Whether a message is what the receiver takes it for; `kinds` are (the message's, ours)."""
    if kinds[0] != kinds[1]:
        raise TransportError(
            f"the ranks disagree on what comes next: rank {src} calls {KINDS[kinds[0]]} "
            f"where this rank calls {KINDS[kinds[1]]}"
        )
    if dtype != like.dtype:
        raise TransportError(f"expected {like.dtype} from rank {src}, got {dtype}")
    if into is not None and numel != len(into):
        raise TransportError(
            f"expected {len(into)} elements from rank {src} in {KINDS[kinds[1]]}, got {numel}"
        )
