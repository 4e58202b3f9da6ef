"""Averages of rounded values; what is rounded off is kept and sent the next time.

    kept_i <- kept_i + d_i
    s_i    =  Q(kept_i),                 kept_i <- kept_i - s_i
    u      =  Q(sum_j s_j),              kept_i <- kept_i + sum_j s_j - u     i: who sums this piece
    d_i    <- u / P

Legend: d what is to be averaged, Q(.) the rounding, P ranks.

Each of P pieces is summed by one rank, in fp32 (fp64 for fp64 weights), in the order of the ranks,
and that rank sends the rounded sum to all: the result is the same to the bit everywhere.  Over all
ranks, the sum of u / P and of kept_i / P is that of what was given: nothing is lost, only late.

What values are rounded to says `rounding`.  Sends 2(P-1)/P |d| / 2, / 3.88 and / 7.53 with
"bfloat16", "int8" and "int4" in 2(P-1) messages, or in two calls of the network's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd import agreement
from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.primitives.rounding import decode, encode, planes
from lightning_dsgd.transport import Transport, Work

LEAST_PIECE: Final = 2**18
"""A smaller piece of a gradient costs more time than its sum takes on most networks."""


def residual_of(net: Transport, x: Tensor, wire_dtype: str) -> Tensor | None:
    """Makes a tensor for what is rounded off; None if nothing is rounded, or nothing is sent."""
    if wire_dtype == "float32" or net.world_size == 1:
        return None
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def average(net: Transport, x: Tensor, residual: Tensor | None, wire_dtype: str) -> None:
    """Puts the mean over all ranks, of x plus the residual, into x.

    Uses messages with tag 0 between the ranks, or the network's engine.

    Args:
        net: the network of all ranks
        x: the tensor to average
        residual: what was rounded off before, and will be from now on; may be None with "float32",
            which rounds nothing
        wire_dtype: "float32", "bfloat16", "int8" or "int4"
    """
    if wire_dtype == "float32" or residual is None:
        if residual is not None:
            x += residual
            residual.zero_()
        agreement.average(net, x)
    else:
        _average_rounded(net, range(net.world_size), x, residual, wire_dtype)


def _average_rounded(
    net: Transport,
    members: Sequence[int],
    x: Tensor,
    residual: Tensor,
    wire_dtype: str,
    tag: int = 0,
) -> None:
    residual += x
    me, size = members.index(net.rank), len(members)
    spans = [end - begin for begin, end in pairwise(evenly(len(x), size))]
    shares = torch.split(residual, spans)
    mine, like = shares[me], encode(residual[:0], wire_dtype)
    lengths = [sum(planes(span, wire_dtype, x.dtype)) // like.itemsize for span in spans]
    carrier = (_ByEngine if net.sum_engine else _ByMessages)(net, members, like, tag)

    def rounded(place: int) -> Tensor:
        """Rounds a member's share of what this rank has, which keeps what is rounded off."""
        code = encode(shares[place], wire_dtype)
        shares[place].sub_(decode(code, like=shares[place]))
        return code

    came = carrier.swap(rounded, lengths)
    total = torch.zeros_like(mine)
    for place in range(size):
        total += mine if place == me else decode(came(place), like=mine)
    code = encode(total, wire_dtype)
    torch.sub(total, decode(code, like=total), out=mine)
    sums = carrier.gather(code, lengths)
    for place, mean in enumerate(torch.split(x, spans)):
        mean.copy_(decode(code if place == me else sums(place), like=shares[place]))
    x /= size
    carrier.finish()


Came = Callable[[int], Tensor]
"""What has come from another member, by its place; waits for it."""


