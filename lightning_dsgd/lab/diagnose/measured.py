"""The link between ranks that a launcher has started, measured with a few sums.

Torch's own sums are timed, over NCCL where each rank has a GPU and over gloo elsewhere.  A sum of n
bytes over P ranks is a ring's, 2 (P - 1) messages one after the other of n / P bytes each, so a
short one tells the latency and a long one the rate.  They hold for a message of all ranks at once:
where ranks share a network card, each has its share of it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from lightning_dsgd.devices import backend_for, port_of
from lightning_dsgd.lab.accelerators import own_device
from lightning_dsgd.lab.link import Link

_TIMEOUT: Final = timedelta(seconds=60)
_TIMES, _WARM_UP = 9, 3
"""How often each sum is timed, after the first ones."""
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 256 << 20
_SUM_S: Final = 0.25
"""How long a long sum takes, about."""


def link() -> tuple[Link, int]:
    """Returns the link of each rank, and this rank's number; all ranks call it.

    Raises:
        ValueError: if there is one rank alone
    """
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world_size < 2:
        raise ValueError(
            "a link is measured between two ranks or more, got one from the launcher; try torchrun "
            "--nproc-per-node 2, or leave torchrun out"
        )
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = own_device(int(os.environ.get("LOCAL_RANK", "0")), num_here)
    port_of(device).enter()
    dist.init_process_group(backend_for(device), timeout=_TIMEOUT)
    try:
        return of_sums(sum_s, world_size, device), rank
    finally:
        dist.destroy_process_group()


def sum_s(num_elements: int, device: torch.device) -> float:
    """Returns what a sum takes, in the median; the slowest rank's time on all ranks."""
    x, times = torch.zeros(num_elements, device=device), []
    for _ in range(_WARM_UP + _TIMES):
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(x)
        port_of(device).finish()
        times.append(time.perf_counter() - begin_s)
    slowest = torch.tensor([statistics.median(times[_WARM_UP:])], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def of_sums(
    sum_s: Callable[[int, torch.device], float], num_ranks: int, device: torch.device
) -> Link:
    """Returns the link that sums show.

    Args:
        sum_s: what a sum of so many elements takes on a device, the same on all ranks
        num_ranks: how many ranks there are
        device: where the elements are
    """
    num_messages = 2 * (num_ranks - 1)
    short_s = sum_s(num_ranks, device)  # so each rank sends in each message
    first_s = sum_s(_FIRST_BYTES // 4, device)
    num_bytes = int(min(_MOST_BYTES, _FIRST_BYTES * max(1.0, _SUM_S / first_s))) // 4 * 4
    carried_s = max(1e-9, sum_s(num_bytes // 4, device) - short_s)
    return Link(8 * num_messages * num_bytes / num_ranks / carried_s, short_s / num_messages)
