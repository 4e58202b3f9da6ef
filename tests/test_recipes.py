"""Every recipe is understood, its strategy starts on as many ranks, and one of each task runs."""

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
from lightning_dsgd.lab.trackers import OfflineWandbLogger
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.worlds import FitWorld

FOLDER = Path(__file__).parents[1] / "recipes"
SMALL = sorted(FOLDER.glob("*.yaml"))
PAPER = sorted(FOLDER.parent.glob("benchmarks/papers/*.yaml"))


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
            args=[f"--config={recipe}"],
        )


def made(class_path: str, init_args: Any) -> Any:
    module, name = class_path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**init_args)


def start(net: Any, algorithm: Any) -> None:
    algorithm = copy.deepcopy(algorithm)
    x = torch.zeros(1024)
    algorithm.start(net, x)
    algorithm.finish(x)


@pytest.mark.parametrize("recipe", SMALL + PAPER, ids=lambda path: path.stem)
def test_recipe_is_understood_and_its_strategy_starts(recipe: Path) -> None:
    cli = parse(recipe)
    trainer = cli.config.trainer
    init_args = dict(vars(trainer.strategy.init_args))
    num_ranks = init_args.get("num_replicas", trainer.devices * trainer.num_nodes)
    algorithm = init_args["algorithm"]
    init_args["algorithm"] = made(algorithm.class_path, algorithm.init_args)
    strategy = made(trainer.strategy.class_path, init_args)
    SimulatedWorld(num_ranks).run(start, strategy.algorithm)


LESS_DATA = {
    "TextData": ["--data.max_chars", "30000"],
    "TranslationData": ["--data.num_generated", "300"],
    "SpeechData": ["--data.num_generated", "20"],
}
"""What a fit need not generate for one step."""


def run_each(folder: str, recipes: list[Path]) -> dict[str, float]:
    """A step of each recipe, one after the other on the same ranks; seconds of each."""
    os.chdir(folder)
    torch.set_num_threads(1)
    seconds = {}
    for recipe in recipes:
        options = ["--trainer.devices", "2", "--trainer.fast_dev_run", "1"]
        for name, more in LESS_DATA.items():
            if f"tasks.{name}\n" in recipe.read_text():
                options += more
        begin = time.perf_counter()
        main(["fit", "--config", str(recipe), *options])
        seconds[recipe.stem] = time.perf_counter() - begin
    return seconds


# Recipes differ in their tasks and in their strategies, of which other tests run all.
TASKS = {str(re.findall(r"tasks\.\w+", recipe.read_text())): recipe for recipe in SMALL}


@pytest.mark.parametrize(
    "recipes",
    [
        pytest.param(list(TASKS.values())[:1], id="the first"),
        pytest.param(list(TASKS.values())[1:], id="one of each task", marks=pytest.mark.exhaustive),
    ],
)
def test_a_recipe_of_each_task_runs(recipes: list[Path], tmp_path: Path) -> None:
    outcomes = FitWorld().outcomes(2, run_each, str(tmp_path), recipes)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for outcome in outcomes:
        print(outcome.result)
        assert list(outcome.result) == [recipe.stem for recipe in recipes]


@pytest.mark.parametrize(
    ("mode", "sweep", "offline"),
    [(None, "", True), ("online", "", False), (None, "s1", False), ("offline", "s1", True)],
)
def test_wandb_is_offline_unless_told_otherwise(
    mode: str | None, sweep: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    logger = OfflineWandbLogger(name="run")
    assert isinstance(logger, WandbLogger)
    assert logger._offline is offline
    assert logger._project == "lightning-dsgd"
