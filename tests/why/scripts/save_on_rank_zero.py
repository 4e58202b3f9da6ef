"""Rank 0 alone saves a checkpoint (Lightning #19045; autocast #381)."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 10:
            self.trainer.save_checkpoint("best.ckpt")  # <- culprit


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
    trainer.fit(Model())  # <- others


main()
