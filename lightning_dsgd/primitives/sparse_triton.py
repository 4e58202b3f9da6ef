"""Accumulation, selection and compaction on a GPU, in two kernels and with one wait at most.

    _accumulate_and_mark    r += g, g <- 0, marks of r, their count in each block
    _compact                values, indices <- r at the marks, block after block

Legend: r the residual, g the gradient, n elements.

A mark is a bit, so that `_compact` reads n / 8 bytes and of r only the sectors that have a mark in
them; the first kernel reads and writes r and g once, 16 n bytes in fp32, which is next to all that
there is.  Where a block's entries begin is known from the counts, so indices ascend without a sort
and without atomics, and the result does not depend on which block is first.  The host waits once,
for the number of all marks, where the tensors that are returned have that length.

`sparse.select_plainly` is what it must equal to the bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dsgd import devices

BLOCK: Final = 4096
"""The number of elements in a block; 32 of them share a word of marks."""


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate_and_mark(  # type: ignore[no-untyped-def]
    r, g, least, marks, counts, n, HAS_G: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    # 64 bits: n may be above 2^31.
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    value = tl.load(r + places, mask=inside, other=0.0)
    if HAS_G:
        value += tl.load(g + places, mask=inside, other=0.0).to(value.dtype)
        tl.store(r + places, value, mask=inside)
        tl.store(g + places, tl.zeros([BLOCK], dtype=g.dtype.element_ty), mask=inside)
    # Not `>=`, which would pass over NaN.
    small = tl.abs(value) < tl.load(least)
    mark = tl.where(small | (places >= n), 0, 1)
    tl.store(counts + block, tl.sum(mark, axis=0))
    bits = tl.reshape(mark, [BLOCK // 32, 32]) << tl.arange(0, 32)[None, :]
    words = block.to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(marks + words, tl.sum(bits, axis=1))


@triton.jit  # type: ignore[untyped-decorator]
def _compact(  # type: ignore[no-untyped-def]
    r, marks, ends, values, indices, most, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mark = (tl.load(marks + places // 32) >> (places % 32).to(tl.int32)) & 1
    end = tl.load(ends + block)
    # Counted from where the block ends: the last of its marks stands there.
    target = end - tl.sum(mark, axis=0) + tl.cumsum(mark, axis=0) - 1
    # Never beyond n, where `_accumulate_and_mark` leaves zeros.
    is_taken = (mark != 0) & (target < most)
    tl.store(values + target, tl.load(r + places, mask=is_taken), mask=is_taken)
    tl.store(indices + target, places, mask=is_taken)


def select(
    x: Tensor, least: Tensor, g: Tensor | None, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Adds g to x, and selects values and ascending indices of all but |x_i| < least.

    Args:
        x: a contiguous tensor; changed where g is given
        least: one element on the same device, above zero
        g: as long as x, contiguous; zeros afterwards
        most: as in `sparse.select`; nothing waits for the device then
    """
    if g is None:
        x = x.contiguous()
    else:
        assert x.is_contiguous()
        assert g.is_contiguous()
    num_blocks = triton.cdiv(len(x), BLOCK)
    if not num_blocks:
        return x.new_empty(0), torch.empty(0, dtype=torch.int64, device=x.device)
    marks = torch.empty(num_blocks * (BLOCK // 32), dtype=torch.int32, device=x.device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
    grid: Any = (num_blocks,)
    with devices.selected(x.device):
        _accumulate_and_mark[grid](
            x,
            x if g is None else g,
            least.to(x.dtype),
            marks,
            counts,
            len(x),
            HAS_G=g is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    ends = counts.cumsum(0)  # in 64 bits
    count = min(most, len(x)) if most is not None else int(ends[-1])  # waits for the device
    values = torch.zeros(count, dtype=x.dtype, device=x.device)
    indices = torch.full((count,), len(x), dtype=torch.int64, device=x.device)
    with devices.selected(x.device):
        _compact[grid](x, marks, ends, values, indices, count, BLOCK=BLOCK, num_warps=8)
    return values, indices
