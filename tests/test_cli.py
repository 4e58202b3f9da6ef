"""The console script, as a process of its own: that is how launchers start it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dsgd
from lightning_dsgd.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
RECIPES = [ROOT / "recipes" / f"digits_{name}.yaml" for name in ("local_sgd", "wagma")]
"""Started as a user starts them; test_recipes.py runs all of them."""


def run(*args: str, cwd: Path, module: str = "lightning_dsgd") -> subprocess.CompletedProcess[str]:
    """`python -m lightning_dsgd ARGS`, or another module that starts it."""
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def fit(recipe: Path, cwd: Path, *more: str) -> subprocess.CompletedProcess[str]:
    done = run("fit", "--config", str(recipe), *more, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def test_strategies_are_shown_as_a_table(tmp_path: Path) -> None:
    done = run("strategies", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first_words = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert set(lightning_dsgd.STRATEGIES) <= first_words
    assert max(map(len, done.stdout.splitlines())) <= 150


def test_a_strategy_is_shown_with_its_hyperparameters(capsys: pytest.CaptureFixture[str]) -> None:
    main(["strategies", "local_sgd"])
    text = capsys.readouterr().out
    assert "lightning_dsgd.LocalSGDStrategy(sync_period=8)" in text
    assert "https://arxiv.org/abs/1805.09767" in text


def test_a_strategy_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["strategies", "local_sdg"])
    assert end.value.code == 2
    assert "'local_sdg'" in capsys.readouterr().err


def test_help_of_a_command_is_lightnings(tmp_path: Path) -> None:
    done = run("fit", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--trainer.strategy" in done.stdout


def run_as_console_script(code: str, cwd: Path) -> None:
    """The code in a process that takes itself for `lightning-dsgd`."""
    code = f"import sys; sys.argv[0] = '/somewhere/bin/lightning-dsgd'\n{code}"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )


@pytest.mark.parametrize("args", [["--help"], ["strategies", "--help"], ["doctor", "--help"]])
def test_help_of_the_console_script_loads_nothing_slow(args: list[str], tmp_path: Path) -> None:
    code = f"""
from lightning_dsgd.cli import main
try:
    main({args})
except SystemExit as end:
    assert end.code == 0
slow = {{"torch", "lightning", "pytorch_lightning", "jsonargparse", "numpy"}} & set(sys.modules)
assert not slow, slow
"""
    run_as_console_script(code, tmp_path)


def test_the_console_script_knows_all_public_names(tmp_path: Path) -> None:
    code = """
import lightning_dsgd
assert "torch" not in sys.modules
assert all(getattr(lightning_dsgd, name) is not None for name in lightning_dsgd.__all__)
assert not hasattr(lightning_dsgd, "WAGMA")
from lightning.pytorch.strategies import StrategyRegistry
from lightning_dsgd.cli import main
assert "wagma" not in StrategyRegistry
try:
    main(["fit", "--help"])
except SystemExit as end:
    assert end.code == 0
assert "wagma" in StrategyRegistry
"""
    run_as_console_script(code, tmp_path)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        ([], 2),
        (["--help"], 0),
        (["strategies", "--help"], 0),
        (["doctor", "--help"], 0),
        (["train"], 2),
    ],
)
def test_usage(args: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == status
    assert "usage: lightning-dsgd" in "".join(capsys.readouterr())


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    text = capsys.readouterr().err
    assert all(repr(command) in text for command in ("train", *COMMANDS))


def test_unknown_strategy_argument_ends_before_training(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "digits_local_sgd.yaml"
    done = run("fit", "--config", str(recipe), "--trainer.strategy.sync_perod", "8", cwd=tmp_path)
    assert done.returncode == 2
    assert "sync_perod" in done.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs(recipe: Path, tmp_path: Path) -> None:
    fit(recipe, tmp_path, "--trainer.fast_dev_run", "true", "--trainer.devices", "2")


def test_name_given_on_the_command_line_replaces_the_recipes_strategy(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "digits_local_sgd.yaml"
    more = ["--trainer.fast_dev_run", "true", "--trainer.devices", "1"]
    fit(recipe, tmp_path, *more, "--trainer.strategy", "dpsgd")


def test_run_leaves_metrics_config_and_a_checkpoint(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "digits_local_sgd.yaml"
    fit(recipe, tmp_path, "--trainer.max_epochs", "1", "--trainer.devices", "2")
    (log,) = tmp_path.glob("lightning_logs/version_*")
    assert (log / "config.yaml").exists()
    assert len(list(log.glob("checkpoints/*.ckpt"))) == 1
    with open(log / "metrics.csv") as file:
        columns = csv.DictReader(file).fieldnames or []
    assert {"train_loss", "val_loss", "val_accuracy", "dsgd/bytes_sent"} <= set(columns)


def test_torchrun_starts_it(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "digits_local_sgd.yaml"
    done = run(
        *("--nproc-per-node", "2", "--standalone", "-m", "lightning_dsgd"),
        *("fit", "--config", str(recipe), "--trainer.devices", "2"),
        *("--trainer.fast_dev_run", "true"),
        cwd=tmp_path,
        module="torch.distributed.run",
    )
    assert done.returncode == 0, done.stderr
