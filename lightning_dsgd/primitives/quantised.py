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
"bfloat16", "int8" and "int4" in 2(P-1) messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd import agreement
from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.primitives.rounding import decode, encode
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

    Uses messages with tag 0 between the ranks.

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
    size, me = len(members), members.index(net.rank)
    spans = [slice(*pair) for pair in pairwise(evenly(len(x), size))]
    others = [(me + i) % size for i in range(1, size)]
    sent: list[Work[None]] = []
    for other in others:
        share = residual[spans[other]]
        code = encode(share, wire_dtype)
        sent.append(net.send(code, members[other], tag, copy=False))
        share -= decode(code, like=share)

    share = residual[spans[me]]
    total = torch.zeros_like(share)
    like = encode(share[:0], wire_dtype)
    for place, rank in enumerate(members):
        is_mine = place == me
        total += share if is_mine else decode(net.recv(like, rank, tag).wait(), like=share)
    code = encode(total, wire_dtype)
    rounded = decode(code, like=total)
    sent += [net.send(code, members[other], tag, copy=False) for other in others]
    torch.sub(total, rounded, out=share)

    x[spans[me]] = rounded.to(x.dtype)
    for other in others:
        code = net.recv(like, members[other], tag).wait()
        x[spans[other]] = decode(code, like=residual[spans[other]]).to(x.dtype)
    x /= size
    for work in sent:
        work.wait()


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
