"""A stand-in for a run of W&B, which keeps what it gets, and gives artifacts back as W&B does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger


class Config(dict[str, Any]):
    """The config of a run."""

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        super().update(values)


class FakeRun:
    """A run whose artifacts and files are put into a folder."""

    def __init__(self, folder: Path) -> None:
        self.id, self.dir, self.folder = "abc", str(folder), folder
        self.config = Config()
        self.rules: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.aliases: list[list[str]] = []

    def define_metric(self, name: str, step_metric: Any = None, summary: Any = None) -> None:
        self.rules[name] = summary

    def log(self, values: dict[str, Any]) -> None:
        self.logged |= values

    def save(self, file: str, base_path: str, policy: str) -> None:
        assert os.path.dirname(file) == base_path == self.dir

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        """Puts the files where a download would put them."""
        self.aliases.append(aliases)
        for name, entry in artifact.manifest.entries.items():
            target = self.folder / artifact.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(entry.local_path, target)


def wandb_logger(folder: Path) -> tuple[Any, FakeRun]:
    """Lightning's logger with such a run."""
    run = FakeRun(folder)
    kind = type("Logger", (WandbLogger,), {"experiment": run, "version": run.id})
    return kind(save_dir=str(folder), offline=True), run
