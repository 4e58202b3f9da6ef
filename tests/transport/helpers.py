"""How ranks end, and what is waited for, in the tests of real ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

BIG = 1 << 21
"""Elements of a message of 8 MB, more than a connection takes at once."""


def died(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return condition()


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dsgd")]


def send_and_check(net: Any, sizes: list[int]) -> None:
    """Messages of these sizes from all ranks to all, with two tags, received in another order."""
    for tag in (0, 1):
        for n in sizes:
            for dst in range(net.world_size):
                net.send(torch.full((n,), float(n + tag)), dst, tag)
    for src in range(net.world_size):
        for tag in (1, 0):
            for n in sizes:
                x = net.recv(torch.empty(0), src, tag).wait()
                assert torch.equal(x, torch.full((n,), float(n + tag))), (src, tag, n)
