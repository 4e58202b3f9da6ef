"""torchrun's own agent, whose ranks are forked from the process that calls it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_forked_by_torchrun(num_ranks: int, fn: Callable[..., Any], *args: Any) -> None:
    """Runs `fn(*args)` on every rank."""
    free = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}  # at a port that is free
    config = LaunchConfig(1, 1, num_ranks, run_id="tests", start_method="fork", **free)
    all_forked = multiprocessing.get_context("fork").Barrier(num_ranks)
    elastic_launch(config, _run_once_all_are_forked)(all_forked, fn, args)


def _run_once_all_are_forked(
    all_forked: Barrier, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """A thread of the agent looks up the name of each rank that connects to its store.

    A rank that is forked at that moment would wait for ever for the lock of the C library's
    resolver, which nobody holds in its process.
    """
    all_forked.wait(timeout=60)
    fn(*args)
