"""torchmetrics in `training_step`, where ranks compute different numbers of micro-batches.

Two things differ from DDP, whose ranks make as many steps as each other:

- a metric that asks all ranks there would wait for a rank that computes nothing: it is refused;
- a micro-batch may be computed in vain, as another rank's result counts: its update is undone.

Private names of torchmetrics stand here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchmetrics import Metric

_COUNTS: Final = ("_update_count", "_computed", "_forward_cache")


class StepMetrics:
    """The metrics of a module, around each micro-batch.

    Args:
        module: whose submodules they are
        num_ranks: how many ranks there are
    """

    def __init__(self, module: nn.Module, num_ranks: int) -> None:
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._num_ranks = num_ranks
        self._before: list[tuple[Metric, dict[str, tuple[Any, Any]], dict[str, Any]]] = []

    @contextlib.contextmanager
    def asking_nobody(self) -> Iterator[None]:
        """Raises where a metric asks all ranks inside."""
        if self._num_ranks == 1 or not self._metrics:
            yield
            return
        own = [metric.distributed_available_fn for metric in self._metrics]
        for metric in self._metrics:
            metric.distributed_available_fn = partial(_ask_nobody, metric)
        try:
            yield
        finally:
            for metric, is_available in zip(self._metrics, own, strict=True):
                metric.distributed_available_fn = is_available

    def remember(self) -> None:
        """Remembers what the metrics hold now."""
        self._before = [
            (
                metric,
                {name: (value, _content(value)) for name, value in metric.metric_state.items()},
                {name: getattr(metric, name) for name in _COUNTS},
            )
            for metric in self._metrics
        ]

    @torch.no_grad()
    def undo(self) -> None:
        """Takes back all updates since then; metrics that share a state share it afterwards."""
        for metric, state, counts in self._before:
            for name, (value, content) in state.items():
                if isinstance(value, Tensor):
                    value.copy_(content)
                else:
                    value[:] = content
                setattr(metric, name, value)
            for name, count in counts.items():
                setattr(metric, name, count)


def _content(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


def _ask_nobody(metric: Metric) -> bool:
    """Says that there are no other ranks; raises where the metric is about to ask them."""
    if metric._to_sync:
        raise ValueError(
            "ranks compute different numbers of micro-batches, so a metric must not ask all ranks "
            f'in training_step, got {type(metric).__name__} with strategy="balanced", by '
            "dist_sync_on_step=True or by compute(); leave dist_sync_on_step out, log the metric "
            'itself or call compute() in on_train_epoch_end, or use strategy="allreduce" or "ddp"'
        )
    return False
