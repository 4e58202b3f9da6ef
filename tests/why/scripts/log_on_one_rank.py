"""One rank logs with sync_dist=True, the others do not (Lightning #19604, #19106)."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 10:
            self.log("large", out["loss"], sync_dist=True, on_step=True)  # <- culprit
        return out


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
