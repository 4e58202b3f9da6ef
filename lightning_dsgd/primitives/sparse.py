"""What is sent where only the largest entries are: thresholds, selection, the wire format.

    kth_magnitude           th <- k-th largest |x_i|          reads x once, and 1.3 k candidates
    select                  values, indices <- |x_i| >= th    reads x once
    accumulate_and_select   r += g, g <- 0, select from r     reads r and g, writes r and g
    pack, unpack            (values, indices) <-> bytes       passes over what was selected

Legend: n elements of x, k of them wanted, th a threshold (a tensor of one element), r the residual.

On a CPU a selection goes by pieces that stay in the cache, so what is written there as several
operations touches memory once (with g of another dtype than r, twice).  On a GPU it is a kernel
(`sparse_triton.py`) where Triton can be imported and is the faster form there (`sparse_choice.py`);
nothing waits for the device there but what returns a tensor whose length depends on the values:
`select`, `accumulate_and_select`, `pack` and `unpack`.

**NaN and inf** are selected, whatever the threshold: who looks at what was selected has found them,
without a pass of its own.  **Zeros** are never selected, nor are subnormal numbers.

**The wire format.**  Indices go as distances from one to the next, in units of w bytes that hold
less than L = 2^(8w) - 1, preceded by a unit of L for each L that the distance exceeds.  Such a code
of c indices over a range of m takes at most w (c + m / L) bytes, whatever lies where; w is 1, 2 or
4, whichever makes that least.  Where a bit for each of the m places takes less, these bits go: m/8
bytes.  An fp32 value with its index takes, for indices that are spread evenly at random:

    density       40%     20%     10%     1%      0.1%    0.01%    0.001%   (8 bytes as coordinates)
    bytes         4.31    4.63    5.00    5.09    6.00    6.00     8.00
    at most       4.31    4.63    5.04    5.40    6.04    6.31     8.00

and 24 bytes a message.  Rounded values (`rounding`) take 2, 2.97 and 3.47 bytes less: at a density
of 1% 2.12 bytes with "int8" and 1.62 with "int4", at 40% 1.34 and 0.84.  Messages of these hold
whole blocks.  Indices are integers of 64 bits until then: no length is too large.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.primitives import rounding
from lightning_dsgd.primitives.sparse_choice import Choice, Form

_PIECE: Final = 1 << 17
"""The number of elements that stay in a core's cache from one operation to the next."""
_THREADS_WORTH: Final = 1 << 20
"""Fewer elements are not worth another thread."""
_SAMPLE_STRIDE: Final = 61
_SAMPLE_FROM: Final = 1 << 16
"""A tensor of fewer elements is not worth a sample."""
_BITS: Final = {
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}
_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MARKS: Final = 0
"""Stands for a width where a message has a bit for each place."""
HEADER_BYTES: Final = 24
_choice: Final = Choice()
"""The measured choices of this process, which has the devices."""


# ---- thresholds ----


def kth_magnitude(x: Tensor, k: int) -> Tensor:
    """Returns exactly the k-th largest |x_i|; 0 where k is larger than the number of elements.

    A sample gives a threshold that a little more than k elements reach, and only these are ranked.
    All elements are ranked where the sample has misled.
    """
    n = len(x)
    if k > n:
        return x.new_zeros(())
    if n >= _SAMPLE_FROM and 4 * k <= n:
        sample = x[::_SAMPLE_STRIDE]
        expected = k // _SAMPLE_STRIDE
        guess = kth_magnitude(sample, expected + 4 * int(expected**0.5) + 4)
        candidates, _ = select(x, guess)
        if len(candidates) >= k:
            x = candidates
    return x.abs().topk(k, sorted=False).values.min()


def is_near(count: int, k: int) -> bool:
    """Returns whether a threshold that selects `count` entries may stay: 3k/4 to 5k/4."""
    return 3 * k <= 4 * count <= 5 * k


def corrected(threshold: Tensor, count: int, k: int) -> Tensor:
    """Moves the threshold gently towards one that would select k entries.

    By the tenth root of the error: the tail of what accumulates is steep, as all that lay above the
    threshold before is gone, and a threshold that is moved too far lets through too many and too
    few in turn.
    """
    return threshold.mul((count / k) ** 0.1) if count else threshold


# ---- selection ----


