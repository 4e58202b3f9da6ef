"""Every recipe is understood, its strategy starts on as many ranks, and every small one runs."""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
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
from lightning_dsgd.lab.loggers import OfflineWandbLogger
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.text import read_corpus
from tests.support.worlds import FitWorld

FOLDER = Path(__file__).parents[1] / "recipes"
OWN = FOLDER.parent / "examples" / "own"
SMALL = sorted(FOLDER.glob("*.yaml"))
PAPER = sorted((FOLDER / "paper").glob("*.yaml"))


class Parser(LightningCLI):
    """Reads a configuration as `lightning-dsgd fit` does, and makes nothing of it."""

    def instantiate_classes(self) -> None:
        pass


def parse(recipe: Path, *over: Path) -> Any:
    with warnings.catch_warnings():
        # Lightning calls jsonargparse as its next version will not allow.
        warnings.simplefilter("ignore")
        return Parser(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            args=[f"--config={file}" for file in (recipe, *over)],
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
    num_ranks = trainer.devices * trainer.num_nodes
    if "algorithm" in init_args:
        algorithm = init_args["algorithm"]
        init_args["algorithm"] = made(algorithm.class_path, algorithm.init_args)
        num_ranks = init_args["num_replicas"]
    strategy = made(trainer.strategy.class_path, init_args)
    SimulatedWorld(num_ranks).run(start, strategy.algorithm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", SMALL + PAPER, ids=lambda path: path.stem)
def test_recipe_has_a_baseline_and_runs_on_one_node_with_gpus(recipe: Path) -> None:
    strategy = parse(recipe, OWN / "allreduce.yaml").config.trainer.strategy
    assert strategy.class_path == "lightning_dsgd.AllReduceStrategy"
    baseline = made(strategy.class_path, vars(strategy.init_args)).algorithm
    assert (baseline.holds_back, baseline.takes_pieces) == (False, False)
    trainer = parse(recipe, OWN / "gpus.yaml").config.trainer
    assert (trainer.accelerator, trainer.devices, trainer.num_nodes) == ("gpu", "auto", 1)


@pytest.mark.parametrize("recipe", SMALL + PAPER, ids=lambda path: path.stem)
def test_recipe_says_what_it_is(recipe: Path) -> None:
    lines = recipe.read_text().split("\nseed_everything")[0].split("\n")
    assert all(line.startswith("#") and len(line) <= 110 for line in lines)
    text = " ".join(line[1:].strip() for line in lines)
    (named,) = re.findall(r"lightning-dsgd fit --config recipes/(\S+)", text) or [""]
    assert FOLDER / named == recipe
    for other in re.findall(r"recipes/\S+?\.yaml|benchmarks/\S+?\.py|docs/\S+?\.json", text):
        assert (FOLDER.parent / other).exists()
    for seen, result in re.findall(r"val_bleu ([\d.]+) [^.]*\((docs/\S+?\.json)\)", text):
        assert f'"val_bleu": {seen}' in (FOLDER.parent / result).read_text()


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
        pytest.param(
            [recipe for recipe in SMALL if recipe not in TASKS.values()],
            id="all others",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_small_recipe_runs(recipes: list[Path], tmp_path: Path) -> None:
    outcomes = FitWorld().outcomes(2, run_each, str(tmp_path), recipes)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for outcome in outcomes:
        print(outcome.result)
        assert list(outcome.result) == [recipe.stem for recipe in recipes]


@pytest.mark.parametrize(
    ("mode", "sweep", "offline"),
    [
        *((mode, "", True) for mode in (None, "offline", "dryrun")),
        *((mode, "", False) for mode in ("online", "disabled")),
        *((None, "s1", False), ("offline", "s1", True)),
    ],
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


def test_wandb_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-dsgd\[wandb\]'"):
        OfflineWandbLogger()


SMALLER = (
    "--trainer.accelerator cpu --trainer.devices 2 --trainer.num_nodes 1 --trainer.fast_dev_run 2"
)
SMALLER += " --model.dim 32 --model.depth 1 --model.num_heads 2 --data.num_workers 0"
SMALLER += " --model.vocab_size 400 --data.vocab_size 400"
OF_SUBWORDS = {
    "oktopk_bert_wikipedia": "--model.seq_len 32 --data.seq_len 32",
    "wagma_transformer_wmt17": "--trainer.strategy.group_size 2 --data.batch_size 8",
}


def fit_smaller(folder: Path, recipe: str) -> bool:
    os.chdir(folder)
    torch.set_num_threads(1)
    options = f"{SMALLER} {OF_SUBWORDS[recipe]}".split()
    main(["fit", "--config", str(FOLDER / "paper" / f"{recipe}.yaml"), *options])
    return "tokenizers" in sys.modules


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", OF_SUBWORDS)
def test_a_papers_recipe_trains_on_subwords(recipe: str, tmp_path: Path) -> None:
    """On files where the recipe looks for them, with a smaller network on two ranks."""
    pytest.importorskip("tokenizers")
    text = read_corpus(None, 60_000)
    (tmp_path / "data" / "wikipedia").mkdir(parents=True)
    (tmp_path / "data" / "wikipedia" / "a.txt").write_text(text)
    (tmp_path / "data" / "wmt17").mkdir()
    lines = "\n".join(line for line in text.splitlines() if line.strip()) + "\n"
    for split in ("train", "val", "test"):
        for language in ("en", "de"):
            (tmp_path / "data" / "wmt17" / f"{split}.{language}").write_text(lines)
    made = FitWorld().run(2, fit_smaller, tmp_path, recipe)
    assert any(made)  # for BERT, rank 0 alone makes tokens
