"""Weights in half precision on a GPU: x follows the parameters in one kernel.

    x <- x + (p - round(x))      reads x and p once, and writes x: 10 bytes an element

`wide.follow_plainly` is what it must equal to the bit: 66 bytes, in 10 kernels.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dsgd import devices

BLOCK: Final = 1024
"""The number of elements in a block."""


@triton.jit  # type: ignore[untyped-decorator]
def _follow(x, p, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # 64 bits: n may be above 2^31.
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    value = tl.load(x + places, mask=inside, other=0.0)
    now = tl.load(p + places, mask=inside, other=0.0)
    if now.dtype == tl.bfloat16:  # by its bits: Triton's interpreter cuts them off
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        before = tl.where(value != value, value, bits.to(tl.float32, bitcast=True))
    else:
        before = value.to(now.dtype).to(tl.float32)
    now = now.to(tl.float32)
    # Compared first: the difference of two infinities is none.
    value += tl.where(now == before, 0.0, now - before)
    is_zeroed = (now == 0.0) & (before != 0.0)
    tl.store(x + places, tl.where(is_zeroed, 0.0, value), mask=inside)


def follow(x: Tensor, p: Tensor) -> None:
    """Adds to x by how much p has changed since p was x rounded.

    Args:
        x: contiguous, in fp32
        p: as long as x, contiguous, in bfloat16 or fp16
    """
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert p.is_contiguous()
    if not len(x):
        return
    grid: Any = (triton.cdiv(len(x), BLOCK),)
    with devices.selected(x.device):
        _follow[grid](x, p, len(x), BLOCK=BLOCK, num_warps=4)
