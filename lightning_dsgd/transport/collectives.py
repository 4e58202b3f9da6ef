"""The collectives, written once over two verbs that each transport provides.

    post(x, dst, channel, tag, kind)       a message leaves
    collect(like, src, channel, tag, kind)   a message is waited for

A collective is a generator that yields the Works it depends on; `Collective` drives it from `wait`
and `done`, so that it moves on without a thread of its own.  One code on every wire means that
bytes, messages, the order of additions and hence every bit of the result are the same on all of
them.

**Threads.**  A collective belongs to the thread that began it, as its endpoint does.

Legend: P members of the group, `me` this rank's place among them, n elements, member i owns the
elements bounds[i]:bounds[i + 1].
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.devices import is_on_host, port_of
from lightning_dsgd.transport.contract import Receipt, TransportError, Work
from lightning_dsgd.transport.messages import KINDS

T = TypeVar("T")
Steps = Generator[Work[Any], Any, T]

_CHUNK_ELEMENTS = 1 << 19


class Verbs(ABC):
    """The two verbs that a transport provides for collectives."""

    @abstractmethod
    def post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        """Starts sending `x`; with `copy`, `x` may change at once, else once the Work is done."""

    @abstractmethod
    def collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> Receipt:
        """Receives the next message of this channel and tag from `src`, into `into` if given."""


class Collective(Generic[T]):
    """A collective under way, which moves on whenever a thread looks at it."""

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
        """Moves the collective on as far as it goes; returns whether it is complete."""
        while self._pending is not None and self._pending.done():
            self._advance(self._pending.wait())
        return self._finished

    def wait(self, timeout_s: float | None = None) -> T:
        """Moves the collective on to its end; each of its waits may take `timeout_s`."""
        while self._pending is not None:
            self._advance(self._pending.wait(timeout_s))
        return self._result


@dataclass
class Group:
    """The members of a group, this rank's place among them, and the collectives called so far."""

    members: tuple[int, ...]
    me: int
    channel: int
    calls: int = 0


class Call:
    """One call of one collective: who takes part, and what marks its messages."""

    def __init__(self, verbs: Verbs, group: Group, kind: str) -> None:
        self.members, self.me, self.size = group.members, group.me, len(group.members)
        self._verbs = verbs
        self.kind, self._kind = kind, KINDS.index(kind)
        self.channel, self.number = group.channel, group.calls
        group.calls += 1

    def among(self, members: Sequence[int]) -> Self:
        """Returns the same call, for the group that has these numbers in another network."""
        twin = copy.copy(self)
        twin.members = tuple(members)
        return twin

    def others(self) -> list[int]:
        """Returns the other members, from a different one on each rank, so that none is overrun."""
        return [(self.me + i) % self.size for i in range(1, self.size)]

    def send_chunks(self, x: Tensor, to: int, *, total: bool = False) -> list[Work[None]]:
        """Sends `x` in chunks, none if it is empty: the receiver knows the length."""
        return [self.send(chunk, to, total=total) for chunk in _chunks(x)]

    def receive_chunks(self, into: Tensor, source: int, *, total: bool = False) -> list[Receipt]:
        """Receives into `into` what `send_chunks` sends."""
        return [self.receive(chunk, source, chunk, total=total) for chunk in _chunks(into)]

    def send(self, x: Tensor, to: int, *, total: bool = False) -> Work[None]:
        """Sends one message; `x` must not change before the Work is done."""
        return self._verbs.post(
            x, self.members[to], self.channel + total, self.number, self._kind, copy=False
        )

    def receive(
        self, like: Tensor, source: int, into: Tensor | None = None, *, total: bool = False
    ) -> Receipt:
        """Receives one message, into `into` if given."""
        return self._verbs.collect(
            like, self.members[source], self.channel + total, self.number, self._kind, into
        )


