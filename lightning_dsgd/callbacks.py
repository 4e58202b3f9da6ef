"""Callbacks: what the communication costs, and stragglers on demand."""

from __future__ import annotations

import random
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger


class CommunicationMonitor(pl.Callback):
    """Logs what a decentralised strategy sends and waits for, as `dsgd/...`, through all loggers.

    Every `log_every_n_steps` of the Trainer, from rank 0:

    | name | what |
    |---|---|
    | `dsgd/bytes_sent`, `dsgd/messages_sent` | since the last entry, by this rank |
    | `dsgd/wait_s` | how long the training thread was held up since the last entry |
    | `dsgd/comm_overlap` | share of the communication so far that was hidden behind computation |
    | `dsgd/consensus_distance` | of the last evaluation: distance from the mean over its norm |
    | `dsgd/staleness`, `dsgd/density`, `dsgd/push_weight` | where the algorithm has such a figure |
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "communication"):
            raise ValueError(
                "CommunicationMonitor needs a strategy of lightning_dsgd, got "
                f'{type(trainer.strategy).__name__}; use for example strategy="local_sgd"'
            )
        self._last = {}
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.define_metric("dsgd/*", step_metric="trainer/global_step")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.strategy.communication()  # what setting up has cost is not a step's

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        # Before the log is written: the very steps at which Lightning's loggers take their values.
        if (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % trainer.log_every_n_steps:
            return
        figures = trainer.strategy.communication()
        for name in ("bytes_sent", "messages_sent", "wait_s"):
            figures[name], self._last[name] = (
                figures[name] - self._last.get(name, 0.0),
                figures[name],
            )
        for name, value in figures.items():
            pl_module.log(f"dsgd/{name}", value, on_step=True, on_epoch=False, sync_dist=False)


class StragglerInjector(pl.Callback):
    """Delays some random ranks in every step, as the papers do in their experiments.

    Args:
        delay_s: how long a delayed rank sleeps
        num_ranks: how many ranks are delayed in each step
        seed: of the draw, the same on all ranks
    """

    def __init__(self, delay_s: float, num_ranks: int = 1, seed: int = 0) -> None:
        if not delay_s >= 0:
            raise ValueError(
                f"delay_s must not be negative, got delay_s={delay_s}; try delay_s=0.3"
            )
        if num_ranks < 0:
            raise ValueError(f"num_ranks must not be negative, got num_ranks={num_ranks}; try 1")
        self.delay_s = delay_s
        self.num_ranks = num_ranks
        self.seed = seed
        self._step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.num_ranks > trainer.world_size:
            raise ValueError(
                "num_ranks must be at most the number of ranks, got "
                f"num_ranks={self.num_ranks} with {trainer.world_size} ranks; "
                f"try num_ranks={trainer.world_size}"
            )
        self._step = 0

    def delayed_ranks(self, step: int, world_size: int) -> list[int]:
        """Who is delayed in this step: a pure function of seed, step and world_size."""
        return random.Random(f"{self.seed}/{step}").sample(range(world_size), self.num_ranks)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank in self.delayed_ranks(self._step, trainer.world_size):
            time.sleep(self.delay_s)
        self._step += 1
