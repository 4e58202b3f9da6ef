"""The console script, as a process of its own: that is how launchers start it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_strategies_lists_the_registered_names(tmp_path: Path) -> None:
    done = run("strategies", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {"allreduce", "no_sync", "local_sgd", "dpsgd"} <= set(lines)
    assert "LocalSGDStrategy(sync_period=8" in lines["local_sgd"]


def test_help_of_a_command_is_lightnings(tmp_path: Path) -> None:
    done = run("fit", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--trainer.strategy" in done.stdout


def test_help_of_our_own_loads_no_parser_of_lightnings(tmp_path: Path) -> None:
    code = """
import sys
from lightning_dsgd.cli import list_strategies, main
list_strategies()
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "jsonargparse" not in sys.modules
assert "lightning_dsgd.tasks" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)


@pytest.mark.parametrize(
    ("args", "status"), [([], 2), (["--help"], 0), (["strategies", "--help"], 0), (["train"], 2)]
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
