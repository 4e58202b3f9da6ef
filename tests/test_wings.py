"""The core without a wing: it is imported, trains and passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dsgd import wings
from lightning_dsgd.wings import COMMANDS, WINGS
from tests.test_package import WINGS as RULE

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib, pkgutil, lightning.pytorch, lightning_dsgd
for module in pkgutil.walk_packages(lightning_dsgd.__path__, "lightning_dsgd."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("lightning_dsgd"), error  # but an optional library
print(lightning_dsgd.__file__)
"""
TESTS_OF_THE_CORE = (
    "tests/trainer/test_strategy.py::test_allreduce_equals_ddp",
    "tests/transport/test_handshake.py",
)
IN_A_SIMULATED_WORLD = (
    "tests/session/test_faces.py::test_the_weights_are_the_same_to_the_bit_on_every_face",
    "tests/primitives/test_wait_avoiding.py",
    "tests/transport/test_native.py",
    "tests/simulated/test_endpoint.py",
)
"""One for all faces, and of what stands below."""


@pytest.fixture(params=WINGS)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A copy of the package and its tests that lacks a wing, and those that stand on it."""
    wing = request.param
    lost = {wing}
    while more := {name for name, below in RULE.items() if lost & {*below.split()}} - lost:
        lost |= more
    leave_out = shutil.ignore_patterns("__pycache__")
    for folder in ("lightning_dsgd", "tests", "recipes", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=leave_out)
    for file in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / file, tmp_path)
    for name in lost:
        shutil.rmtree(tmp_path / "lightning_dsgd" / name)
        shutil.rmtree(tmp_path / "tests" / name)
    return wing, tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("absent", "kind"),
    [("lightning_dsgd.lab", wings.WingMissing), ("yaml", ModuleNotFoundError)],
)
def test_what_a_wing_misses_is_not_taken_for_the_wing(
    absent: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(module: str) -> None:
        raise ModuleNotFoundError(name=absent)

    monkeypatch.setattr(wings.importlib, "import_module", lacks)
    with pytest.raises(ImportError) as info:
        wings.load("lab.doctor", "`lightning-dsgd doctor`")
    assert info.type is kind


@pytest.mark.exhaustive
def test_the_core_is_imported_and_trains(without: tuple[str, Path]) -> None:
    wing, folder = without
    imported = run(folder, "-c", IMPORT_ALL)
    assert imported.stdout.strip() == str(folder / "lightning_dsgd" / "__init__.py"), (
        imported.stderr
    )
    tests = TESTS_OF_THE_CORE + (IN_A_SIMULATED_WORLD if wing != "simulated" else ())
    tested = run(folder, "-m", "pytest", "-q", "-m", "not exhaustive", *tests)
    assert tested.returncode == 0, tested.stdout
    for command in (name for name, module in COMMANDS.items() if module.startswith(f"{wing}.")):
        missing = run(folder, "-m", "lightning_dsgd", command)
        assert missing.returncode == 1
        assert missing.stderr.startswith(f"error: `lightning-dsgd {command}` needs the folder")
