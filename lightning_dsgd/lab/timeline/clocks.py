"""One clock for all ranks: how far this rank's is from rank 0's.

Ranks that run under one kernel have the same monotonic clock.  The others ask rank 0 for the time,
some times; the quickest answer counts, which is wrong by half of its round trip at most.  Where
they cannot ask, the wall's clocks of their nodes must do.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_dsgd.agreement import everyones
from lightning_dsgd.devices import port_of
from lightning_dsgd.transport import Transport

_ASK: Final = 8
"""The number of times that a rank asks."""


def boot_id() -> str:
    """Returns an id that is the same where ranks run under one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def offset_to_rank_0(
    net: Transport, kernel: str | None = None, now: Callable[[], float] | None = None
) -> float:
    """Returns what turns this rank's clock into rank 0's if added; all ranks have to call it.

    Args:
        net: the network of all ranks
        kernel: the kernel under which this rank runs; by default the one that it finds
        now: the clock; by default the network's clock
    """
    net, now = net.sub("clocks"), now or net.now
    kernels = everyones(net, boot_id() if kernel is None else kernel)
    offset_s, question = 0.0, torch.zeros(1, dtype=torch.float64)
    for rank in (rank for rank, other in enumerate(kernels) if other != kernels[0]):
        best_s = float("inf")
        for _ in range(_ASK):
            if net.rank == 0:
                net.recv(question, rank).wait()
                net.send(torch.tensor([now()], dtype=torch.float64), rank)
            elif net.rank == rank:
                begin_s = now()
                net.send(question, 0)
                theirs = float(net.recv(question, 0).wait())
                end_s = now()
                if end_s - begin_s < best_s:
                    best_s, offset_s = end_s - begin_s, theirs - (begin_s + end_s) / 2
    return offset_s


def offset_by_meetings(is_one_kernel: bool, device: torch.device) -> float:
    """Returns what turns this rank's clock into rank 0's if added, by torch's process group.

    All ranks have to call it.  They leave a collective at about the same time.

    Args:
        is_one_kernel: whether this rank runs under rank 0's kernel; all ranks meet nevertheless
        device: where the process group sums
    """
    left_s = []
    for _ in range(_ASK):
        dist.all_reduce(torch.zeros(1, device=device))
        port_of(device).finish()
        left_s.append(time.monotonic())
    of_all: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, left_s)
    if is_one_kernel:
        return 0.0
    return statistics.median(a - b for a, b in zip(of_all[0], left_s, strict=True))


def both_clocks() -> dict[str, float]:
    """Returns what time it is by the wall's clock, and by this kernel's."""
    return {"unix_s": time.time(), "now_s": time.monotonic()}


def offset_by_the_hour(told: dict[str, Any]) -> float:
    """Returns what turns this rank's clock into another's, as well as their nodes' clocks agree."""
    now = both_clocks()
    return float(now["unix_s"] - now["now_s"] - told["unix_s"] + told["now_s"])
