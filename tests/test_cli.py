"""The command line, in this process, in those of ranks, and as a console script."""

from __future__ import annotations

import csv
import inspect
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import lightning_dsgd
from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.cli import COMMANDS, main
from tests.support.mpi import ended
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "digits_local_sgd.yaml"
"""test_recipes.py runs all of them."""


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns where those of this process are given beside others."""
    monkeypatch.setattr(sys, "argv", ["python"])


RECIPE_FIT = ["fit", "--config", str(RECIPE)]
WRONG = ["--trainer.strategy.algorithm.sync_perod", "8"]
SAID: dict[str, tuple[list[str], int | None, list[str]]] = {
    "all strategies": (["strategies"], None, [*ALL_ALGORITHMS]),
    "a strategy": (
        ["strategies", "local_sgd"],
        None,
        [
            "lightning_dsgd.DecentralizedStrategy(lightning_dsgd.LocalSGD(sync_period=2, ",
            "https://arxiv.org/abs/1805.09767",
        ],
    ),
    "no strategy": (["strategies", "local_sdg"], 2, ["got 'local_sdg'; did you mean local_sgd?"]),
    "a recipe": (["recipes", "digits_wagma", "--print"], None, ["# Handwritten digits with WAGMA"]),
    "no recipe": (["recipes", "digit_wagma"], 2, ["got 'digit_wagma'; did you mean digits_wagma?"]),
    "help": (["--help"], 0, ["usage: lightning-dsgd"]),
    "help of a fit is Lightning's": (["fit", "--help"], 0, ["--trainer.strategy"]),
    "the version": (["--version"], 0, [f"lightning-dsgd {lightning_dsgd.__version__}\n"]),
    "no such command": (
        ["train"],
        2,
        ["usage: lightning-dsgd", f"must be one of {', '.join(COMMANDS)}, got 'train'\n"],
    ),
    "a mistyped command": (["timelin"], 2, ["got 'timelin'; did you mean timeline?"]),
    "a launch of no script": (
        ["launch", "--ranks", "4"],
        2,
        ["are required: script; try lightning-dsgd launch --ranks 4 train.py"],
    ),
    "a wrong name": (
        [*RECIPE_FIT, "--trainer.strategy.algorithm", "WAGAM", *WRONG],
        2,
        ["Expected a dot import path string: WAGAM"],
    ),
    "a wrong hyperparameter": (
        [*RECIPE_FIT, "--trainer.strategy.algorithm", "WAGMA", *WRONG],
        2,
        ["Option 'sync_perod' is not accepted"],
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_a_command_answers_or_refuses(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    arguments, status, texts = SAID[case]
    with nullcontext() if status is None else pytest.raises(SystemExit) as end:
        main(arguments)
    assert end is None or end.value.code == status
    out, err = capsys.readouterr()
    assert all(text in (err if status else out) for text in texts)
    assert arguments != ["strategies"] or max(map(len, out.splitlines())) <= 150


def test_records_are_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["strategies", "--json"])
    every = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in every] == [*ALL_ALGORITHMS]
    main(["strategies", "local_sgd", "--json"])
    [one] = json.loads(capsys.readouterr().out)
    assert one in every
    assert one["class"] == "lightning_dsgd.LocalSGD"
    assert one["hyperparameters"]["sync_period"] == 2


def test_a_recipe_is_copied_and_no_file_of_the_users_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(["recipes", "own"])
    copy = Path(capsys.readouterr().out.split()[-1])
    assert copy.read_text() == ROOT.joinpath(copy).read_text()
    copy.write_text("mine")
    with pytest.raises(SystemExit):
        main(["recipes", "own"])
    assert f"{copy} is another file" in capsys.readouterr().err
    assert copy.read_text() == "mine"


HELP = ("", "strategies", "why")


def test_help_of_the_console_script_loads_nothing_slow(tmp_path: Path) -> None:
    code = f"""
import sys
sys.argv[0] = "/somewhere/bin/lightning-dsgd"
from lightning_dsgd.cli import main
for command in {HELP}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    slow = {{"torch", "lightning", "pytorch_lightning", "jsonargparse", "numpy"}} & set(sys.modules)
    assert not slow, (command, slow)
