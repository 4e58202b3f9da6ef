"""The wire format where only the largest entries are sent: (values, indices) <-> bytes.

    measure     what the message of each lot of a selection will hold       the only wait
    pack        a selection -> the bytes of all its lots
    unpack      the bytes of several lots -> values, indices

A selection is split into lots, one for each receiver.  On a device the number of operations does
not depend on the number of lots, and the host waits in `measure` alone.

**Heads.**  A lot's head of 24 bytes says how many entries it has, the first index, and how the
others are coded.  Heads travel by themselves, from host to host: so a receiver knows the length of
what comes, and reads no length from its device.

**Indices** go as distances from one to the next, in units of w bytes that hold less than
L = 2^(8w) - 1, preceded by a unit of L for each L that the distance exceeds.  Such a code of c
indices over a range of m takes at most w (c + m / L) bytes, whatever lies where; w is 1, 2 or 4,
whichever makes that least.  Where a bit for each of the m places takes less, these bits go: m/8
bytes.  Indices without a gap between them take nothing.  An fp32 value with its index takes, for
indices that are spread evenly at random:

    density       40%     20%     10%     1%      0.1%    0.01%    0.001%   (8 bytes as coordinates)
    bytes         4.31    4.63    5.00    5.09    6.00    6.00     8.00
    at most       4.31    4.63    5.04    5.40    6.04    6.31     8.00

Rounded values (`rounding`) take 2, 2.97 and 3.47 bytes less: at a density of 1% 2.12 bytes with
"int8" and 1.62 with "int4", at 40% 1.34 and 0.84.  Each lot holds whole blocks of these.  Indices
are integers of 64 bits until then: no length is too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.primitives import rounding
from lightning_dsgd.primitives.sparse import places

HEAD_WORDS: Final = 3
_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MARKS: Final = 0
"""Stands for a width where a lot has a bit for each place."""
_RUN: Final = 3
"""Stands for a width where indices have no gap."""
PLACES: Final = "places"
"""In place of a `wire_dtype`: indices are sent alone, and values come out as zeros."""


@dataclass(frozen=True)
class Lot:
    """A lot of a selection, and how its indices are coded."""

    begin: int
    """Where the lot begins in its selection."""
    count: int
    first: int = 0
    width: int = _RUN
    num_units: int = 0

    @property
    def end(self) -> int:
        """Where the lot ends in its selection."""
        return self.begin + self.count

    @property
    def index_bytes(self) -> int:
        """The bytes that the indices take."""
        return self.num_units * (1 if self.width == _MARKS else self.width)

    def num_bytes(self, wire_dtype: str, dtype: torch.dtype) -> int:
        """Returns the bytes of the lot's message."""
        return sum(self.planes(wire_dtype, dtype)) + self.index_bytes

    def planes(self, wire_dtype: str, dtype: torch.dtype) -> list[int]:
        """Returns the bytes of what stands for the values."""
        return [] if wire_dtype == PLACES else rounding.planes(self.count, wire_dtype, dtype)


def heads_of(lots: Sequence[Lot]) -> Tensor:
    """Returns the heads, one after another, in the host's memory."""
    words = [(lot.count, lot.first, lot.num_units << 3 | lot.width) for lot in lots]
    return torch.tensor(words, dtype=torch.int64).view(-1)


def lots_of(heads: Tensor) -> list[Lot]:
    """Returns the lots whose heads these are, one after another in one selection."""
    words = heads.view(-1, HEAD_WORDS).tolist()
    begins = accumulate((count for count, _, _ in words), initial=0)
    return [
        Lot(begin, count, first, code & 7, code >> 3)
        for begin, (count, first, code) in zip(begins, words, strict=False)
    ]


def measure(values: Tensor, indices: Tensor, cuts: Tensor, n: int) -> tuple[list[Lot], bool]:
    """Returns the lots of a selection, and whether all its values are finite.

    Args:
        values: the selected values; what lies behind the last cut does not matter
        indices: their ascending indices, on the same device
        cuts: where each lot begins and the last one ends, on the same device
        n: a number that all indices are below
    """
    if not len(indices):
        return [Lot(0, 0)] * (len(cuts) - 1), True
    begins, ends = cuts[:-1], cuts[1:]
    firsts, lasts = begins.clamp(max=len(indices) - 1), (ends - 1).clamp_(min=0)
    rows, steps = [begins, ends, indices[firsts], indices[lasts]], indices.diff()
    far = torch.zeros_like(indices)  # the units of L before each entry
    widths = [width for width in _WIDTHS if width == 1 or n > _limit(width)]
    for width in widths:
        torch.cumsum(steps.div(_limit(width), rounding_mode="floor"), 0, out=far[1:])
        rows.append(far[lasts] - far[firsts])
    rows.append(values.isfinite().all().to(torch.int64).expand(len(begins)))
    table = torch.stack(rows, 1).tolist()
    lots = [
        _lot(begin, end, first, last, dict(zip(widths, escapes, strict=True)))
        for begin, end, first, last, *escapes, _ in table
    ]
    return lots, bool(table[0][-1])


