"""A scheduler sends SIGTERM to one rank (Lightning #20542, #21406)."""

import os
import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 10:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    trainer = pl.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=3,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Model())  # <- culprit


main()
