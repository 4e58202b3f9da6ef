"""The names that Trainers take; a new algorithm is a file and a row, here or in a package."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_dsgd as dsgd
import lightning_dsgd.pytorch_lightning as twins
from lightning_dsgd.algorithms import ALGORITHMS, ALL_ALGORITHMS, BY_UNITS
from tests.support.mpi import ended

ROOT = Path(__file__).parents[2]

ALGORITHM = '''
"""What a page would say."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.hyperparameters import at_least


@dataclass
class {Name}(LocalSGD):
    """Averages as often as it is told."""

    name: ClassVar[str] = "{name}"
    profile: ClassVar[Profile] = Profile("seldom", "all ranks", "little", "none", "a test")

    patience: int = at_least(1, default=3, doc="how patient it is")
'''

BAD = ALGORITHM.replace('"{name}"', '"wagma"')  # the name of another one

LOOK = """
import lightning, pytorch_lightning, lightning_dsgd, sys
from lightning_dsgd.lab import catalogue
from lightning_dsgd.cli import main
for package in (lightning, pytorch_lightning):
    made = package.Trainer(strategy="theirs", devices=1, accelerator="cpu", logger=False)
    assert made.strategy.algorithm.patience == 3
assert lightning_dsgd.DecentralizedStrategy("theirs:patience=5").algorithm.patience == 5
assert "`theirs`" in catalogue.markdown("page.md")
main(["strategies", "theirs"])
from tests.algorithms.table import TABLE
assert "theirs" in TABLE
tasks = "lightning_dsgd.tasks.digits."
sys.argv[1:] = ["fit", "--print_config", "--trainer.strategy", "DecentralizedStrategy"]
sys.argv += ["--trainer.strategy.algorithm", "Theirs"]
sys.argv += ["--trainer.strategy.algorithm.patience", "7"]
sys.argv += ["--model", tasks + "DigitsClassifier", "--data", tasks + "DigitsData"]
main()
"""


@pytest.mark.exhaustive
def test_a_new_algorithm_is_an_entry_point(tmp_path: Path) -> None:
    """What pip leaves of a package that has algorithms, beside its modules."""
    info = tmp_path / "their_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_package\nVersion: 1\n")
    entries = "theirs = their_module:Theirs\nbad = their_module:Bad\nx = no_such_module:X\n"
    (info / "entry_points.txt").write_text(f"[lightning_dsgd.algorithms]\n{entries}")
    good, bad = ALGORITHM.format(Name="Theirs", name="theirs"), BAD.format(Name="Bad", name="bad")
    (tmp_path / "their_module.py").write_text(good + bad)

    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = ended([sys.executable, "-c", LOOK], ROOT, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "patience: how patient it is" in done.stdout
    assert "class_path: their_module.Theirs" in done.stdout
    assert "patience: 7" in done.stdout
    assert "their_module:Bad is left out of the strategies: ValueError: there is" in done.stderr
    assert "no_such_module:X is left out of the strategies: ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_name_and_its_alias_stand_for_one_strategy(package: str) -> None:
    """Some libraries take a strategy for one of several ranks where its name has "ddp" in it."""
    made = importlib.import_module(package)
    home = dsgd if package == "lightning.pytorch" else twins
    for name, kind in ALL_ALGORITHMS.items():
        strategy = home.BalancedStrategy if name in BY_UNITS else home.DecentralizedStrategy
        for each in (name, f"ddp_{name}"):
            chosen = made.strategies.StrategyRegistry.get(each)
            assert type(chosen) is strategy
            assert chosen.algorithm == kind()
    trainer = made.Trainer(strategy="ddp_wagma", accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy.algorithm == ALGORITHMS["wagma"]()
    with pytest.raises(ValueError, match='Did you mean "ddp_popsgd" or "ddp'):
        made.Trainer(strategy="ddp_popsg", accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match='Did you mean "popsgd", of lightning_dsgd'):
        made.Trainer(strategy="popsg", accelerator="cpu", devices=2)


def test_a_strategy_takes_a_name_with_options() -> None:
    algorithm = dsgd.DecentralizedStrategy("wagma:group_size=4").algorithm
    assert algorithm == dsgd.WAGMA(group_size=4)
    with pytest.raises(ValueError, match="got 'wagam'; did you mean wagma"):
        dsgd.DecentralizedStrategy("wagam")
    with pytest.raises(ValueError, match=r"has no option overlapp.*; did you mean overlap"):
        dsgd.DecentralizedStrategy("wagma", overlapp=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("wagma:overlap=true", r"Write .*\.DecentralizedStrategy\(.*\.WAGMA\(overlap=True\)\)"),
        ("balanced:backups=false", r"Write .*\.BalancedStrategy\(.*\.Balanced\(backups=False\)\)"),
        ("ddp_wagma:overlap=true", r"Write .*WAGMA\(overlap=True\)\)"),
        ("popsgd:data=claimed", r'Write .*Strategy\(.*\.PopSGD\(\), data="claimed"\)\.'),
        ("balanced:data=equal:backups=false", r'Balanced\(backups=False\), data="equal"\)\.'),
        ("wagma:overlapp=true", "Names take no options.* overlapp.*did you mean overlap"),
        ("wagma:group_size=abc", "Names take no options.*group_size must be .*'abc'"),
        ("wagam:overlap=true", 'Names take no options.*Did you mean "wagma"'),
    ],
)
def test_the_trainer_takes_no_options_in_a_name_and_says_what_to_write(
    given: str, said: str
) -> None:
    with pytest.raises(ValueError, match=f"invalid strategy name.*{said}"):
        L.Trainer(strategy=given, accelerator="cpu", devices=2)


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS.values())
def test_help_lists_all_options_of_an_algorithm(algorithm: type[dsgd.Algorithm]) -> None:
    """And so does what jsonargparse shows on a command line."""
    for field in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        assert f"\n    {field.name}: " in str(inspect.getdoc(algorithm))


@pytest.mark.parametrize("strategy", ["DecentralizedStrategy", "BalancedStrategy"])
@pytest.mark.parametrize("home", [dsgd, twins])
def test_help_lists_all_options_of_a_strategy(home: Any, strategy: str) -> None:
    kind = getattr(home, strategy)
    signature = inspect.signature(kind).parameters
    assert signature["timeout_s"].default == 1800.0
    assert "\n    timeout_s: how long" in str(kind.__doc__)