def select(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values and ascending indices of the elements that reach the threshold's magnitude."""
    return _select(x, threshold, None)


def accumulate_and_select(residual: Tensor, g: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Adds g to the residual, zeroes g, and selects from the residual."""
    return _select(residual, threshold, g)


def _select(x: Tensor, threshold: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    least = threshold.clamp(min=torch.finfo(x.dtype).smallest_normal)
    if devices.is_on_host(x):
        return select_by_pieces(x, least, g)
    return _choice.among(forms(x), x)(x, least, g)


def prepare(x: Tensor, num_regions: int, *, is_told: bool) -> None:
    """Chooses the form of selection from tensors like x and from its regions, so no step has to.

    Args:
        x: a tensor like the one to select from
        num_regions: the number of regions into which the tensor is divided
        is_told: whether the measured times are logged
    """
    if not devices.is_on_host(x):
        for part in (x, x[: -(-len(x) // num_regions)]):
            _choice.prepare(forms(x), part, is_told=is_told)


def forms(x: Tensor) -> dict[str, Form]:
    """Returns the ways to select from a tensor on a device; all give the same to the bit."""
    forms: dict[str, Form] = {"torch": select_plainly}
    if devices.runs_triton(x):
        from lightning_dsgd.primitives import sparse_triton

        forms["triton"] = sparse_triton.select
    return forms


def select_plainly(x: Tensor, least: Tensor, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Selects on any device; the two faster forms must equal its result to the bit."""
    if g is not None:
        x += g
        g.zero_()
    # Not `>=`, which would pass over NaN.
    indices = (x.abs() < least).logical_not_().nonzero().squeeze(1)
    return x.index_select(0, indices), indices


def select_by_pieces(x: Tensor, least: Tensor, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Selects on a CPU, piece by piece.

    By NumPy, which is faster than torch at comparing into marks and at finding the few among many.
    Magnitudes, NaN's too, are ordered like the integers that their bits are without the sign.
    """
    if g is not None and not (g.dtype == x.dtype in (torch.float32, torch.float64)):
        x += g
        g.zero_()
        g = None
    signed, unsigned = _BITS[x.itemsize]
    all_bits = x.detach().view(signed).numpy()
    to_add = None if g is None else (x.detach().numpy(), g.detach().numpy())
    twice_least = 2 * int(least.view(signed))

    def select_between(begin: int, end: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        selected = []
        doubled = np.empty(min(_PIECE, end - begin), unsigned)
        marks = np.empty(len(doubled), np.bool_)
        for start in range(begin, end, _PIECE):
            stop = min(start + _PIECE, end)
            if to_add is not None:
                total, gradient = (array[start:stop] for array in to_add)
                total += gradient
                gradient[:] = 0
            bits, num = all_bits[start:stop], stop - start
            np.left_shift(bits.view(unsigned), 1, out=doubled[:num])
            np.greater_equal(doubled[:num], twice_least, out=marks[:num])
            (indices,) = marks[:num].nonzero()
            values = bits.take(indices)
            indices += start
            selected.append((values, indices))
        return selected

    num_threads = max(1, min(torch.get_num_threads(), len(x) // _THREADS_WORTH))
    ends = [len(x) * i // num_threads for i in range(num_threads + 1)]
    selected = [(all_bits[:0], np.empty(0, np.intp))]
    if num_threads == 1:
        selected += select_between(*ends)
    else:
        with ThreadPoolExecutor(num_threads, "dsgd-select") as threads:
            for part in threads.map(select_between, ends, ends[1:]):
                selected += part
    values, indices = map(np.concatenate, zip(*selected, strict=True))
    return torch.from_numpy(values).view(x.dtype), torch.from_numpy(indices)


def largest(values: Tensor, k: int) -> Tensor:
    """Marks the k largest magnitudes; of equal magnitudes, the first are taken."""
    magnitudes = values.abs()
    least = kth_magnitude(values, k)
    marks, ties = magnitudes > least, magnitudes == least
    # Counted on the device: the host, which could take a slice of so many, would wait for it.
    return marks.logical_or_(ties.logical_and_(ties.cumsum(0) <= k - marks.sum()))


def places(marks: Tensor, count: int) -> Tensor:
    """Returns the ascending places of so many marks; unlike `nonzero`, waits for no device."""
    if devices.is_on_host(marks):
        return marks.nonzero().squeeze(1)
    # What is not marked goes to one place behind.
    target = torch.where(marks, marks.cumsum(0) - 1, count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=marks.device)
    return found.scatter_(0, target, torch.arange(len(marks), device=marks.device))[:count]


def count_each(digits: Tensor, num: int) -> Tensor:
    """Counts each of so many digits; unlike `bincount`, waits for no device."""
    if devices.is_on_host(digits):
        return torch.bincount(digits, minlength=num)
    counts = torch.zeros(num, dtype=torch.int64, device=digits.device)
    return counts.index_add_(0, digits.to(torch.int64), torch.ones_like(digits, dtype=torch.int64))


# ---- the wire ----


def pack(code: Tensor, indices: Tensor) -> Tensor:
    """Packs values, which may be encoded, and their ascending indices into one message of bytes."""
    count, device = len(indices), indices.device
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=device)
    first, last = indices[:: max(1, count - 1)].tolist()[:2] if count > 1 else [int(indices)] * 2
    span = last - first
    num_bytes = {w: w * (count + span / _limit(w)) for w in _WIDTHS} | {MARKS: span / 8 + 1}
    width = min(num_bytes, key=num_bytes.__getitem__)
    units = _marks(indices - first, span) if width == MARKS else _distances(indices, width, span)
    parts = (devices.integers((count, first, width), device), code, units)
    return torch.cat([part.view(torch.uint8) for part in parts])


def unpack(
    message: Tensor, dtype: torch.dtype, wire_dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Unpacks and decodes a message; returns values, in `dtype`, and indices."""
    if not len(message):
        return message.to(dtype), message.to(torch.int64)
    count, first, width = message[:HEADER_BYTES].view(torch.int64).tolist()
    middle = HEADER_BYTES + rounding.num_bytes(count, wire_dtype, dtype)
    travelled = rounding.encode(message.new_empty(0, dtype=dtype), wire_dtype).dtype
    like = message.new_empty(count, dtype=dtype)
    values = rounding.decode(message[HEADER_BYTES:middle].view(travelled), like)
    units = message[middle:]
    indices = _marked(units, count) if width == MARKS else _summed(units, count, width)
    return values, indices.add_(first)


def _distances(indices: Tensor, width: int, span: int) -> Tensor:
    """Returns the distances from one index to the next, in units of so many bytes."""
    limit, count = _limit(width), len(indices)
    narrow = torch.int32 if max(span, limit) < 1 << 31 else torch.int64
    units = torch.diff(indices).to(narrow)
    (far,) = (units >= limit).nonzero(as_tuple=True)
    if len(far):
        distances, device = units, indices.device
        escapes = torch.zeros(count - 1, dtype=torch.int64, device=device)
        escapes[far] = (distances[far] // limit).to(torch.int64)
        distances[far] %= limit
        ends = torch.arange(count - 1, device=device) + escapes.cumsum(0)
        units = torch.full((int(ends[-1]) + 1,), limit, dtype=narrow, device=device)
        units[ends] = distances
    # A distance of more than half the range turns negative, and back in `_summed`.
    return units.to(_WIDTHS[width])


def _summed(units: Tensor, count: int, width: int) -> Tensor:
    """Sums up distances; returns the indices, less the first."""
    limit = _limit(width)
    steps = units.clone().view(_WIDTHS[width]).to(torch.int64).bitwise_and_(limit)
    indices = torch.zeros(count, dtype=torch.int64, device=units.device)
    if len(steps) == count - 1:
        torch.cumsum(steps, 0, out=indices[1:])
    else:
        indices[1:] = steps.cumsum(0)[places(steps != limit, count - 1)]
    return indices


def _marks(indices: Tensor, span: int) -> Tensor:
    """Returns a bit for each number up to the span, set if the number is there; eight a byte."""
    marks = torch.zeros((span // 8 + 1) * 8, dtype=torch.uint8, device=indices.device)
    marks[indices] = 1
    if devices.is_on_host(marks):
        return torch.from_numpy(np.packbits(marks.numpy(), bitorder="little"))
    bits = [column << bit for bit, column in enumerate(marks.view(-1, 8).unbind(1))]
    return torch.stack(bits).sum(0, dtype=torch.uint8)


def _marked(units: Tensor, count: int) -> Tensor:
    """Returns the numbers whose bits are set, so many of them."""
    if devices.is_on_host(units):
        return places(
            torch.from_numpy(np.unpackbits(units.numpy(), bitorder="little")).bool(), count
        )
    in_each = torch.stack([units >> bit & 1 for bit in range(8)]).sum(0)
    target = in_each.cumsum(0).sub_(in_each)  # of a byte's first mark, then of its next ones
    first = torch.arange(0, 8 * len(units), 8, device=units.device)
    found = torch.zeros(count + 1, dtype=torch.int64, device=units.device)
    for bit in range(8):
        marks = (units >> bit & 1).bool()
        found.scatter_(0, target.where(marks, count), first + bit)  # others one place behind
        target += marks
    return found[:count]


def _limit(width: int) -> int:
    """Returns the distance that a unit of so many bytes cannot hold, and that an escape means."""
    return (1 << 8 * width) - 1