class _ByMessages:
    """Carries codes in messages: one leaves while the next one is made.

    Args:
        net: the network
        members: who takes part
        like: an empty code
        tag: the tag of the messages
    """

    def __init__(self, net: Transport, members: Sequence[int], like: Tensor, tag: int) -> None:
        self._net, self._members, self._like, self._tag = net, members, like, tag
        me, size = members.index(net.rank), len(members)
        self._others = [(me + i) % size for i in range(1, size)]
        self._sent: list[Work[None]] = []

    def swap(self, made: Callable[[int], Tensor], lengths: Sequence[int]) -> Came:
        """Sends each other member what is `made` for it; `lengths` has the length of each."""
        self._sent += [self._send(place, made(place)) for place in self._others]
        return self._take

    def gather(self, code: Tensor, lengths: Sequence[int]) -> Came:
        """Sends a code to all other members; `lengths` has the length of each one's."""
        self._sent += [self._send(place, code) for place in self._others]
        return self._take

    def finish(self) -> None:
        """Waits until all is sent."""
        for work in self._sent:
            work.wait()

    def _send(self, place: int, code: Tensor) -> Work[None]:
        return self._net.send(code, self._members[place], self._tag, copy=False)

    def _take(self, place: int) -> Tensor:
        return self._net.recv(self._like, self._members[place], self._tag).wait()


class _ByEngine(_ByMessages):
    """Carries codes by the network's engine, such as NCCL: all of them in one call.

    On a device they would go through the host's memory in messages.
    """

    def swap(self, made: Callable[[int], Tensor], lengths: Sequence[int]) -> Came:
        me, size = self._members.index(self._net.rank), len(self._members)
        to_each = [0 if place == me else length for place, length in enumerate(lengths)]
        from_each = [0 if place == me else lengths[me] for place in range(size)]
        leaving, came = (self._like.new_empty(sum(each)) for each in (to_each, from_each))
        parts = torch.split(leaving, to_each)
        for place in self._others:
            parts[place].copy_(made(place))
        self._net.all_to_all(came, leaving, from_each, to_each, self._members).wait()
        return torch.split(came, from_each).__getitem__

    def gather(self, code: Tensor, lengths: Sequence[int]) -> Came:
        sums = self._like.new_empty(sum(lengths))
        self._net.gather_into(sums, code, lengths, self._members).wait()
        return torch.split(sums, list(lengths)).__getitem__


class GroupSums:
    """Sums over groups of ranks, of values near a reference that all ranks share.

        r   <- sum / P                             a first sum over all P ranks: it is not rounded
        u    = Q(sum of Q(y_j - r))
        y_i <- S (r + u / S + e_i)                 e_i: what rank i has rounded off
        r   <- r + u / P                           a sum over all ranks

    Legend: y what is summed, r the reference, Q(.) the rounding, S ranks in the group.

    The nearer the values are to the reference, the less is rounded off.  It stays on the rank that
    has rounded, so the results of a group add up to what its ranks gave, times S.  Nothing is kept
    for later, and a rank may be in another group each time.  Groups come in the same order on all
    of their ranks, so the reference is the same everywhere.  Where there is none at first,
    nothing is rounded until a sum over all ranks has made one.

    Memory: |x|, and 3 |x| while a sum is under way.
    """

    _TAG: Final = 1

    def __init__(self, wire_dtype: str, reference: Tensor | None = None) -> None:
        self._wire_dtype = wire_dtype
        self.reference = reference

    def all_reduce(self, net: Transport, y: Tensor, group: Sequence[int]) -> None:
        """Puts the sum over the group into y, but for what this rank has rounded off."""
        is_global, size = len(group) == net.world_size, len(group)
        if self.reference is None:
            net.all_reduce(y, group).wait()
            if is_global:
                self.reference = y / size
        elif size > 1:
            mean = y - self.reference
            rounded_off = torch.zeros_like(mean, dtype=torch.promote_types(y.dtype, torch.float32))
            _average_rounded(net, group, mean, rounded_off, self._wire_dtype, self._TAG)
            mean += self.reference
            if is_global:
                self.reference.copy_(mean)
            torch.mul(rounded_off.add_(mean), size, out=rounded_off)
            y.copy_(rounded_off)
