"""What the promises are told apart with: time that passes, tensors, and equality with values."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import Transport
from tests.support.worlds import Outcome

EMPTY = torch.empty(0)
PATIENCE_S = 20.0
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def pause(net: Any, seconds: float) -> None:
    """Lets time pass, real or virtual."""
    if hasattr(net, "compute"):
        net.compute(seconds)
    else:
        time.sleep(seconds)


def others(net: Transport) -> list[int]:
    return [rank for rank in range(net.world_size) if rank != net.rank]


def same(what: object, expected: object) -> None:
    """Asserts with values also where pytest does not rewrite assertions, in other processes."""
    if isinstance(what, Tensor) and isinstance(expected, Tensor):
        equal = what.dtype == expected.dtype and torch.equal(what, expected)
    else:
        equal = what == expected
    assert equal, f"expected {expected}, got {what}"


def noise(n: int, dtype: torch.dtype = torch.float32, *, seed: int) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype) if dtype.is_floating_point else (x * 50 + 128).to(dtype)


class Simulated:
    """A simulated world with the face of a `ProcessWorld`; messages left over are errors."""

    def outcomes(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
        outcomes = SimulatedWorld(world_size, 1e-4, 1e9).outcomes(fn, *args)
        return [
            Outcome(error=f"{type(outcome).__name__}: {outcome}")
            if isinstance(outcome, BaseException)
            else Outcome(outcome)
            for outcome in outcomes
        ]

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return SimulatedWorld(world_size, 1e-4, 1e9).run(fn, *args)