def all_reduce(x: Tensor, call: Call) -> Steps[Tensor]:
    """Sums by reduce-scatter, then all-gather: sends 2n(P-1)/P elements, the minimum.

    Ranks exchange by recursive halving and doubling (2 log2 P exchanges) if P is a power of two,
    else with every member at once (2(P-1) exchanges).  Sums of bf16 and fp16 are made, and sent, in
    fp32.

    A total comes back only after our own share of it was taken, so it may be received right
    over that share, and is asked for before anything is sent.
    """
    if call.size == 1:
        return x
    y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    n = len(x)
    bounds = [n * i // call.size for i in range(call.size + 1)]
    if call.size & (call.size - 1):
        yield from _all_reduce_direct(x, y, bounds, call)
    else:
        yield from _all_reduce_halving(x, y, bounds, call)
    return x


def _all_reduce_halving(x: Tensor, y: Tensor, bounds: list[int], call: Call) -> Steps[None]:
    def span(tensor: Tensor, first: int, last: int) -> Tensor:
        return tensor[bounds[first] : bounds[last]]

    me, distances = call.me, [1 << i for i in range(call.size.bit_length() - 1)]
    starts = [me & -distance for distance in distances]  # where the totals begin that we hold
    totals = [
        call.receive_chunks(span(x, start ^ d, (start ^ d) + d), me ^ d, total=True)
        for d, start in zip(distances, starts, strict=True)
    ]
    sent = []
    for d in reversed(distances):
        keep, give = me & -d, (me & -d) ^ d
        sent += call.send_chunks(span(y, give, give + d), me ^ d)
        for mine in _chunks(span(y, keep, keep + d)):
            _add(mine, (yield call.receive(mine, me ^ d)), me ^ d)
    if y is not x:
        span(x, me, me + 1).copy_(span(y, me, me + 1))
    for d, start, works in zip(distances, starts, totals, strict=True):
        sent += call.send_chunks(span(x, start, start + d), me ^ d, total=True)
        yield from _each(works)
    yield from _each(sent)


def _all_reduce_direct(x: Tensor, y: Tensor, bounds: list[int], call: Call) -> Steps[None]:
    spans = [slice(*pair) for pair in pairwise(bounds)]
    totals = [call.receive_chunks(x[spans[other]], other, total=True) for other in call.others()]
    sent = [work for other in call.others() for work in call.send_chunks(y[spans[other]], other)]
    for mine in _chunks(y[spans[call.me]]):
        shares = [
            mine.clone() if other == call.me else call.receive(mine, other)
            for other in range(call.size)
        ]
        mine.zero_()
        for other, share in enumerate(shares):  # in the order of the group
            _add(mine, share if isinstance(share, Tensor) else (yield share), other)
    if y is not x:
        x[spans[call.me]] = y[spans[call.me]]
    for other in call.others():
        sent += call.send_chunks(x[spans[call.me]], other, total=True)
    for works in totals:
        yield from _each(works)
    yield from _each(sent)


def all_gather(
    x: Tensor, call: Call, places: Sequence[Tensor] | None = None
) -> Steps[list[Tensor]]:
    """Gathers in log2 P rounds, each with one other member: few connections, P - 1 messages.

    After the rounds at distances 1 to d, a member has the tensors of the 2d members from itself
    on.  The last round brings the tensors that are missing.

    Args:
        x: this member's tensor
        call: who takes part
        places: where the other members' tensors go; None: into new memory
    """
    tensors, sent, distance = [x.clone() if places is None else x], [], 1
    while distance < call.size:
        count = min(distance, call.size - distance)
        sent += [call.send(tensor, (call.me - distance) % call.size) for tensor in tensors[:count]]
        for _ in range(count):
            place = None if places is None else places[(call.me + len(tensors)) % call.size]
            like = x if place is None else place
            tensors.append((yield call.receive(like, (call.me + distance) % call.size, place)))
        distance *= 2
    yield from _each(sent)
    return [tensors[(i - call.me) % call.size] for i in range(call.size)]


def gather_into(into: Tensor, x: Tensor, sizes: Sequence[int], call: Call) -> Steps[Tensor]:
    """Gathers as `all_gather` does; on a device, what comes goes up in one piece."""
    landed = _on_host(into)
    yield from all_gather(x, call, torch.split(landed, list(sizes)))
    _take(into, landed, x, sizes, call.me)
    return into


def all_to_all(
    into: Tensor, x: Tensor, from_each: Sequence[int], to_each: Sequence[int], call: Call
) -> Steps[Tensor]:
    """Exchanges a part with every member, each rank with a different one first."""
    landed, parts = _on_host(into), torch.split(x, list(to_each))
    places = torch.split(landed, list(from_each))
    receipts = [call.receive(places[i], i, places[i]) for i in reversed(call.others())]
    sent = [call.send(parts[i], i) for i in call.others()]
    yield from _each(receipts)
    yield from _each(sent)
    _take(into, landed, parts[call.me], from_each, call.me)
    return into


def _on_host(into: Tensor) -> Tensor:
    """Returns host memory to receive into: that of `into`, or pinned memory of the same length."""
    return into if is_on_host(into) else port_of(into.device).pinned(len(into), into.dtype)


def _take(into: Tensor, landed: Tensor, own: Tensor, sizes: Sequence[int], me: int) -> None:
    """Copies what has come to the device, in the thread's stream, and this member's own part."""
    begin = sum(sizes[:me])
    end = begin + sizes[me]
    if landed is not into:
        for part in (slice(0, begin), slice(end, len(into))):
            if len(landed[part]):
                port_of(into.device).copy(into[part], landed[part])
    place = into[begin:end]
    if len(place) and place.data_ptr() != own.data_ptr():
        place.copy_(own)


def broadcast(x: Tensor, call: Call, root: int) -> Steps[Tensor]:
    """Broadcasts along a binomial tree."""
    place = (call.me - root) % call.size
    sent, distance = [], 1
    while distance < call.size:
        if place < distance:
            if place + distance < call.size:
                sent.append(call.send(x, (place + distance + root) % call.size))
        elif place < 2 * distance:
            yield call.receive(x, (place - distance + root) % call.size, into=x)
        distance *= 2
    yield from _each(sent)
    return x


def exchange(x: Tensor, call: Call) -> Steps[Tensor]:
    """Sends to the other one of two members, and receives a tensor of any length from it."""
    sent = call.send(x, 1 - call.me)
    theirs = yield call.receive(x, 1 - call.me)
    yield sent
    return theirs  # type: ignore[no-any-return]


def num_children(place: int, size: int) -> int:
    """Returns how many members get a broadcast from the one `place` places after its source."""
    distances = [1 << i for i in range(size.bit_length())]
    return sum(place < distance and place + distance < size for distance in distances)


def barrier(call: Call) -> Steps[None]:
    """Spreads by dissemination that all have come: after step s each has heard of 2^s others."""
    empty, distance = torch.empty(0), 1
    while distance < call.size:
        call.send(empty, (call.me + distance) % call.size)
        yield call.receive(empty, (call.me - distance) % call.size)
        distance *= 2


def _add(mine: Tensor, share: Tensor, other: int) -> None:
    if len(share) != len(mine):  # `+=` may let this pass, as it broadcasts
        raise TransportError(
            f"expected {len(mine)} elements from member {other} in all_reduce, got {len(share)}"
        )
    mine += share


def _each(works: Iterable[Work[Any]]) -> Steps[None]:
    for work in works:  # noqa: UP028 - results are sent in here, and an iterator takes none
        yield work


def _chunks(x: Tensor) -> Iterable[Tensor]:
    """Splits `x` into chunks so small that adding one overlaps with the arrival of the next."""
    return torch.split(x, _CHUNK_ELEMENTS) if len(x) else ()