"""
    done = ended([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


OURS = "strategy: {class_path: lightning_dsgd.DecentralizedStrategy, init_args: {algorithm: "
WAYS: dict[str, tuple[str, list[str]]] = {
    "a flag": ("", ["--trainer.strategy.algorithm", "WAGMA"]),
    "a class in a file": (OURS + "{class_path: lightning_dsgd.WAGMA}}}", []),
    "a short class in a file": (OURS + "{class_path: WAGMA}}}", []),
}
"""How an algorithm is named: what a file holds, and flags."""


@pytest.mark.parametrize("way", WAYS)
def test_an_algorithm_takes_options(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe has another one; the rest keeps its defaults."""
    content, flags = WAYS[way]
    file = tmp_path / "strategy.yaml"
    file.write_text(f"trainer: {{{content}}}\n")
    options = ["--trainer.strategy.data", "claimed", "--trainer.strategy.algorithm.group_size", "4"]
    given = ["--config", str(RECIPE), "--config", str(file), *flags, *options]
    with pytest.raises(SystemExit) as end:
        main(["fit", *given, "--print_config"])
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert config["class_path"] == "lightning_dsgd.DecentralizedStrategy"
    algorithm, shared = config["init_args"].pop("algorithm"), config["init_args"]
    assert algorithm["class_path"] == "lightning_dsgd.WAGMA"
    own = algorithm["init_args"]
    assert (shared.pop("data"), own.pop("group_size")) == ("claimed", 4)
    assert own.pop("sync_period") == 8  # jsonargparse keeps what both algorithms have
    for kind, chosen in (
        (lightning_dsgd.WAGMA, own),
        (lightning_dsgd.DecentralizedStrategy, shared),
    ):
        parameters = inspect.signature(kind).parameters
        assert chosen == {name: parameters[name].default for name in chosen}


REFUSED = {
    "group_size=7 with world_size=2": ["--trainer.strategy.algorithm.group_size", "7"],
    "sync_period must be None or a whole number": ["--trainer.strategy.algorithm.sync_period", "0"],
}
"""What a strategy refuses when ranks meet, and when it is made, where jsonargparse holds it."""
WAGMA = [*RECIPE_FIT, "--trainer.devices", "2", "--trainer.strategy.algorithm", "WAGMA"]


def fit_as_typed(folder: Path, args: list[str]) -> None:
    os.chdir(folder)
    sys.argv = ["lightning-dsgd", *args]
    main()


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_is_a_line_of_each_rank(text: str, tmp_path: Path) -> None:
    """And no traceback: Python prints the text of a SystemExit, and ends with 1."""
    outcomes = FitWorld().outcomes(2, fit_as_typed, tmp_path, [*WAGMA, *REFUSED[text]])
    assert outcomes[0].error.startswith("SystemExit: error: ")
    for outcome in outcomes:
        assert outcome.error.startswith(("SystemExit: error: ", "SystemExit: [rank 1] error: "))
        assert text in outcome.error
        assert "\n" not in outcome.error


MODEL = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class MyModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 4)), 4)

    def on_train_end(self):
        strategy = self.trainer.strategy
        with open(f"rank_{self.global_rank}.txt", "w") as file:
            print(type(strategy).__name__, strategy.in_force["data"], file=file)
"""


def test_a_model_brings_its_own_data(tmp_path: Path) -> None:
    """Its file lies in the working folder; the strategy has an option."""
    (tmp_path / "my_model.py").write_text(MODEL)
    strategy = "{class_path: DecentralizedStrategy, init_args: {algorithm: wagma, data: claimed}}"
    limits = "accelerator: cpu, devices: 2, max_epochs: 1, logger: false"
    (tmp_path / "run.yaml").write_text(f"trainer: {{strategy: {strategy}, {limits}}}\n")
    command = ["fit", "--config", "run.yaml", "--model", "my_model.MyModel"]
    FitWorld().run(2, fit_as_typed, tmp_path, command)
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}.txt").read_text() == "DecentralizedStrategy claimed\n"


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


def test_the_configuration_that_was_given_is_not_written_over(tmp_path: Path) -> None:
    """Without a logger Lightning writes config.yaml into the working folder."""
    own = Path(shutil.copy(RECIPE, tmp_path / "config.yaml"))
    more = ["--trainer.logger", "false", "--trainer.max_epochs", "1", "--trainer.devices", "2"]
    more += ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    FitWorld().run(2, fit_in, tmp_path, ["--config", own.name, *more])
    assert own.read_text() == RECIPE.read_text()
    assert "max_epochs: 1\n" in (tmp_path / "config_of_run.yaml").read_text()
