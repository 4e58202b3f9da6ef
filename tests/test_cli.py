"""The command line, in this process, in those of ranks, and as a console script."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import lightning_dsgd
from lightning_dsgd import wings
from lightning_dsgd.cli import COMMANDS, main
from lightning_dsgd.lab.bench.command import BENCHES
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
WRONG = ["--trainer.strategy.sync_perod", "8"]
SAID: dict[str, tuple[list[str], int | None, list[str]]] = {
    "all strategies": (["strategies"], None, [*lightning_dsgd.STRATEGIES]),
    "a strategy": (
        ["strategies", "local_sgd"],
        None,
        ["lightning_dsgd.LocalSGDStrategy(sync_period=8, ", "https://arxiv.org/abs/1805.09767"],
    ),
    "no strategy": (["strategies", "local_sdg"], 2, ["got 'local_sdg'; did you mean local_sgd?"]),
    "all recipes": (["recipes"], None, ["  digits_wagma ", "  paper/popsgd_gisette ", "  own "]),
    "a recipe": (["recipes", "digits_wagma", "--print"], None, ["# Handwritten digits with WAGMA"]),
    "no recipe": (["recipes", "digit_wagma"], 2, ["got 'digit_wagma'; did you mean digits_wagma?"]),
    "help": (["--help"], 0, ["usage: lightning-dsgd"]),
    "help of strategies": (["strategies", "--help"], 0, ["usage: lightning-dsgd"]),
    "help of the doctor": (["doctor", "--help"], 0, ["usage: lightning-dsgd"]),
    "help of a fit is Lightning's": (["fit", "--help"], 0, ["--trainer.strategy"]),
    "no command": ([], 0, [f"{command:12}{what}" for command, what in COMMANDS.items()]),
    "the version": (["--version"], 0, [f"lightning-dsgd {lightning_dsgd.__version__}\n"]),
    "no such command": (
        ["train"],
        2,
        ["usage: lightning-dsgd", f"must be one of {', '.join(COMMANDS)}, got 'train'\n"],
    ),
    "a mistyped command": (["simulat"], 2, ["got 'simulat'; did you mean simulate?"]),
    "a bench of nothing": (["bench", "--seeds"], 2, ["are required: throughput|convergence|"]),
    "a mistyped bench": (["bench", "thruput"], 2, ["got 'thruput'; did you mean throughput?"]),
    "a former option": (
        ["simulate", "--algorithms", "wagma"],
        2,
        ["--algorithms is called --strategies now"],
    ),
    "a launch of nothing": (["launch"], 2, ["try lightning-dsgd launch --ranks 4 train.py"]),
    "a launch of no script": (
        ["launch", "--ranks", "4"],
        2,
        ["are required: script; try lightning-dsgd launch --ranks 4 train.py"],
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
def test_a_command_answers_or_refuses(case: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert [each["name"] for each in every] == [*lightning_dsgd.STRATEGIES, "adaptive"]
    main(["strategies", "local_sgd", "--json"])
    [one] = json.loads(capsys.readouterr().out)
    assert one in every
    assert one["class"] == "lightning_dsgd.LocalSGDStrategy"
    assert one["hyperparameters"]["sync_period"] == 8


@pytest.mark.parametrize("width", [60, 100, 150])
def test_texts_are_as_wide_as_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what is indented, such as a command to be copied."""
    monkeypatch.setenv("COLUMNS", str(width))
    main(["strategies"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert all(name in printed.split() for name in lightning_dsgd.STRATEGIES)
    with pytest.raises(SystemExit):
        main(["bench", "target", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("    ")) <= width


COMPLETED = {
    "": ("dia", ["diagnose"]),
    "fit": ("--trainer.str", ["--trainer.strategy", "--trainer.strategy.help"]),
    "fit --trainer.strategy": ("pop", ["popsgd"]),
    "bench": ("--epoch-", ["--epoch-steps"]),
    "recipes": ("sweeps/", ["sweeps/digits_wagma"]),
}


@pytest.mark.exhaustive
def test_bash_completes(tmp_path: Path) -> None:
    lines = ["source <(cat)"]
    for before, (begun, _) in COMPLETED.items():
        words = ["lightning-dsgd", *before.split(), begun]
        lines.append(f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}")
        lines.append('_lightning_dsgd; echo "${COMPREPLY[@]}"')
    command = f"{sys.executable} -m lightning_dsgd completion bash"
    done = ended(["bash", "-c", f"{command} > it && bash -c '{'; '.join(lines)}' < it"], tmp_path)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [
        set(expected) for _, expected in COMPLETED.values()
    ], done.stderr


LISTED = ["strategies", "doctor", "recipes", "simulate", "probe", "advise", "diagnose", "timeline"]
LISTED += ["launch", "chaos", "completion"]
LISTED += [f"bench {what}" for what in BENCHES]


@pytest.mark.parametrize("command", LISTED)
def test_each_option_tells_its_default(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    seen: list[argparse.ArgumentParser] = []

    def look(parser: argparse.ArgumentParser, *_: object) -> None:
        seen.append(parser)
        if parser.prog != "lightning-dsgd bench":
            sys.exit()

    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda *args: look(*args) or real(*args)
    )
    module = wings.load(wings.COMMANDS[command.split()[0]], command)
    with pytest.raises(SystemExit):
        module.main(command.split()[1:])
    parser = seen[-1]
    assert parser.prog == f"lightning-dsgd {command}"
    for action in parser._actions:
        assert action.help, action.option_strings
        printed = parser._get_formatter()._expand_help(action)
        has_none = action.default in (None, argparse.SUPPRESS) or action.default is False
        if action.option_strings and not has_none:
            assert f"(default: {action.default})" in printed or "by default" in printed, printed


def run_as_console_script(code: str, cwd: Path) -> None:
    """The code in a process that takes itself for `lightning-dsgd`."""
    code = f"import sys; sys.argv[0] = '/somewhere/bin/lightning-dsgd'\n{code}"
    done = ended([sys.executable, "-c", code], cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["paper/popsgd_gisette", "own"])
def test_a_recipe_is_copied_and_no_file_of_the_users_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(["recipes", name])
    copy = Path(capsys.readouterr().out.split()[-1])
    assert copy.read_text() == ROOT.joinpath(copy).read_text()
    copy.write_text("mine")
    with pytest.raises(SystemExit):
        main(["recipes", name])
    assert f"{copy} is another file" in capsys.readouterr().err
    assert copy.read_text() == "mine"


HELP = (
    *("", "strategies", "doctor", "recipes", "simulate"),
    *("bench", "bench throughput", "bench convergence"),
)


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
def test_names_take_options(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


REFUSED = {
    "group_size=7 with world_size=2": ["--trainer.strategy.group_size", "7"],
    "sync_period must be None or a whole number": ["--trainer.strategy.sync_period", "0"],
    'Did you mean "wagma"': ["--trainer.strategy", "wagam"],
}
"""What a strategy refuses when ranks meet, and when it is made, where jsonargparse holds it; and
what Lightning does not know."""
WAGMA = [*RECIPE_FIT, "--trainer.devices", "2", "--trainer.strategy", "wagma"]


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


@pytest.mark.exhaustive
def test_a_refusal_of_all_ranks_ends_with_a_line(tmp_path: Path) -> None:
    wrong, *_ = REFUSED.values()
    command = [Path(sys.executable).with_name("lightning-dsgd"), *WAGMA, *wrong]
    done = ended(command, tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: group_size must be")


def test_a_list_may_be_cut_off(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lightning_dsgd recipes | {sys.executable} -c 'pass'"
    done = ended(["bash", "-c", f"set -o pipefail; {command}"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


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
