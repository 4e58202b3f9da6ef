"""What all tasks share: how a model descends, what a classifier logs, how splits are loaded."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dsgd.tasks.muon import MuonWithAdamW
from lightning_dsgd.tasks.partition import PopSGDSampler

Batch = tuple[Tensor, Tensor] | list[Tensor]
"""Inputs (n, ...) and their classes (n,)."""


class Task(LightningModule):
    """A model with its optimizer and learning-rate schedule.

    The learning rate rises linearly over `warmup`, and is then `lr` times what `decay` says.

    Args:
        optimizer: "sgd", "adam" or "adamw"; "muon" has Muon for the matrices in `layers`, and AdamW
            for the rest.
        lr: learning rate.
        momentum: the momentum of SGD.
        nesterov: whether the momentum is Nesterov's.
        betas: the betas of Adam.
        weight_decay: added to the gradient; with "adamw" apart from it.
        warmup: how long the learning rate rises, in `schedule_unit`.
        decay: "constant"; "milestones": times `decay_factor` at each; "cosine" or "linear": to 0 at
            the end of the training; "inverse_sqrt": with the square root of the steps since warm-up
            began.
        milestones: when to decay, in `schedule_unit`.
        decay_factor: the factor of each milestone.
        schedule_unit: "epoch" or "step".
    """

    def __init__(
        self,
        optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd",
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        warmup: float = 0.0,
        decay: Literal["constant", "milestones", "cosine", "linear", "inverse_sqrt"] = "constant",
        milestones: tuple[float, ...] = (),
        decay_factor: float = 0.1,
        schedule_unit: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        if (decay == "milestones") != bool(milestones):
            raise ValueError(
                "milestones and decay='milestones' must be given together, "
                f"got milestones={milestones} with decay={decay!r}"
            )
        if decay == "inverse_sqrt" and warmup <= 0:
            raise ValueError(f"decay='inverse_sqrt' needs a warmup above 0, got warmup={warmup}")
        self.optimizer = optimizer
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.decay = decay
        self.milestones = sorted(milestones)
        self.decay_factor = decay_factor
        self.schedule_unit = schedule_unit

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters(),
                lr=self.lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
            )
        elif self.optimizer == "muon":
            optimizer = self._muon()
        else:
            cls = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
            optimizer = cls(
                self.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
            )
        if self.decay == "constant" and self.warmup == 0:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor_of_step())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        # What metrics hold after `Trainer.validate` cannot be added to in a fit: it was made in
        # inference mode.
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()

    def _muon(self) -> MuonWithAdamW:
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            kinds["layers." in name and parameter.dim() == 2].append(parameter)
        if not kinds[True]:
            raise ValueError(
                "optimizer='muon' needs matrices in a module named 'layers', as Transformers have "
                f"them, and {type(self).__name__} has none; take 'adamw'"
            )
        return MuonWithAdamW(kinds[True], kinds[False], self.lr, self.betas, self.weight_decay)

    def _factor_of_step(self) -> Callable[[int], float]:
        """Returns what the learning rate is multiplied by at an optimizer step."""
        num_steps = self.trainer.estimated_stepping_batches
        if self.decay in ("cosine", "linear") and math.isinf(num_steps):
            raise ValueError(
                f"decay={self.decay!r} must know when the training ends; "
                "give the Trainer max_epochs or max_steps"
            )
        unit = 1
        if self.schedule_unit == "epoch":
            unit = math.ceil(
                self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
            )
        warmup = self.warmup * unit
        milestones = [milestone * unit for milestone in self.milestones]

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            if self.decay == "milestones":
                return self.decay_factor ** bisect.bisect_right(milestones, step)
            if self.decay == "inverse_sqrt":
                return math.sqrt(warmup / max(step, 1))
            if self.decay == "constant":
                return 1.0
            done = min(1.0, (step - warmup) / max(1.0, num_steps - warmup))
            return 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2

        return factor


class Classifier(Task):
    """Trains any network on cross-entropy, and measures its accuracy.

    Args:
        net: the network, from inputs to one logit a class.
        num_classes: how many classes there are.
        label_smoothing: label smoothing of the loss in training.
        **kwargs: options of `Task`.
    """

    def __init__(
        self, net: nn.Module, num_classes: int, label_smoothing: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.net = net
        self.label_smoothing = label_smoothing
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(
            self(inputs), classes, label_smoothing=self.label_smoothing
        )
        # This rank's own: to agree on it in every step would hold all ranks up.
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, _ = batch
        return self(inputs).argmax(dim=1)  # type: ignore[no-any-return]

    def _evaluate(self, split: str, batch: Batch, accuracy: MulticlassAccuracy) -> None:
        inputs, classes = batch
        logits = self(inputs)
        loss = nn.functional.cross_entropy(logits, classes)
        accuracy.update(logits, classes)
        self.log(f"{split}_loss", loss, on_epoch=True, sync_dist=True)
        # A torchmetrics object counts over all ranks by itself, at the end of the epoch.
        self.log(f"{split}_accuracy", accuracy, on_epoch=True, prog_bar=True)


class SplitData(LightningDataModule):
    """Loads what `setup` put into `splits`: "train", "val" and "test".

    Args:
        batch_size: samples a rank and step.
        num_workers: loader processes a rank; with 0 the training process loads, which is the
            fastest for a data set that is in memory.
        mult: deals the data out as in the PopSGD paper, each part to two ranks, which pass over it
            this often in an epoch (`lightning_dsgd.tasks.partition`); None deals out as usual.
    """

    def __init__(self, batch_size: int = 16, num_workers: int = 0, mult: int | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.mult = mult
        self.splits: dict[str, Dataset[Any]] = {}
        self.collate: Callable[[list[Any]], Any] = default_collate

    def train_dataloader(self) -> DataLoader[Any]:
        if self.mult is None:
            return self._loader("train", shuffle=True)
        rank, world_size = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        sampler = PopSGDSampler(self.splits["train"], world_size, rank, self.mult)
        return self._loader("train", sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def _loader(self, split: str, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(
            self.splits[split],
            **{
                "batch_size": self.batch_size,
                "num_workers": self.num_workers,
                "persistent_workers": self.num_workers > 0,
                "collate_fn": self.collate,
                **kwargs,
            },
        )
