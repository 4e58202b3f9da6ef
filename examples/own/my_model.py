"""A model of your own: a LightningModule, written as for DDP."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn


class MyModel(L.LightningModule):
    """Tells two spirals apart.

    Args:
        lr: learning rate
        width: units of each hidden layer
    """

    def __init__(self, lr: float = 0.05, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.net(inputs), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        inputs, classes = batch
        right = (self.net(inputs).argmax(1) == classes).float().mean()
        self.log("val_accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
