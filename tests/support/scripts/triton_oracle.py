"""Compares the kernels of `sparse_triton` with plain torch, on the device that is named.

On a CPU with TRITON_INTERPRET=1, where Triton executes them block by block in Python.
"""

from __future__ import annotations

import itertools
import sys

import torch

from lightning_dsgd.primitives import sparse, sparse_triton

BLOCK = sparse_triton.BLOCK


def compare(
    x: torch.Tensor, g: torch.Tensor | None, threshold: float, most: int | None = None
) -> None:
    least = torch.tensor(threshold, dtype=x.dtype, device=x.device)
    least = least.clamp(min=torch.finfo(x.dtype).smallest_normal)
    other_x, other_g = x.clone(), None if g is None else g.clone()
    values, indices = sparse.select_plainly(other_x, least, other_g, most)
    taken = indices < len(x)  # behind these the values do not matter
    found, places = sparse_triton.select(x, least, g, most)
    for mine, plain in ((found[taken], values[taken]), (places, indices)):
        assert mine.dtype == plain.dtype
        assert torch.equal(mine.nan_to_num(1234.5), plain.nan_to_num(1234.5))
    assert torch.equal(x.nan_to_num(1234.5), other_x.nan_to_num(1234.5))
    assert g is None or (torch.equal(g, other_g) and not g.any())


device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
lengths = [0, 1, 31, 33, BLOCK - 1, BLOCK, 3 * BLOCK + 5]
dtypes = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64,) * 2]
for n, (dtype, g_dtype), threshold in itertools.product(lengths, dtypes, [0.0, 0.5, 2.5, 1e9]):
    x = torch.randn(n, generator=generator, dtype=dtype).to(device)
    g = torch.randn(n, generator=generator, dtype=dtype).to(device, g_dtype)
    compare(x.clone(), None, threshold)
    compare(x[::3], None, threshold)
    compare(x.clone(), None, threshold, most=n // 5)
    compare(x, g, threshold)
for dtype in (torch.float32, torch.float64):
    tiny = torch.finfo(dtype).smallest_normal / 2
    x = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, -torch.inf, tiny, -3.0], dtype=dtype)
    for threshold in (0.0, 2.0, torch.inf):
        compare(x.repeat(40).to(device), None, threshold)
print("equal")
