"""A fit whose rank 1 has a slow loader (Lightning #20702: DDP is slower than one GPU).

STRATEGY is "fully_shard", or empty for DDP.
"""

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

IN_SHARDS = os.environ.get("STRATEGY") == "fully_shard"


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(0.1 * (row % 2))  # rank 1 of 2 has all odd rows
        return torch.ones(32)


class Model(BoringModel):
    def configure_model(self) -> None:
        if IN_SHARDS:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=1, shuffle=False)


trainer = pl.Trainer(
    strategy=ModelParallelStrategy(2, 1) if IN_SHARDS else "ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    limit_val_batches=0,
)
trainer.fit(Model())
