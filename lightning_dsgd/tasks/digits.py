"""Handwritten digits: 1,797 grey images of 8 x 8 pixels that come with scikit-learn.

Small enough for a CPU, no download, and real: what a network has not seen it can get wrong.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES = 10
Batch = tuple[Tensor, Tensor] | list[Tensor]
"""Images (n, 1, 8, 8) with values in [0, 1], and their digits (n,)."""


class DigitsData(LightningDataModule):
    """The digits, split the same way on every rank and in every run.

    Args:
        batch_size: images a rank and step.
        num_workers: loader processes a rank; with 0 the training process loads, which is the
            fastest for a data set that is in memory.
        split: images to train on, to validate on, to test on.
    """

    def __init__(
        self,
        batch_size: int = 16,
        num_workers: int = 0,
        split: tuple[int, int, int] = (1437, 180, 180),
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.split = split
        self.splits: dict[str, Dataset[tuple[Tensor, ...]]] = {}

    def setup(self, stage: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as err:
            raise ImportError(
                "DigitsData needs scikit-learn, which is not installed; "
                "try: pip install 'lightning-dsgd[demo]'"
            ) from err
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        dataset = TensorDataset(images, torch.tensor(digits, dtype=torch.int64))
        parts = random_split(dataset, self.split, generator=torch.Generator().manual_seed(0))
        self.splits = dict(zip(("train", "val", "test"), parts, strict=True))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            shuffle=shuffle,
        )


class DigitsClassifier(LightningModule):
    """A convolutional network for the digits, trained by SGD with momentum.

    Args:
        lr: learning rate.
        momentum: of SGD.
        channels: of the first convolution; the second has twice as many.
        batch_norm: whether to normalise after each convolution.
    """

    def __init__(
        self,
        lr: float = 0.02,
        momentum: float = 0.9,
        channels: int = 16,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.momentum = momentum
        self.net = nn.Sequential(
            _convolution(1, channels, batch_norm),
            _convolution(channels, 2 * channels, batch_norm),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        # This rank's own: to agree on it in every step would hold all ranks up.
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, _ = batch
        return self(images).argmax(dim=1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def _evaluate(self, split: str, batch: Batch, accuracy: MulticlassAccuracy) -> None:
        images, digits = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, digits)
        accuracy.update(logits, digits)
        self.log(f"{split}_loss", loss, on_epoch=True, sync_dist=True)
        # A torchmetrics object counts over all ranks by itself, at the end of the epoch.
        self.log(f"{split}_accuracy", accuracy, on_epoch=True, prog_bar=True)


def _convolution(channels_in: int, channels_out: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, 3, padding=1)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(channels_out))
    return nn.Sequential(*layers, nn.ReLU())
