"""Where a part measures: the device, the sizes, and how long something takes there."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.devices import port_of
from tests.support import worlds

LONGEST_S = 20.0
"""How long the device may take for what is measured."""
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A device, and whether only to see that all runs.

    Args:
        kind: the type of the device
        small: whether sizes are tiny
        log: takes what processes print that a part starts itself
    """

    kind: str
    small: bool
    log: Path | None = None

    def size(self, real: T, small: T) -> T:
        """Returns the size to measure with."""
        return small if self.small else real

    def device(self) -> torch.device:
        """Returns the device, and has this thread work on it; uses CUDA from here on."""
        port = port_of(torch.device(self.kind))
        port.enter()
        return port.device

    def world(self) -> worlds.ProcessWorld:
        """Returns ranks that share the device, each with NCCL; on CPUs gloo is in its place."""
        if self.kind == "cuda":
            return worlds.NCCLWorld(timeout_s=LONGEST_S)
        return worlds.NativeWorld(timeout_s=LONGEST_S)

    def faces(self) -> worlds.ProcessWorld:
        """Returns the same, for functions that open their own network by a face."""
        if self.kind == "cuda":
            return _FacesOnAGPU(timeout_s=LONGEST_S)
        return _Faces(timeout_s=LONGEST_S)

    def smaller(self) -> Place:
        """Returns the same place with tiny sizes."""
        return replace(self, small=True)


class _Faces(worlds.ProcessWorld):
    """Processes with a process group: `fn(*args)`."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        os.environ["LOCAL_WORLD_SIZE"] = str(torch.distributed.get_world_size())
        return fn(*args)


class _FacesOnAGPU(_Faces, worlds.NCCLWorld):
    """The same, each with NCCL, as if each had a GPU of its own."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        from lightning_dsgd import devices

        rank = torch.distributed.get_rank()
        devices.identity_of = lambda device: f"the GPU of rank {rank}"  # else a face refuses
        return super()._call(fn, args)


# ---- time ----


def finish(device: torch.device) -> None:
    """Waits, at most so long, until the device has done all that is queued; looks all the time."""
    mark, end = port_of(device).mark(), time.monotonic() + LONGEST_S
    while not mark.has_passed():
        if time.monotonic() > end:
            raise TimeoutError(f"the device must end what is queued within {LONGEST_S:.0f} s")


def seconds(
    work: Callable[[], object], device: torch.device, repeats: int = 5, least_s: float = 0.01
) -> float:
    """Returns the median time of something, until the device has done it.

    Args:
        work: what to time; once before
        device: where it runs
        repeats: of how many samples the median is taken
        least_s: of a sample: what is shorter runs several times
    """

    def sample(count: int) -> float:
        finish(device)
        begin = time.perf_counter()
        for _ in range(count):
            work()
        finish(device)
        return (time.perf_counter() - begin) / count

    sample(1)
    count = max(1, min(1000, math.ceil(least_s / max(1e-9, sample(1)))))
    return statistics.median(sample(count) for _ in range(repeats))


class Busy:
    """Keeps a device busy by products of matrices, which fill all of its multiprocessors.

    Args:
        device: where
        side: of the matrices
    """

    def __init__(self, device: torch.device, side: int) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._a: Tensor = torch.randn(side, side, device=device).to(dtype)
        self._y: Tensor = torch.empty_like(self._a)

    def __call__(self, count: int) -> None:
        """Queues so many products."""
        for _ in range(count):
            torch.mm(self._a, self._a, out=self._y)
