"""Every recipe is understood, its strategy starts on as many ranks, and every small one runs."""

from __future__ import annotations

import copy
import importlib
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger

from lightning_dsgd.cli import main
from lightning_dsgd.loggers import OfflineWandbLogger
from lightning_dsgd.transport.simulated import SimulatedWorld
from tests.worlds import FitWorld

FOLDER = Path(__file__).parents[1] / "recipes"
SMALL = sorted(FOLDER.glob("*.yaml"))
PAPER = sorted((FOLDER / "paper").glob("*.yaml"))


class Parser(LightningCLI):
    """Reads a configuration as `lightning-dsgd fit` does, and makes nothing of it."""

    def instantiate_classes(self) -> None:
        pass


def parse(recipe: Path) -> Any:
    with warnings.catch_warnings():
        # Lightning calls jsonargparse as its next version will not allow.
        warnings.simplefilter("ignore")
        return Parser(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            args=["--config", str(recipe)],
        )


def start(net: Any, algorithm: Any) -> None:
    algorithm = copy.deepcopy(algorithm)
    x = torch.zeros(1024)
    algorithm.start(net, x)
    algorithm.finish(x)


@pytest.mark.parametrize("recipe", SMALL + PAPER, ids=lambda path: path.stem)
def test_recipe_is_understood_and_its_strategy_starts(recipe: Path) -> None:
    cli = parse(recipe)
    trainer = cli.config.trainer
    module, name = trainer.strategy.class_path.rsplit(".", 1)
    strategy = getattr(importlib.import_module(module), name)(**trainer.strategy.init_args)
    assert trainer.max_time is None or strategy.algorithm.lockstep  # else it is refused
    SimulatedWorld(trainer.devices * trainer.num_nodes).run(start, strategy.algorithm)


@pytest.mark.parametrize("recipe", SMALL + PAPER, ids=lambda path: path.stem)
def test_recipe_says_what_it_is(recipe: Path) -> None:
    lines = recipe.read_text().split("\nseed_everything")[0].split("\n")
    assert all(line.startswith("#") and len(line) <= 110 for line in lines)
    text = " ".join(line[1:].strip() for line in lines)
    (named,) = re.findall(r"lightning-dsgd fit --config recipes/(\S+)", text) or [""]
    assert FOLDER / named == recipe
    for other in re.findall(r"recipes/\S+?\.yaml|benchmarks/\S+?\.py|docs/\S+?\.json", text):
        assert (FOLDER.parent / other).exists()


LESS_DATA = {
    "TextData": ["--data.max_chars", "30000"],
    "TranslationData": ["--data.num_generated", "300"],
    "SpeechData": ["--data.num_generated", "20"],
}
"""What a fit need not generate for one step."""


def run_all(folder: str) -> dict[str, float]:
    """A step of each small recipe, one after the other on the same ranks; seconds of each."""
    os.chdir(folder)
    torch.set_num_threads(1)
    seconds = {}
    for recipe in SMALL:
        options = ["--trainer.devices", "2", "--trainer.fast_dev_run", "1"]
        for name, more in LESS_DATA.items():
            if f"tasks.{name}\n" in recipe.read_text():
                options += more
        begin = time.perf_counter()
        main(["fit", "--config", str(recipe), *options])
        seconds[recipe.stem] = time.perf_counter() - begin
    return seconds


@pytest.mark.timeout(180)
def test_every_small_recipe_runs(tmp_path: Path) -> None:
    outcomes = FitWorld().outcomes(2, run_all, str(tmp_path), limit_s=150)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for outcome in outcomes:
        print(outcome.result)
        assert list(outcome.result) == [recipe.stem for recipe in SMALL]


@pytest.mark.parametrize(
    ("mode", "offline"),
    [(None, True), ("offline", True), ("dryrun", True), ("online", False), ("disabled", False)],
)
def test_wandb_is_offline_unless_told_otherwise(
    mode: str | None, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    logger = OfflineWandbLogger(name="run")
    assert isinstance(logger, WandbLogger)
    assert logger._offline is offline
    assert logger._project == "lightning-dsgd"
