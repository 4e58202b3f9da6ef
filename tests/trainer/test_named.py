"""Strategies are made from algorithms; a new one is a file and a row, here or in a package."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dsgd.pytorch_lightning as twins
from lightning_dsgd.algorithms import ALGORITHMS, BY_UNITS
from lightning_dsgd.trainer.named import STRATEGIES, class_of
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

BAD = ALGORITHM.replace("patience: int", "timeout_s: int")  # an option of every strategy

LOOK = """
import lightning, pytorch_lightning, lightning_dsgd, sys
from lightning_dsgd.lab import catalogue
from lightning_dsgd.cli import main
for package in (lightning, pytorch_lightning):
    made = package.Trainer(strategy="theirs", devices=1, accelerator="cpu", logger=False)
    assert made.strategy.algorithm.patience == 3
assert lightning_dsgd.TheirsStrategy(patience=5).algorithm.patience == 5
assert "`theirs`" in catalogue.markdown("page.md")
main(["strategies", "theirs"])
from tests.algorithms.table import TABLE
assert "theirs" in TABLE
tasks = "lightning_dsgd.tasks.digits."
sys.argv[1:] = ["fit", "--print_config", "--trainer.strategy", "theirs"]
sys.argv += ["--trainer.strategy.patience", "7"]
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
    assert "class_path: lightning_dsgd.TheirsStrategy" in done.stdout
    assert "patience: 7" in done.stdout
    assert "their_module.Bad is left out of the strategies: ValueError: " in done.stderr
    assert "no_such_module:X is left out of the strategies: ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_strategy_takes_what_its_algorithm_does(name: str) -> None:
    algorithm = ALGORITHMS[name]
    for strategy in (STRATEGIES[name], getattr(twins, f"{algorithm.__name__}Strategy")):
        assert strategy().algorithm == algorithm()
        signature = inspect.signature(strategy).parameters
        for field in dataclasses.fields(algorithm):  # an algorithm may give None a meaning
            assert signature[field.name].default == field.default
            assert f"\n    {field.name}: " in str(strategy.__doc__)
        assert signature["timeout_s"].default == 1800.0
        assert "\n    timeout_s: how long" in str(strategy.__doc__)
        assert algorithm.profile is not None
        assert algorithm.profile.memory in " ".join(str(strategy.__doc__).split())


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_name_and_its_alias_stand_for_one_class(package: str) -> None:
    """Some libraries take a strategy for one of several ranks where its name has "ddp" in it."""
    made = importlib.import_module(package)
    known = [name for name in made.strategies.StrategyRegistry if class_of(name, package)]
    assert len(known) == 2 * len([*ALGORITHMS, *BY_UNITS])
    for name in (*BY_UNITS, *ALGORITHMS):
        kind = class_of(name, package)
        assert kind is class_of(f"ddp_{name}", package)
        assert kind is not None
        assert {"data", "timeout_s"} < {*inspect.signature(kind).parameters}
    trainer = made.Trainer(strategy="ddp_wagma", accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy.algorithm == ALGORITHMS["wagma"]()
    assert class_of("ddp", package) is class_of("ddp_find_unused_parameters_true", package) is None
    with pytest.raises(ValueError, match='Did you mean "ddp_popsgd" or "ddp'):
        made.Trainer(strategy="ddp_popsg", accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match='Did you mean "popsgd", of lightning_dsgd'):
        made.Trainer(strategy="popsg", accelerator="cpu", devices=2)


def test_editors_see_the_strategies_that_there_are() -> None:
    """A build without torch and Lightning writes what the package itself says."""
    expected = runpy.run_path(str(ROOT / "docs" / "stub.py"))["stubs"]()
    subprocess.run([sys.executable, "-S", "docs/stub.py"], cwd=ROOT, check=True)
    for path, text in expected.items():
        assert path.read_text() == text
