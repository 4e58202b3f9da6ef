"""Data of your own: a LightningDataModule, written as for DDP.  Each rank gets its share."""

from __future__ import annotations

import math

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


def spirals(num_samples: int, seed: int) -> TensorDataset:
    """Draws points of two spirals, which are the classes."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(2, (num_samples,), generator=draw)
    turns = torch.rand(num_samples, generator=draw)
    angles = 3 * math.pi * turns + math.pi * classes
    points = turns[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)
    noise = 0.03 * torch.randn(num_samples, 2, generator=draw)
    return TensorDataset(points + noise, classes)


class MyData(L.LightningDataModule):
    """Loads the spirals.

    Args:
        batch_size: samples of a batch, on each rank
        num_train: samples of an epoch, of all ranks
        num_val: samples to evaluate on
    """

    def __init__(self, batch_size: int = 16, num_train: int = 4096, num_val: int = 1024) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_train, self.num_val = num_train, num_val

    def train_dataloader(self) -> DataLoader:
        return DataLoader(spirals(self.num_train, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(spirals(self.num_val, 1), self.batch_size)
