"""A user's training script: local SGD, then a test of the best checkpoint.

Each rank writes what it ends with to a folder.

Its arguments: the folder, the devices of each node, and the number of nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_dsgd  # noqa: F401 - registers the strategies
from tests.support.models import Regression, loader, weights

torch.set_num_threads(1)
L.seed_everything(0)
trainer = L.Trainer(
    strategy="local_sgd",
    accelerator="cpu",
    devices=int(sys.argv[2]),
    num_nodes=int(sys.argv[3]),
    max_epochs=1,
    logger=False,
    callbacks=[ModelCheckpoint(sys.argv[1], monitor="val_loss")],
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
trained, steps = weights(model), trainer.global_step
(tested,) = trainer.test(dataloaders=loader(32), ckpt_path="best")
plain = Regression.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).eval()
(batch,) = loader(32, 32)
environment = type(trainer.strategy.cluster_environment).__name__
torch.save(
    {
        "weights": trained,
        "environment": environment,
        "transport": wire[0],
        "steps": steps,
        "tested": tested["val_loss"],
        "plain": float(plain.loss(batch)),
        "local_rank": trainer.local_rank,
    },
    Path(sys.argv[1], f"rank_{trainer.global_rank}.pt"),
)
