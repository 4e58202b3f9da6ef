"""Strategies are made from algorithms; a new one is a file and a row, here or in a package."""

from __future__ import annotations

import dataclasses
import inspect
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dsgd.pytorch_lightning as twins
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.trainer.named import STRATEGIES
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
import lightning, pytorch_lightning, lightning_dsgd, runpy, sys
from lightning_dsgd.lab import catalogue
from lightning_dsgd.cli import main
for name, title in (("newcomer", "Newcomer"), ("theirs", "Theirs")):
    for package in (lightning, pytorch_lightning):
        made = package.Trainer(strategy=name, devices=1, accelerator="cpu", logger=False)
        assert made.strategy.algorithm.patience == 3
    assert getattr(lightning_dsgd, title + "Strategy")(patience=5).algorithm.patience == 5
    assert f"`{name}`" in catalogue.markdown("pages/")
    main(["strategies", name])
from tests.algorithms.test_algorithms import TABLE
assert {"newcomer", "theirs"} <= TABLE.keys()
hooks = runpy.run_path("docs/hooks.py")
pages = {name: page for entry in hooks["strategies"]() for name, page in entry.items()}
assert pages["newcomer"] == "algorithms/newcomer.md"
assert "how patient it is" in hooks["page_of"](lightning_dsgd.NewcomerStrategy().algorithm)
tasks = "lightning_dsgd.tasks.digits."
sys.argv[1:] = ["fit", "--print_config", "--trainer.strategy", "newcomer"]
sys.argv += ["--trainer.strategy.patience", "7"]
sys.argv += ["--model", tasks + "DigitsClassifier", "--data", tasks + "DigitsData"]
main()
"""


def install(folder: Path, package: str, entry_points: str) -> None:
    """What pip leaves of a package that has algorithms, beside its modules."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[lightning_dsgd.algorithms]\n{entry_points}")


@pytest.mark.exhaustive
def test_a_new_algorithm_is_a_file_and_a_row_or_an_entry_point(tmp_path: Path) -> None:
    copy, theirs = tmp_path / "copy", tmp_path / "theirs"
    for folder in ("lightning_dsgd", "tests", "docs"):
        others = shutil.ignore_patterns("__pycache__")  # other tests write there meanwhile
        shutil.copytree(ROOT / folder, copy / folder, ignore=others)
    home = copy / "lightning_dsgd" / "algorithms"
    (home / "newcomer.py").write_text(ALGORITHM.format(Name="Newcomer", name="newcomer"))
    registry = (home / "__init__.py").read_text()
    registry = registry.replace("AllReduce, NoSync,", "AllReduce, NoSync, Newcomer,")
    row = "from lightning_dsgd.algorithms.newcomer import Newcomer\n"
    (home / "__init__.py").write_text(registry.replace("\n_GROUP", f"\n{row}\n_GROUP"))

    good, bad = ALGORITHM.format(Name="Theirs", name="theirs"), BAD.format(Name="Bad", name="bad")
    entries = "theirs = their_module:Theirs\nbad = their_module:Bad\nx = no_such_module:X\n"
    install(theirs, "their_package", entries)
    (theirs / "their_module.py").write_text(good + bad)

    path = os.pathsep.join([str(copy), str(theirs)])
    done = ended([sys.executable, "-c", LOOK], copy, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "patience: how patient it is" in done.stdout
    assert "class_path: lightning_dsgd.NewcomerStrategy" in done.stdout
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


def test_editors_see_the_strategies_that_there_are() -> None:
    """A build without torch and Lightning writes what the package itself says."""
    expected = runpy.run_path(str(ROOT / "docs" / "stub.py"))["stubs"]()
    subprocess.run([sys.executable, "-S", "docs/stub.py"], cwd=ROOT, check=True)
    for path, text in expected.items():
        assert path.read_text() == text


SCRIPT = """
import lightning as L
import lightning_dsgd as dsgd
from torch import nn, optim

strategy = dsgd.WAGMAStrategy(group_size=4, timeout_s=60.0)
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4)
dsgd.DecentralizedStrategy(dsgd.WAGMA(), max_ranks=4, start_method="popen")
L.Fabric(strategy=dsgd.FabricStrategy("wagma", check_finite=True), devices=4)
model = nn.Linear(1, 1)
dsgd.decentralized(model, optim.SGD(model.parameters()), dsgd.WAGMA(), min_ranks=2)
dsgd.ShardedStrategy(dsgd.LocalSGD(), num_replicas=2, evaluate="local")
"""
MISTAKES = {
    "group_size=4": 'group_size="4"',
    "max_ranks=4": 'max_ranks="4"',
    "check_finite": "check_finit",
    "min_ranks=2": 'min_ranks="2"',
    'evaluate="local"': "evaluate=False",
}


@pytest.mark.exhaustive
def test_a_users_script_is_checked_by_mypy(tmp_path: Path) -> None:
    scripts = {"right.py": SCRIPT, "wrong.py": SCRIPT}
    for right, wrong in MISTAKES.items():
        scripts["wrong.py"] = scripts["wrong.py"].replace(right, wrong)
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *scripts]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path)
    *errors, _ = done.stdout.splitlines()
    found = [line.split(": error: ")[0] for line in errors if ": error: " in line]
    assert found == [f"wrong.py:{line}" for line in (6, 8, 9, 11, 12)], done.stdout + done.stderr
