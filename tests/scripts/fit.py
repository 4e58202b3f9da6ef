"""A user's training script: two ranks, local SGD; each writes what it ends with to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

import lightning_dsgd  # noqa: F401 - registers the strategies
from tests.models import Regression, loader, weights

torch.set_num_threads(1)
L.seed_everything(0)
trainer = L.Trainer(
    strategy="local_sgd",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = Regression()
trainer.fit(model, loader(), loader(32))
environment = type(trainer.strategy.cluster_environment).__name__
torch.save(
    {"weights": weights(model), "environment": environment, "steps": trainer.global_step},
    Path(sys.argv[1], f"rank_{trainer.global_rank}.pt"),
)
