"""The same loop on each face: `Trainer.fit`, plain PyTorch, and Fabric."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_dsgd import DecentralizedStrategy, FabricStrategy, decentralized
from tests.support.fits import accelerator_of
from tests.support.models import trainer


@dataclass
class Loop:
    """What is trained, and how.

    Args:
        model: with a `loss(batch)`
        algorithm: to train it with
        batches: of this rank, the same in every epoch
        epochs: how many there are in all
        accumulate: of how many batches a step is made
        clip: to which norm
        scaler: of the loss, in half precision
        saves: where a checkpoint is saved after the first epoch
        resumes: from which checkpoint of a first epoch it goes on
        options: of the strategy
    """

    model: L.LightningModule
    algorithm: Any
    batches: list[Any]
    epochs: int = 1
    accumulate: int = 1
    clip: float | None = None
    scaler: Any = None
    saves: str = ""
    resumes: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    """What was saved beside the model and is loaded again: the rank that has saved it."""
    timeout_s = 60.0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, None)  # type: ignore[arg-type]

    def remaining(self) -> range:
        """The epochs that this run makes."""
        return range(int(bool(self.resumes)), self.epochs)

    def is_step(self, number: int) -> bool:
        return number % self.accumulate == 0


def by_trainer(loop: Loop) -> None:
    def save(own: L.Trainer, *args: Any) -> None:
        if loop.saves and own.current_epoch == 0:
            own.save_checkpoint(loop.saves)

    precision = [MixedPrecision("16-mixed", "cpu", loop.scaler)] if loop.scaler else None
    fit = trainer(
        DecentralizedStrategy(loop.algorithm, timeout_s=loop.timeout_s, **loop.options),
        int(os.environ["WORLD_SIZE"]),
        accelerator=accelerator_of(loop.device),
        max_epochs=loop.epochs,
        accumulate_grad_batches=loop.accumulate,
        gradient_clip_val=loop.clip,
        plugins=precision,
        callbacks=[LambdaCallback(on_train_epoch_end=save)],
        use_distributed_sampler=False,
    )
    fit.fit(loop.model, loop.loader(), ckpt_path=loop.resumes or None)


def by_loop(loop: Loop) -> None:
    model, scaler, batches = loop.model, loop.scaler, loop.loader()
    optimizer: Any = model.configure_optimizers()
    options = {"scaler": scaler, "timeout_s": loop.timeout_s, **loop.options}
    with decentralized(model, optimizer, loop.algorithm, **options) as replica:
        if loop.resumes:
            loop.extra = replica.load(loop.resumes).get("rank")
        for epoch in loop.remaining():
            for number, batch in enumerate(replica.batches(batches), 1):
                with torch.autocast("cpu", torch.half, enabled=scaler is not None):
                    loss = model.loss(batch)
                loss = loss / loop.accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
                if not loop.is_step(number):
                    continue
                if loop.clip is not None:
                    replica.reduce_gradients(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            if loop.saves and epoch == 0:
                replica.save(loop.saves, rank=replica.rank)
            replica.barrier()


def by_fabric(loop: Loop) -> None:
    strategy = FabricStrategy(loop.algorithm, timeout_s=loop.timeout_s, **loop.options)
    fabric = L.Fabric(
        accelerator=accelerator_of(loop.device),
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[FabricPrecision("16-mixed", "cpu", loop.scaler)] if loop.scaler else None,
    )
    fabric.launch()
    net, optimizer = fabric.setup(loop.model, loop.model.configure_optimizers())
    net.mark_forward_method("loss")
    state = {"model": net, "optimizer": optimizer, "rank": fabric.global_rank}
    batches = loop.loader()
    with strategy:
        if loop.resumes:
            assert fabric.load(loop.resumes, state) == {}
            loop.extra = state["rank"]
        for epoch in loop.remaining():
            for number, batch in enumerate(strategy.batches(batches), 1):
                fabric.backward(net.loss(batch) / loop.accumulate)
                if not loop.is_step(number):
                    continue
                if loop.clip is not None:
                    overflows = {"error_if_nonfinite": loop.scaler is None}
                    fabric.clip_gradients(net, optimizer, max_norm=loop.clip, **overflows)
                optimizer.step()
                optimizer.zero_grad()
            if loop.saves and epoch == 0:
                fabric.save(loop.saves, state)
            fabric.barrier()


FACES: dict[str, Callable[[Loop], None]] = {
    "Trainer": by_trainer,
    "plain": by_loop,
    "Fabric": by_fabric,
}
