"""Compares the kernel of `wide_triton` with plain torch, on the device that is named.

On a CPU with TRITON_INTERPRET=1, where Triton executes it block by block in Python.
"""

from __future__ import annotations

import itertools
import sys

import torch

from lightning_dsgd.replica import wide, wide_triton

BLOCK = wide_triton.BLOCK
EDGES = [0.0, -0.0, 1.0, -3.0, torch.nan, torch.inf, -torch.inf, 1e-30, 3e-8, 1e-41, 70000.0]

device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    edges = torch.tensor([*itertools.product(EDGES, EDGES)])
    pairs = [(edges[:, 0], edges[:, 1])]
    for n in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5):
        x = torch.randn(n, generator=generator)
        moved = x + 0.01 * torch.randn(n, generator=generator)
        pairs += [(x, x), (x, moved), (x, moved * (moved > 0)), (x, 300 * moved)]
    for x, p in pairs:
        x, p = x.to(device, copy=True).contiguous(), p.to(device, dtype).contiguous()
        expected = x.clone()
        wide.follow_plainly(expected, p)
        wide_triton.follow(x, p)
        assert torch.equal(x.isnan(), expected.isnan())
        assert torch.equal(x.nan_to_num(1234.5), expected.nan_to_num(1234.5))
print("equal")
