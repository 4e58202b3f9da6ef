"""One clock for all ranks: how far this rank's is from rank 0's.

Ranks that run under one kernel have the same monotonic clock.  The others ask rank 0 for the time,
some times; the quickest answer counts, which is wrong by half of its round trip at most.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from lightning_dsgd.agreement import everyones
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
