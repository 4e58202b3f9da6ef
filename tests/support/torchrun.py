"""torchrun's own agent, whose ranks are forked from the process that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_forked_by_torchrun(num_ranks: int, fn: Callable[..., Any], *args: Any) -> None:
    """Runs `fn(*args)` on every rank."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a port that is free
        start_method="fork",
    )
    elastic_launch(config, fn)(*args)
