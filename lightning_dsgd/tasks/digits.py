"""Handwritten digits: 1,797 grey images of 8 x 8 pixels that come with scikit-learn.

Small enough for a CPU, no download, and real: what a network has not seen it can get wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from lightning_dsgd.tasks.base import Classifier, SplitData

NUM_CLASSES = 10


class DigitsData(SplitData):
    """Loads the digits, split the same way on every rank and in every run.

    Args:
        batch_size: images a rank and step.
        num_workers: loader processes a rank; with 0 the training process loads, which is the
            fastest for a data set that is in memory.
        split: how many images train, validate and test.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        batch_size: int = 16,
        num_workers: int = 0,
        split: tuple[int, int, int] = (1437, 180, 180),
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.split = split

    def setup(self, stage: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as err:
            raise ImportError(
                "DigitsData needs scikit-learn, which is not installed; "
                "try: pip install scikit-learn"
            ) from err
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        dataset = TensorDataset(images, torch.tensor(digits, dtype=torch.int64))
        parts = random_split(dataset, self.split, generator=torch.Generator().manual_seed(0))
        self.splits = dict(zip(("train", "val", "test"), parts, strict=True))


class DigitsClassifier(Classifier):
    """Trains a convolutional network for the digits by SGD with momentum.

    Args:
        lr: learning rate.
        momentum: the momentum of SGD.
        channels: channels of the first convolution; the second has twice as many.
        batch_norm: whether to normalise after each convolution.
    """

    def __init__(
        self,
        lr: float = 0.02,
        momentum: float = 0.9,
        channels: int = 16,
        batch_norm: bool = True,
    ) -> None:
        net = nn.Sequential(
            _convolution(1, channels, batch_norm),
            _convolution(channels, 2 * channels, batch_norm),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_CLASSES),
        )
        super().__init__(net, NUM_CLASSES, lr=lr, momentum=momentum)
        self.save_hyperparameters()


def _convolution(channels_in: int, channels_out: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, 3, padding=1)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(channels_out))
    return nn.Sequential(*layers, nn.ReLU())
