"""Averages of rounded values; what is rounded off is kept and sent the next time.

    kept_i <- kept_i + d_i
    s_i    =  Q(kept_i),                 kept_i <- kept_i - s_i
    u      =  Q(sum_j s_j),              kept_i <- kept_i + sum_j s_j - u     i: who sums this piece
    d_i    <- u / P

Legend: d what is to be averaged, Q(.) the rounding, P ranks.

Each of P pieces is summed by one rank, in fp32 (fp64 for fp64 weights), in the order of the ranks,
and that rank sends the rounded sum to all: the result is the same to the bit everywhere.  Over all
ranks, the sum of u / P and of kept_i / P is that of what was given: nothing is lost, only late.

    "bfloat16"   rounded to bfloat16
    "int8"       k of -127 to 127, one byte, for k * 2^e; one byte with e for every 32 values
    "int4"       k of -7 to 7, half a byte; else the same

As 2^e is a power of two, k * 2^e is exact, and so is what is kept.  (The formats are those of the
OCP Microscaling specification, but for the four bits, which are whole numbers here.)

Sends 2(P-1)/P |d| / 2, / 3.88 and / 7.53 in 2(P-1) messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dsgd import agreement
from lightning_dsgd.hyperparameters import one_of
from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.transport import Transport, TransportError, Work

BLOCK: Final = 32
"""Values that share an exponent."""
_BITS: Final = {"int8": 8, "int4": 4}
_NOT_FINITE: Final = 255
"""An exponent as fp32 stores it, biased by 127: that of infinity and NaN."""


def wire_dtype(rest: str = "is sent the next time") -> Any:
    """The hyperparameter of an algorithm that rounds what it sends; the rest is rounded off."""
    return one_of(
        "float32",
        "bfloat16",
        "int8",
        "int4",
        default="float32",
        doc='data type of what is sent; "float32" does not round, "int8" and "int4" send a byte '
        f"and half a byte per weight; what is rounded off {rest}",
    )


def keep(net: Transport, x: Tensor, wire_dtype: str) -> Tensor | None:
    """Where what is rounded off is kept: nowhere, if nothing is, or nothing is sent."""
    if wire_dtype == "float32" or net.world_size == 1:
        return None
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def average(net: Transport, x: Tensor, kept: Tensor | None, wire_dtype: str) -> None:
    """Puts the mean over all ranks, of x and what was kept, into x.

    Uses messages with tag 0 between the ranks.

    Args:
        net: of all ranks
        x: what is to be averaged
        kept: what has been rounded off before, and is from now on; None with "float32", which
            rounds nothing
        wire_dtype: "float32", "bfloat16", "int8" or "int4"
    """
    if kept is None:
        agreement.average(net, x)
    else:
        _average_rounded(net, range(net.world_size), x, kept, wire_dtype)


def _average_rounded(
    net: Transport,
    members: Sequence[int],
    x: Tensor,
    kept: Tensor,
    wire_dtype: str,
    tag: int = 0,
) -> None:
    kept += x
    size, me = len(members), members.index(net.rank)
    spans = [slice(*pair) for pair in pairwise(evenly(len(x), size))]
    others = [(me + i) % size for i in range(1, size)]
    sent: list[Work[None]] = []
    for other in others:
        share = kept[spans[other]]
        code = encode(share, wire_dtype)
        sent.append(net.send(code, members[other], tag, copy=False))
        share -= decode(code, like=share)

    share = kept[spans[me]]
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
        x[spans[other]] = decode(code, like=kept[spans[other]]).to(x.dtype)
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
    of their ranks, so the reference is the same everywhere.  Before the first sum over all ranks
    there is none, and nothing is rounded.

    Memory: |x|, and 3 |x| while a sum is under way.
    """

    _TAG: Final = 1

    def __init__(self, wire_dtype: str) -> None:
        self._wire_dtype = wire_dtype
        self.reference: Tensor | None = None

    def all_reduce(self, net: Transport, y: Tensor, group: Sequence[int]) -> None:
        """Puts the sum over the group into y, up to what this rank has rounded off."""
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


def encode(x: Tensor, wire_dtype: str) -> Tensor:
    """The message for x: x itself, of bfloat16, or of bytes: all exponents and then all values."""
    if wire_dtype == "float32":
        return x
    if wire_dtype == "bfloat16":
        return x.to(torch.bfloat16)
    bits = _BITS[wire_dtype]
    blocks = pad(x, (0, -len(x) % BLOCK)).view(_num_blocks(len(x)), BLOCK)
    largest = blocks.abs().amax(1).float()
    exponents = (largest.view(torch.int32) >> 23).bitwise_and_(_NOT_FINITE)
    limit = 2 ** (bits - 1) - 1
    values = (blocks / _scales(exponents, bits)).round_().clamp_(-limit, limit)
    codes = values.nan_to_num_(0.0).to(torch.int8)
    if bits == 4:
        half = BLOCK // 2
        codes = (codes[:, :half] & 15) | (codes[:, half:] << 4)
    return torch.cat([exponents.to(torch.uint8).view(torch.int8), codes.reshape(-1)])


def decode(code: Tensor, like: Tensor) -> Tensor:
    """What a message holds, of the length and the dtype of `like`."""
    if code.dtype == like.dtype:
        return code
    if code.dtype == torch.bfloat16:
        _check_length(code, len(like), len(like))
        return code.to(like.dtype)
    num_blocks = _num_blocks(len(like))
    bits = 4 if len(code) == num_blocks * (1 + BLOCK // 2) else 8
    _check_length(code, num_blocks * (1 + BLOCK * bits // 8), len(like))
    exponents = code[:num_blocks].view(torch.uint8).to(torch.int32)
    codes = code[num_blocks:].view(num_blocks, BLOCK * bits // 8)
    if bits == 4:
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], 1)
    values = codes.to(like.dtype) * _scales(exponents, bits).to(like.dtype)
    return values.view(-1)[: len(like)]


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def _scales(exponents: Tensor, bits: int) -> Tensor:
    """2^e of each block, so that its largest value becomes all but the largest k, or that.

    Made of its bits, as a power computed by a device may be off by one.
    """
    stored = (exponents - (bits - 2)).clamp_(min=1)  # the smallest normal number, for tiny blocks
    scales = (stored << 23).view(torch.float32)
    return scales.masked_fill(exponents == _NOT_FINITE, torch.nan)[:, None]


def _check_length(code: Tensor, expected: int, num_values: int) -> None:
    if len(code) != expected:
        raise TransportError(
            f"expected {expected} elements for {num_values} rounded values, got {len(code)}; "
            "wire_dtype must be the same on all ranks"
        )
