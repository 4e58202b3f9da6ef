"""A callback that gives checkpoints to W&B and MLflow, so that a training resumes exactly."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_dsgd.lab import trackers


class CheckpointArtifacts(pl.Callback):
    """Gives a run of W&B or MLflow the checkpoints whole: with the replica of each rank.

    ```python
    L.Trainer(strategy="wagma", logger=WandbLogger(), callbacks=[CheckpointArtifacts()])
    ```

    Use it in place of the loggers' own `log_model`, which gives the file with the consensus alone.
    From what it gives, as many ranks resume exactly.  An offline run of W&B keeps a copy, and
    `wandb sync` sends the copy.

    It gives what ModelCheckpoint keeps when training ends: the best checkpoints and the last.

    Args:
        as_they_come: whether checkpoints are given after each epoch too, as a job needs it that may
            be killed
    """

    def __init__(self, as_they_come: bool = False) -> None:
        self.as_they_come = as_they_come
        self._given: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not any(map(trackers.takes_pages, trainer.loggers)):
            found = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "no logger"
            raise ValueError(
                f"CheckpointArtifacts needs WandbLogger or MLFlowLogger, got {found}; give the "
                "Trainer one of them, or leave the callback out"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.as_they_come:
            self._give(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._give(trainer)

    def _give(self, trainer: Any) -> None:
        if not trainer.is_global_zero:
            return
        for saver in trainer.checkpoint_callbacks:
            best = getattr(saver, "best_model_path", "")
            kept = [
                *getattr(saver, "best_k_models", ()),
                best,
                getattr(saver, "last_model_path", ""),
            ]
            for name in dict.fromkeys(filter(None, kept)):
                file = Path(os.path.realpath(name))
                if not file.is_file():
                    continue  # ModelCheckpoint has removed it
                saved_ns = file.stat().st_mtime_ns
                if self._given.get(str(file)) != saved_ns:
                    self._given[str(file)] = saved_ns
                    score = getattr(saver, "best_k_models", {}).get(name)
                    about = {
                        "file": file.name,
                        "num_ranks": trainer.world_size,
                        "score": None if score is None else float(score),
                    }
                    aliases = ["latest", "best"] if name == best else ["latest"]
                    self._give_one(trainer, file, aliases, about)

    @staticmethod
    def _give_one(trainer: Any, file: Path, aliases: list[str], about: dict[str, Any]) -> None:
        replicas = Path(f"{file}.replicas")
        found = len(list(replicas.glob("rank_*.pt")))
        if 0 < found < trainer.world_size:
            warnings.warn(
                f"{replicas} has the replicas of {found} ranks of {trainer.world_size}: from the "
                "artifact no exact resume is possible; save into a folder that all nodes see",
                stacklevel=2,
            )
        for logger in filter(trackers.takes_pages, trainer.loggers):
            trackers.give_checkpoint(logger, file, replicas, aliases, about)
