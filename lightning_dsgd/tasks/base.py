"""What all tasks share: how a model descends, what a classifier logs, how splits are loaded."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor] | list[Tensor]
"""Inputs (n, ...) and their classes (n,)."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices, and AdamW for the rest, at the same learning rate.

    Lightning steps one optimizer by itself, and `torch.optim.Muon` takes matrices only.  Its update
    has the size of AdamW's here (`adjust_lr_fn="match_rms_adamw"`), so a rate suits both.

    Args:
        matrices: weights of two dimensions, of hidden layers.
        rest: all other parameters: embeddings, heads, biases, norms.
        lr: learning rate.
        betas: the betas of AdamW.
        weight_decay: of both.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.1,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"Muon needs torch 2.9 or newer, got torch {torch.__version__}")
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay),
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        super().__init__([part.param_groups[0] for part in self.parts], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            # A checkpoint replaces both.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


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
            this often in an epoch (`PopSGDSampler`); None deals out as usual.
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


class PopSGDSampler(DistributedSampler[int]):
    """Deals out the data as PopSGD's paper does: every part to two ranks, several passes an epoch.

    Nadiradze et al., https://arxiv.org/abs/1910.12308, section 6: "At the beginning of each epoch,
    we shuffle the dataset and split it into partitions, ensuring that each partition will be
    assigned to exactly two processes.  We define a fixed constant mult, which counts the number of
    times each process will iterate through its partition in an epoch."  So every sample is seen
    2 mult times an epoch; the paper divides the number of epochs by mult.

    Lightning leaves a DistributedSampler in its place, and tells the sampler of every new epoch.

    With an odd number of ranks there are as many parts as ranks, half as large, and rank r holds
    the parts r and r + 1: so every sample is still held by two ranks.  What is left over when the
    parts are made equally large sits out one epoch.

    Args:
        dataset: the data set that is dealt out.
        world_size: number of ranks.
        rank: the rank whose indices are drawn.
        mult: passes over its part that a rank makes in an epoch.
        seed: the seed of the shuffling, the same on all ranks.
    """

    def __init__(
        self, dataset: Dataset[Any], world_size: int, rank: int, mult: int = 1, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, seed=seed)
        if mult < 1:
            raise ValueError(f"mult must be at least 1, got mult={mult}")
        size = len(dataset)  # type: ignore[arg-type]
        if size < world_size:
            raise ValueError(
                f"there must be a sample for each rank, got {size} samples with "
                f"world_size={world_size}"
            )
        self.mult = mult
        self.size = size
        half = size // world_size
        self.part_size = size if world_size == 1 else 2 * half
        self.begin = (rank if world_size % 2 else rank - rank % 2) * half

    def __len__(self) -> int:
        return self.mult * self.part_size

    def __iter__(self) -> Iterator[int]:
        def permutation(size: int, *seeds: int) -> torch.Tensor:
            seed = hash((self.seed, self.epoch, *seeds)) % 2**63
            return torch.randperm(size, generator=torch.Generator().manual_seed(seed))

        shuffled = permutation(self.size)
        places = torch.arange(self.begin, self.begin + self.part_size)
        if self.num_replicas > 1:
            places %= self.num_replicas * (self.part_size // 2)
        part = shuffled[places]
        for k in range(self.mult):
            yield from part[permutation(self.part_size, self.rank, k)].tolist()
