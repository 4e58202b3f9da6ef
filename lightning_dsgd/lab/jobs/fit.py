"""A fit that is measured: a bare Trainer, a model whose step takes a given time, and a clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.devices import port_of
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.catalogue import strategy_called
from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.trainer.strategy import DecentralizedStrategy


def strategy(spec: str, others: Mapping[str, Any] | None = None) -> Any:
    """Returns what `Trainer(strategy=...)` takes.

    Args:
        spec: a name, with hyperparameters
        others: strategies beside this package's, by name
    """
    name, options = parse(spec)
    others = others or {}
    if name in others:
        return others[name](**options)
    strategy_called(name, {**others, **ALL_ALGORITHMS})
    return strategy_of(name, **options)


def communication(trainer: L.Trainer) -> dict[str, float]:
    """Returns what a strategy of ours has sent and waited for; other strategies do not count."""
    strategy = trainer.strategy
    return strategy.communication() if isinstance(strategy, DecentralizedStrategy) else {}


def trainer(
    strategy: Any,
    ranks: int,
    *,
    device: str = "cpu",
    shares_device: bool = False,
    **options: Any,
) -> L.Trainer:
    """Makes a Trainer that does nothing but train with a strategy, unless options say otherwise."""
    if shares_device:
        strategy.parallel_devices = [torch.device(device, 0)] * ranks
    bare = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    chosen = {**bare, "devices": "auto" if shares_device else ranks, **options}
    return L.Trainer(strategy=strategy, accelerator=device, **chosen)


class Sleeper(L.LightningModule):
    """Has so many parameters, and a step that takes so long and computes next to nothing.

    Gradients are noise, with other large entries in each step and on each rank.
    """

    def __init__(self, params: int, compute_s: float) -> None:
        super().__init__()
        side = int(params**0.5)  # a matrix, as PowerSGD compresses only those
        self.weight = nn.Parameter(torch.zeros(side, side))
        self.source, self.noise = torch.Generator(), torch.randn(2 * side * side)
        self.compute_s = compute_s

    def on_fit_start(self) -> None:
        self.source.manual_seed(self.global_rank)
        self.noise = self.noise.to(self.device)

    def loss(self) -> Tensor:
        """Returns a loss whose gradient is a piece of the noise."""
        n = self.weight.numel()
        begin = int(torch.randint(n, (1,), generator=self.source))
        return (self.weight * self.noise[begin : begin + n].view_as(self.weight)).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.compute_s)
        return self.loss()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(L.Callback):
    """Notes when the first of so many steps began and the last ended, and what was communicated."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.begin = self.end = 0.0
        self.core_begin_s = self.core_s = 0.0  # of the processor, all threads
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        dist.barrier()
        self.before = communication(trainer)
        self.begin, self.core_begin_s = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            port_of(trainer.strategy.root_device).finish()
        self.end, self.core_s = time.perf_counter(), time.process_time() - self.core_begin_s
        if trainer.global_step == self.steps:
            self.after = communication(trainer)

    def communication_per_step(self) -> dict[str, float]:
        """Returns a step's waits and bytes, and the strategy's other figures; may be empty."""
        if not self.after:
            return {}
        waited_s, sent = (self.after[k] - self.before[k] for k in ("wait_s", "bytes_sent"))
        return {
            "wait_s_per_step": waited_s / self.steps,
            "mb_sent_per_step": sent / self.steps / 1e6,
            **{k: v for k, v in self.after.items() if k not in self.before},
        }