def _lot(begin: int, end: int, first: int, last: int, escapes: dict[int, int]) -> Lot:
    """Chooses the code that takes the fewest bytes."""
    count, span = end - begin, last - first
    if count == 0:
        return Lot(begin, 0)
    if span == count - 1:
        return Lot(begin, count, first)
    num_units = {w: count - 1 + num for w, num in escapes.items()} | {_MARKS: span // 8 + 1}
    width = min(num_units, key=lambda w: max(1, w) * num_units[w])
    return Lot(begin, count, first, width, num_units[width])


def pack(
    values: Tensor, indices: Tensor, lots: Sequence[Lot], wire_dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Packs lots of a selection.

    Returns:
        The bytes of the lots, one after another, and what was rounded off their values; none if
        nothing is rounded.
    """
    lots = [lot for lot in lots if lot.count]
    if not lots:
        return values.new_empty(0, dtype=torch.uint8), values[:0]
    rounded_off = values[:0]
    if wire_dtype == PLACES:
        return torch.cat(_units(indices, lots)), rounded_off
    code = taken = torch.cat([values[lot.begin : lot.end] for lot in lots])
    if wire_dtype != "float32":
        slots, length = _slots(lots, wire_dtype, values.device)
        blocks = values.new_zeros(length).index_copy_(0, slots, taken)
        code = rounding.encode(blocks, wire_dtype)
        rounded_off = taken - rounding.decode(code, like=blocks)[slots]
    sizes = [lot.planes(wire_dtype, values.dtype) for lot in lots]
    in_order = [size for plane in zip(*sizes, strict=True) for size in plane]
    planes = torch.split(code.view(torch.uint8), in_order)
    units = _units(indices, lots)
    pieces = [(*planes[i :: len(lots)], units[i]) for i in range(len(lots))]
    return torch.cat([piece for lot in pieces for piece in lot]), rounded_off


def unpack(
    messages: Sequence[Tensor], lots: Sequence[Lot], like: Tensor, wire_dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Unpacks and decodes messages of one lot each; returns values, like `like`, and indices."""
    found = [(message, lot) for message, lot in zip(messages, lots, strict=True) if lot.count]
    if not found:
        return like.new_empty(0), torch.empty(0, dtype=torch.int64, device=like.device)
    lots = [lot for _, lot in found]
    sizes = [[*lot.planes(wire_dtype, like.dtype), lot.index_bytes] for lot in lots]
    *planes, units = zip(
        *(torch.split(message, size) for (message, _), size in zip(found, sizes, strict=True)),
        strict=True,
    )
    if wire_dtype == PLACES:
        return like.new_zeros(sum(lot.count for lot in lots)), _indices(units, lots)
    code = torch.cat([piece for plane in planes for piece in plane])
    code = code.view(rounding.encode(like.new_empty(0), wire_dtype).dtype)
    if wire_dtype == "float32":
        return code, _indices(units, lots)
    slots, length = _slots(lots, wire_dtype, like.device)
    return rounding.decode(code, like.new_empty(length))[slots], _indices(units, lots)


def _slots(lots: Sequence[Lot], wire_dtype: str, device: torch.device) -> tuple[Tensor, int]:
    """Returns where entries go so that each lot begins with a block, and the length of blocks."""
    counts = [lot.count for lot in lots]
    padding = [rounding.padding(count, wire_dtype) for count in counts]
    before = list(accumulate(padding, initial=0))
    slots = torch.arange(sum(counts), device=device)
    return slots + _each(before[:-1], counts, device), len(slots) + before[-1]


def _each(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor | int:
    """Returns each lot's number once for each of its entries; the number itself for one lot."""
    if len(numbers) == 1:
        return numbers[0]
    both = devices.integers([*numbers, *counts], device).view(2, -1)
    return torch.repeat_interleave(both[0], both[1], output_size=sum(counts))


# ---- indices ----


def _units(indices: Tensor, lots: Sequence[Lot]) -> list[Tensor]:
    """Returns the coded indices of each lot as bytes; codes all lots of one width at once."""
    units = [indices.new_empty(0, dtype=torch.uint8)] * len(lots)
    steps = indices.diff()
    for width in {lot.width for lot in lots} - {_RUN}:
        chosen = [i for i, lot in enumerate(lots) if lot.width == width]
        those = [lots[i] for i in chosen]
        code = _marks(indices, those) if width == _MARKS else _distances(steps, those, width)
        pieces = torch.split(code.view(torch.uint8), [lot.index_bytes for lot in those])
        for i, piece in zip(chosen, pieces, strict=True):
            units[i] = piece
    return units


def _indices(units: Sequence[Tensor], lots: Sequence[Lot]) -> Tensor:
    """Returns the indices of all lots, one lot after another."""
    pieces: dict[int, Tensor] = {}
    for width in {lot.width for lot in lots}:
        chosen = [i for i, lot in enumerate(lots) if lot.width == width]
        those, codes = [lots[i] for i in chosen], [units[i] for i in chosen]
        read = {_RUN: _run, _MARKS: _marked}.get(width, _summed)
        found = read(codes, those)
        if len(those) == len(lots):
            return found
        pieces |= zip(chosen, torch.split(found, [lot.count for lot in those]), strict=True)
    return torch.cat([pieces[i] for i in range(len(lots))])


def _run(units: Sequence[Tensor], lots: Sequence[Lot]) -> Tensor:
    """Returns indices without a gap."""
    counts, device = [lot.count for lot in lots], units[0].device
    before = accumulate(counts, initial=0)
    numbers = [lot.first - begin for lot, begin in zip(lots, before, strict=False)]
    return torch.arange(sum(counts), device=device) + _each(numbers, counts, device)


def _distances(steps: Tensor, lots: Sequence[Lot], width: int) -> Tensor:
    """Returns the distances within lots from one index to the next, in units of so many bytes."""
    steps = torch.cat([steps[lot.begin : lot.end - 1] for lot in lots])
    num_units, limit = sum(lot.num_units for lot in lots), _limit(width)
    if num_units > len(steps):
        escapes = steps.div(limit, rounding_mode="floor")
        ends = torch.arange(len(steps), device=steps.device).add_(escapes.cumsum(0))
        units = torch.full((num_units,), limit, dtype=torch.int64, device=steps.device)
        steps = units.index_copy_(0, ends, steps.sub(escapes, alpha=limit))
    # A distance of more than half the range turns negative, and back in `_summed`.
    return steps.to(_WIDTHS[width])


def _summed(units: Sequence[Tensor], lots: Sequence[Lot]) -> Tensor:
    """Sums up distances; a distance of zero stands for the first index of each lot."""
    width, counts = lots[0].width, [lot.count for lot in lots]
    zero, limit, device = units[0].new_zeros(width), _limit(width), units[0].device
    joined = torch.cat([piece for code in units for piece in (zero, code)])
    steps = joined.view(_WIDTHS[width]).to(torch.int64).bitwise_and_(limit)
    sums = steps.cumsum(0)
    if len(steps) > sum(counts):
        sums = sums[places(steps != limit, sum(counts))]
    if len(lots) == 1:
        return sums.add_(lots[0].first)
    starts = list(accumulate(counts, initial=0))[:-1]
    table = devices.integers([*starts, *(lot.first for lot in lots), *counts], device)
    begins, firsts, lengths = table.view(3, -1)
    offsets = firsts - sums[begins]
    return sums.add_(torch.repeat_interleave(offsets, lengths, output_size=len(sums)))


def _marks(indices: Tensor, lots: Sequence[Lot]) -> Tensor:
    """Returns a bit for each place from a lot's first index to its last; eight a byte."""
    total, shifts = sum(lot.num_units for lot in lots), _shifts(lots, indices.device)
    marks = torch.zeros(8 * total, dtype=torch.uint8, device=indices.device)
    marks[torch.cat([indices[lot.begin : lot.end] for lot in lots]) - shifts] = 1
    if devices.is_on_host(marks):
        return torch.from_numpy(np.packbits(marks.numpy(), bitorder="little"))
    return (marks.view(-1, 8) << _bits(marks.device)).sum(1, dtype=torch.uint8)


def _marked(units: Sequence[Tensor], lots: Sequence[Lot]) -> Tensor:
    """Returns the indices whose bits are set."""
    code, count = torch.cat(list(units)), sum(lot.count for lot in lots)
    if devices.is_on_host(code):
        marks = torch.from_numpy(np.unpackbits(code.numpy(), bitorder="little"))
    else:
        marks = (code.unsqueeze(1) >> _bits(code.device) & 1).view(-1)
    return places(marks.bool(), count).add_(_shifts(lots, code.device))


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _shifts(lots: Sequence[Lot], device: torch.device) -> Tensor | int:
    """Returns for each entry what its index is more than its place among the bits of all lots."""
    begins = accumulate((lot.num_units for lot in lots), initial=0)
    shifts = [lot.first - 8 * begin for lot, begin in zip(lots, begins, strict=False)]
    return _each(shifts, [lot.count for lot in lots], device)


def _limit(width: int) -> int:
    """Returns the distance that a unit of so many bytes cannot hold, and that an escape means."""
    return (1 << 8 * width) - 1
