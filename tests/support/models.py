"""Small models and data for tests of `Trainer.fit`."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    """A network with BatchNorm on a linear target."""

    def __init__(self, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def loader(num_samples: int = 128, batch_size: int = 8, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 10, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, **kwargs)


def trainer(strategy: Any, devices: int, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, devices=devices, **{**defaults, **kwargs})


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
