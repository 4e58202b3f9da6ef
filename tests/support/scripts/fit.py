"""A user's training script: local SGD; each rank writes what it has to a folder.

python fit.py FOLDER [DEVICES NODES]
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

import lightning_dsgd  # noqa: F401 - registers the strategies
from tests.support.models import Regression, loader, weights

torch.set_num_threads(1)
devices, num_nodes = map(int, sys.argv[2:] or (4, 1))
L.seed_everything(0)
trainer = L.Trainer(
    strategy="local_sgd",
    accelerator="cpu",
    devices=devices,
    num_nodes=num_nodes,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = Regression()
wire = []
trainer.callbacks.append(
    L.pytorch.callbacks.LambdaCallback(
        on_train_start=lambda trainer, _: wire.append(type(trainer.strategy.session.net).__name__)
    )
)
trainer.fit(model, loader(), loader(32))
torch.save(
    {
        "weights": weights(model),
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "transport": wire[0],
        "steps": trainer.global_step,
        "local_rank": trainer.local_rank,
    },
    Path(sys.argv[1], f"rank_{trainer.global_rank}.pt"),
)
