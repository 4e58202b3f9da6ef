"""The command line, in this process, in those of ranks, and as a console script."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import lightning_dsgd
from lightning_dsgd.cli import COMMANDS, main
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "digits_local_sgd.yaml"
"""test_recipes.py runs all of them."""


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns where those of this process are given beside others."""
    monkeypatch.setattr(sys, "argv", ["python"])


def finish(command: list[str], cwd: Path) -> None:
    """Runs what must end well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


RECIPE_FIT = ["fit", "--config", str(RECIPE)]
WRONG = ["--trainer.strategy.sync_perod", "8"]
SAID: dict[str, tuple[list[str], int | None, list[str]]] = {
    "all strategies": (["strategies"], None, [*lightning_dsgd.STRATEGIES]),
    "a strategy": (
        ["strategies", "local_sgd"],
        None,
        ["lightning_dsgd.LocalSGDStrategy(sync_period=8, ", "https://arxiv.org/abs/1805.09767"],
    ),
    "no strategy": (["strategies", "local_sdg"], 2, ["got 'local_sdg'; did you mean local_sgd?"]),
    "help": (["--help"], 0, ["usage: lightning-dsgd"]),
    "help of strategies": (["strategies", "--help"], 0, ["usage: lightning-dsgd"]),
    "help of the doctor": (["doctor", "--help"], 0, ["usage: lightning-dsgd"]),
    "help of a fit is Lightning's": (["fit", "--help"], 0, ["--trainer.strategy"]),
    "no command": ([], 0, [f"{command:12}{what}" for command, what in COMMANDS.items()]),
    "no such command": (
        ["train"],
        2,
        ["usage: lightning-dsgd", *(repr(command) for command in ("train", *COMMANDS))],
    ),
    "a wrong hyperparameter": ([*RECIPE_FIT, *WRONG], 2, ["sync_perod"]),
    "a wrong name": (
        [*RECIPE_FIT, "--trainer.strategy", "wagam", *WRONG],
        2,
        ["No strategy is called 'wagam'. Did you mean \"wagma\", of lightning_dsgd?"],
    ),
    "a wrong hyperparameter of a name": (
        [*RECIPE_FIT, "--trainer.strategy", "wagma", *WRONG],
        2,
        ["Option 'sync_perod' is not accepted"],
    ),
    "what is no name": (
        [*RECIPE_FIT, "--trainer.strategy", "nonsense", *WRONG],
        2,
        ["Expected a dot import path string: nonsense"],
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_a_command_says_what_it_is_asked_or_what_is_wrong(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, status, texts = SAID[case]
    with nullcontext() if status is None else pytest.raises(SystemExit) as end:
        main(arguments)
    assert end is None or end.value.code == status
    out, err = capsys.readouterr()
    assert all(text in (err if status else out) for text in texts)
    assert arguments != ["strategies"] or max(map(len, out.splitlines())) <= 150


def run_as_console_script(code: str, cwd: Path) -> None:
    """The code in a process that takes itself for `lightning-dsgd`."""
    code = f"import sys; sys.argv[0] = '/somewhere/bin/lightning-dsgd'\n{code}"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=250,
    )


HELP = ("", "strategies", "doctor", "bench", "bench throughput", "bench convergence", "simulate")


def test_help_of_the_console_script_loads_nothing_slow(tmp_path: Path) -> None:
    code = f"""
from lightning_dsgd.cli import main
for command in {HELP}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    slow = {{"torch", "lightning", "pytorch_lightning", "jsonargparse", "numpy"}} & set(sys.modules)
    assert not slow, (command, slow)
"""
    run_as_console_script(code, tmp_path)


@pytest.mark.exhaustive
def test_the_console_script_knows_all_public_names(tmp_path: Path) -> None:
    code = """
import lightning_dsgd
assert "torch" not in sys.modules
assert all(getattr(lightning_dsgd, name) is not None for name in lightning_dsgd.__all__)
assert not hasattr(lightning_dsgd, "Wagma")
from lightning.pytorch.strategies import StrategyRegistry
assert "wagma" in StrategyRegistry
"""
    run_as_console_script(code, tmp_path)


BESIDE_A_NAME = {
    "two flags": ["--trainer.strategy=wagma", "--trainer.strategy.sync_period=20"],
    "two flags, and the name as one likes": [
        "--trainer.strategy", "WAGMA", "--trainer.strategy.sync_period", "20",
    ],
    "a file": "{class_path: wagma, init_args: {sync_period: 20}}",
    "a file with a name, and a flag": "wagma",
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE_A_NAME)
def test_a_name_takes_hyperparameters(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe has another strategy; the rest keeps its defaults."""
    given = BESIDE_A_NAME[case]
    if isinstance(given, str):
        file = tmp_path / "strategy.yaml"
        file.write_text(f"trainer: {{strategy: {given}}}\n")
        flag = [] if "sync" in given else ["--trainer.strategy.sync_period", "20"]
        given = ["--config", str(file), *flag]
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(RECIPE), *given, "--print_config"])
    assert end.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("class_path: lightning_dsgd.WAGMAStrategy")
    assert lines[at + 2 : at + 4] == ["group_size: null", "sync_period: 20"]


def test_a_fit_without_jsonargparse_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(SystemExit, match="needs the package jsonargparse, which is not installed"):
        main(["fit", "--config", str(RECIPE)])


def fit_in(folder: Path, args: list[str]) -> None:
    os.chdir(folder)
    main(["fit", *args])


def test_run_leaves_metrics_config_and_a_checkpoint(tmp_path: Path) -> None:
    """And a name on the command line replaces the recipe's strategy."""
    more = ["--trainer.strategy", "dpsgd", "--trainer.max_epochs", "1", "--trainer.devices", "2"]
    FitWorld().run(2, fit_in, tmp_path, ["--config", str(RECIPE), *more])
    (log,) = tmp_path.glob("lightning_logs/version_*")
    assert "strategy: dpsgd\n" in (log / "config.yaml").read_text()
    assert len(list(log.glob("checkpoints/*.ckpt"))) == 1
    with open(log / "metrics.csv") as file:
        columns = csv.DictReader(file).fieldnames or []
    assert {"train_loss", "val_loss", "val_accuracy", "dsgd/bytes_sent"} <= set(columns)


OWN_MODEL = """
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class MyModel(BoringModel):
    def on_train_end(self):
        with open(f"trained_{self.global_rank}", "x") as file:
            file.write(str(self.trainer.world_size))
"""
OWN_DATA = "from my_model import BoringDataModule as MyData\n"


@pytest.mark.exhaustive
def test_console_script_finds_the_users_modules_on_all_ranks(tmp_path: Path) -> None:
    """The second rank is started by Lightning."""
    (tmp_path / "my_model.py").write_text(OWN_MODEL)
    (tmp_path / "my_data.py").write_text(OWN_DATA)
    script = Path(sys.executable).with_name("lightning-dsgd")
    own = ["--model", "my_model.MyModel", "--data", "my_data.MyData"]
    ranks = ["--trainer.strategy", "local_sgd", "--trainer.accelerator", "cpu"]
    few = ["--trainer.devices", "2", "--trainer.fast_dev_run", "true"]
    finish([str(script), "fit", *own, *ranks, *few], tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.glob("trained_*")}
    assert written == {"trained_0": "2", "trained_1": "2"}


@pytest.mark.exhaustive
def test_torchrun_starts_it(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    more = ["--trainer.devices", "2", "--trainer.fast_dev_run", "true"]
    command = [sys.executable, "-m", *torchrun, "-m", "lightning_dsgd", "fit"]
    finish([*command, "--config", str(RECIPE), *more], tmp_path)
