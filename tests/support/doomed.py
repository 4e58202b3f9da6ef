"""A module that does something to its own process at a given point of the training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, trainer


def write_whole(file: Path, text: str) -> None:
    """So that whoever reads it meanwhile sees all of it or what was there before."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(file)


def await_leave(session: Any) -> None:
    """On a rank that is to leave: until it is agreed when, for training might be over before."""
    while (t := session.training) is not None and t.agreed.leaves and t.agreed._unanswered:
        time.sleep(0.001)  # between two looks


@dataclass
class Plan:
    """What a rank does to itself, and where.

    Args:
        rank: who; -1: every rank
        how: "raise", "sleep" (for ever), "wait" (for `late_s` only), or the name of a signal
        where: the hook of the module
        at: at which call of that hook
        late_s: for how long the others wait for that rank before
        second: whether it waits until another plan has been carried out
    """

    rank: int
    how: str
    where: str = "training_step"
    at: int = 20
    late_s: float = 0.0
    second: bool = False
    num_calls: int = field(default=0, init=False)

    def act(self, hook: str, rank: int, folder: Path) -> None:
        if hook != self.where or self.rank not in (rank, -1):
            return
        self.num_calls += 1
        if self.num_calls != self.at:
            return
        time.sleep(self.late_s)
        event = Path(folder, "event")
        while self.second and not event.exists():
            time.sleep(0.001)  # between two looks
        write_whole(event, str(time.monotonic()))
        if self.how == "SIGSTOP":
            write_whole(Path(folder, f"stopped_{rank}"), str(os.getpid()))
        if self.how == "raise":
            raise ValueError(f"no such luck in {hook}")
        if self.how == "wait":
            return
        if self.how == "sleep":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, self.how))


class Doomed(Regression):
    """Follows its plans, and notes at each batch how many this rank has begun."""

    def __init__(self, folder: str | Path, plans: tuple[Plan, ...]) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__()
        self.folder, self.plans, self.num_batches = Path(folder), plans, 0

    def act(self, hook: str) -> None:
        for plan in self.plans:
            plan.act(hook, self.global_rank, self.folder)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_batches += 1
        write_whole(Path(self.folder, f"batches_{self.global_rank}"), str(self.num_batches))
        self.act("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.act("validation_step")
        super().validation_step(batch, batch_idx)


def _hook(name: str) -> Callable[..., None]:
    def act(self: Doomed, *args: Any, **kwargs: Any) -> None:
        self.act(name)
        getattr(super(Doomed, self), name)(*args, **kwargs)

    return act


for _name in (
    "setup", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_epoch_end", "on_train_end", "on_fit_end",
    "on_save_checkpoint", "on_before_optimizer_step",
):  # fmt: skip
    setattr(Doomed, _name, _hook(_name))


def num_batches(folder: Path) -> list[int]:
    """How many batches each rank has begun."""
    return [int(file.read_text()) for file in sorted(folder.glob("batches_*"))]


def fit(
    name: str,
    folder: str,
    plans: tuple[Plan, ...],
    *,
    devices: int = 3,
    epochs: int = 1000,
    saves: bool = False,
    num_samples: tuple[int, ...] = (384,),
    num_workers: int = 0,
    options: dict[str, Any] | None = None,
) -> L.Trainer:
    """Trains as planned; validates only if something is to happen there.

    Args:
        name: of the strategy
        folder: where batches are noted, and checkpoints saved
        plans: what is to happen
        devices: how many ranks
        epochs: how many
        saves: whether a checkpoint is saved when training fails
        num_samples: one number for all ranks together, or one for each rank's own
        num_workers: of each rank's loader, forked from the rank
        options: of the strategy
    """
    torch.set_num_threads(1)
    period = {"sync_period": 4} if name == "local_sgd" else {}
    validates = any("validation" in plan.where for plan in plans)
    train = trainer(
        strategy_of(name, **{"timeout_s": 150.0, **period, **(options or {})}),
        devices,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, "saved", save_on_exception=True)] if saves else None,
        enable_checkpointing=saves,
        limit_val_batches=None if validates else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=len(num_samples) == 1,
    )
    model = Doomed(folder, plans)
    mine = num_samples[train.global_rank % len(num_samples)]
    context = "fork" if num_workers else None
    own = loader(mine, num_workers=num_workers, multiprocessing_context=context)
    train.fit(model, own, loader(48))
    model.act("after_fit")
    return train
