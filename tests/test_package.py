"""What is installed: metadata, what a bare import brings in, and which module may import which."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

import lightning_dsgd
from lightning_dsgd.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dsgd"

# Module: what it may import besides the standard library.  A name covers what is below it.
# A package's own line is for its __init__; its modules go by lines of their own, or by `.*`.
MAY_IMPORT = {
    "arrival": set(),
    "hyperparameters": set(),
    "agreement": {"torch", "transport"},
    "devices": {"torch", "transport.buffers"},
    "algorithm": {"torch", "agreement", "hyperparameters", "transport"},
    "algorithms": {"algorithm", "algorithms", "hyperparameters"},
    "algorithms.*": {
        "torch",
        "agreement",
        "algorithm",
        "devices",
        "hyperparameters",
        "primitives",
        "transport",
    },
    "primitives": set(),
    "primitives.*": {
        "torch",
        "numpy",
        "triton",
        "agreement",
        "algorithm",
        "devices",
        "hyperparameters",
        "primitives",
        "transport",
    },
    "primitives.nodes": {
        "torch",
        "algorithm",
        "hyperparameters",
        "transport",
        "transport.endpoint",
        "transport.view",
    },
    "replica": set(),
    "replica.*": {"torch", "agreement", "algorithm", "replica", "transport", "transport.watch"},
    "replica.sharded": {"torch", "torch.distributed", "replica"},
    "replica.replica": {
        *("torch", "agreement", "algorithm", "primitives.step_scaling", "replica"),
        *("transport", "transport.watch"),
    },
    "replica.part": {"torch", "algorithm", "devices", "primitives.step_scaling", "replica"},
    "replica.kept": {"torch", "agreement", "devices", "transport"},
    "replica.calls": {
        *("torch", "agreement", "transport", "transport.endpoint", "transport.membership"),
        "transport.view",
    },
    "transport": {"transport.contract"},
    "transport.watch": set(),
    "transport.contract": {"torch", "transport.watch"},
    "transport.messages": {"torch", "transport.contract"},
    "transport.works": {"torch", "transport.contract"},
    "transport.collectives": {"torch", "transport.contract", "transport.messages"},
    "transport.endpoint": {
        "torch",
        "transport.collectives",
        "transport.contract",
        "transport.messages",
    },
    "transport.membership": set(),
    "transport.survival": {
        "transport.connections",
        "transport.contract",
        "transport.mailboxes",
        "transport.membership",
        "transport.view",
    },
    "transport.tickets": {"torch", "transport.contract"},
    "transport.view": {
        *("torch", "transport.collectives", "transport.contract", "transport.endpoint")
    },
    "transport.simulated": {"transport.simulated"},
    "transport.simulated.views": {
        "transport.contract",
        "transport.membership",
        "transport.simulated",
    },
    "transport.simulated.*": {
        "torch",
        "transport.contract",
        "transport.endpoint",
        "transport.messages",
        "transport.simulated",
        "transport.works",
    },
    "transport.buffers": {"torch"},
    "transport.frames": {"torch", "transport.messages"},
    "transport.mailboxes": {"torch", "transport.contract", "devices"},
    # Life and death: connections, and the mesh on them.
    "transport.handshake": set(),
    "transport.connection": {
        "torch",
        "transport.buffers",
        "transport.contract",
        "transport.frames",
        "transport.mailboxes",
        "transport.works",
        "devices",
    },
    "transport.connections": {
        "transport.connection",
        "transport.contract",
        "transport.handshake",
    },
    "transport.mesh": {
        "torch",
        "transport.connection",
        "transport.connections",
        "transport.contract",
        "transport.frames",
        "transport.mailboxes",
        "transport.survival",
        "devices",
    },
    # What carries messages, under one mesh.
    "transport.wire": {"torch", "transport.contract", "transport.mesh"},
    "transport.tcp": {
        "torch",
        "transport.connections",
        "transport.contract",
        "transport.mesh",
        "devices",
        "transport.frames",
        "transport.staging",
    },
    "transport.lanes": {
        "transport.contract",
        "transport.endpoint",
        "transport.mailboxes",
        "transport.mesh",
        "devices",
    },
    "transport.processes": {
        "torch",
        "torch.distributed",
        "transport.contract",
        "transport.endpoint",
        "transport.frames",
        "transport.lanes",
        "transport.mailboxes",
        "transport.mesh",
        "transport.messages",
        "transport.wire",
        "transport.works",
        "devices",
        "transport.staging",
    },
    "transport.process_group": {
        "torch",
        "torch.distributed",
        "transport.collectives",
        "transport.contract",
        "transport.native",
        "transport.processes",
        "transport.tcp",
        "devices",
    },
    "transport.native": {
        "torch",
        "torch.distributed",
        "transport.collectives",
        "transport.contract",
        "transport.frames",
        "transport.mailboxes",
        "transport.processes",
        "transport.tickets",
        "devices",
    },
    "transport.mpi_job": {"mpi4py", "transport.contract"},
    "transport.mpi": {
        "torch",
        "transport.buffers",
        "transport.contract",
        "transport.frames",
        "transport.mailboxes",
        "transport.mesh",
        "transport.mpi_job",
        "transport.processes",
        "transport.works",
        "devices",
        "transport.staging",
    },
    "transport.staging": {
        "torch",
        "devices",
        "transport.buffers",
        "transport.contract",
        "transport.mesh",
        "transport.works",
    },
    "transport.rendezvous": {"torch.distributed", "transport.contract", "transport.register"},
    "transport.newcomer": {
        "transport.contract",
        "transport.endpoint",
        "transport.processes",
        "transport.tcp",
    },
    "transport.register": {"torch.distributed", "transport.contract"},
    # What all faces share.
    "session": set(),
    "session.*": {"torch", "numpy", "agreement", "algorithm", "replica", "session", "transport"},
    "session.surviving": {
        *("torch", "agreement", "replica", "session", "transport", "transport.endpoint"),
        "transport.view",
    },
    "session.changes": {
        *("agreement", "session", "transport", "transport.register", "transport.view")
    },
    "session.sharding": {
        "torch",
        "torch.distributed",
        "agreement",
        "algorithm",
        "replica",
        "transport",
        "transport.endpoint",
        "transport.view",
    },
    "session.sharded": {
        "torch",
        "torch.distributed",
        "agreement",
        "replica",
        "session",
        "transport",
    },
    "session.record": {"torch", "numpy", "algorithm", "devices", "replica"},
    "session.meeting": {
        "torch",
        "torch.distributed",
        "devices",
        "session",
        "transport",
        "transport.mpi",
        "transport.mpi_job",
        "transport.process_group",
        "transport.newcomer",
        "transport.register",
        "transport.rendezvous",
    },
    # The faces: for a plain loop here, for Lightning in ABOVE.
    "plain": set(),
    "plain.*": {"torch", "agreement", "algorithm", "plain", "replica", "session", "transport"},
    "plain.launch": {"torch.distributed", "transport.mpi_job"},
    "launch": set(),
    "launch.command": {"launch.supervisor", "transport"},
    "launch.supervisor": {"launch.rank", "transport", "transport.register"},
    "launch.rank": set(),
    "plain.training": {
        *("torch", "agreement", "algorithm", "devices", "plain", "replica", "session", "transport")
    },
    "results": {""},
    "stragglers": set(),
    "catalogue": {"algorithm", "algorithms", "hyperparameters"},
    "doctor": {"bench.network"},
    "timeline": set(),
    "timeline.recorder": set(),
    "timeline.clocks": {"torch", "agreement", "transport"},
    "timeline.trace": {"timeline.recorder"},
    "timeline.spans": {"timeline.recorder", "timeline.trace"},
    "timeline.picture": {"timeline.spans", "timeline.trace"},
    "timeline.page": {"timeline.picture", "timeline.spans"},
    "timeline.perfetto": {"timeline.picture", "timeline.spans"},
    "timeline.command": {"timeline.page", "timeline.perfetto", "timeline.picture"},
    # `ranks` knows Lightning, which knows every launcher; `command` loads it late.
    "advise": set(),
    "advise.bar": {"tqdm"},
    "advise.candidates": {"algorithms", "hyperparameters", "primitives"},
    "advise.accuracy": {"simulate.recorded"},
    "advise.ranking": {
        "advise.accuracy",
        "advise.candidates",
        "simulate.machines",
        "simulate.model",
        "simulate.recorded",
    },
    "advise.words": {
        "advise.accuracy",
        "advise.candidates",
        "advise.ranking",
        "algorithms",
        "hyperparameters",
    },
    "advise.verify": {
        "advise.candidates",
        "advise.ranking",
        "bench.cells",
        "bench.job",
        "bench.network",
        "simulate.machines",
        "simulate.model",
    },
    "advise.verify_cell": {
        "lightning",
        "torch",
        "bench.cells",
        "bench.contestants",
        "bench.rank",
        "bench.throughput_cell",
    },
    "advise.command": {
        "advise.bar",
        "advise.candidates",
        "advise.ranking",
        "advise.verify",
        "advise.words",
        "probe.cluster",
        "results",
        "simulate.machines",
        "simulate.recorded",
    },
    "probe": set(),
    "probe.cluster": set(),
    "probe.bar": {"tqdm"},
    "probe.measure": {
        "torch",
        "agreement",
        "algorithms",
        "primitives",
        "probe.cluster",
        "timeline.clocks",
        "transport",
        "transport.simulated",
        "devices",
    },
    "probe.ranks": {"lightning", "torch.distributed", "probe.bar", "probe.measure", "trainer"},
    "probe.command": {
        "bench.job",
        "bench.network",
        "bench.rank",
        "probe.bar",
        "probe.cluster",
        "probe.measure",
        "probe.ranks",
        "results",
    },
    "simulate": set(),
    "simulate.recorded": {"timeline.trace"},
    "simulate.machines": {"probe.cluster", "simulate.recorded", "stragglers"},
    "simulate.model": {
        "torch",
        "algorithm",
        "algorithms",
        "hyperparameters",
        "primitives",
        "simulate.machines",
        "timeline.recorder",
        "transport.simulated",
        "transport.watch",
    },
    "simulate.comparison": {"tqdm", "algorithms", "simulate.machines", "simulate.model"},
    "simulate.check": {"algorithms", "hyperparameters", "simulate.machines", "simulate.model"},
    "simulate.command": {
        "matplotlib",
        "probe.cluster",
        "results",
        "simulate.check",
        "simulate.comparison",
        "simulate.machines",
        "simulate.recorded",
    },
    # Nothing of Lightning, so that `--help` and `doctor` are there at once.  `bench.contestants`
    # and the two that run on the ranks know Lightning; `options` loads `contestants` when it runs.
    "bench": set(),
    "bench.network": set(),
    "bench.rank": set(),
    "bench.cells": {"tqdm", "results"},
    "bench.job": {"bench.cells", "bench.network", "results"},
    "bench.options": {"bench.contestants", "bench.job", "bench.network"},
    "bench.workloads": set(),
    "bench.throughput": {
        *("bench.cells", "bench.network", "bench.options", "devices", "results"),
        "simulate.machines",
    },
    "bench.convergence": {
        "bench.cells",
        "bench.job",
        "bench.options",
        "bench.tracking",
        "bench.workloads",
        "results",
    },
    "bench.situations": {"stragglers"},
    # `target` loads those that know torch and Lightning when it measures.
    "bench.target": {
        "algorithms",
        "bench.cells",
        "bench.situations",
        "bench.small_tasks",
        "bench.job",
        "bench.network",
        "bench.target_cell",
        "bench.target_rank",
        "results",
    },
    "bench.target_cell": {
        "torch",
        "algorithms",
        "bench.cells",
        "bench.situations",
        "bench.small_tasks",
        "primitives.step_scaling",
        "transport.simulated",
    },
    "bench.target_rank": {
        "torch",
        "torch.distributed",
        "agreement",
        "bench.cells",
        "bench.network",
        "bench.situations",
        "bench.small_tasks",
        "bench.target_cell",
        "transport.process_group",
    },
    "bench.small_tasks": {"torch", "sklearn", "tasks"},
    "bench.plots": {"matplotlib"},
    "bench.report": {"bench.convergence", "bench.plots", "bench.target", "bench.throughput"},
    "bench.tracking": {"wandb", "bench.plots", "hyperparameters"},
    "bench.peer": {"lightning", "trainer", "trainer.seams"},
    "bench.torchft_peers": {
        *("torch", "torch.distributed", "torchft", "bench.peer", "transport.connections")
    },
    "bench.decent_dp_peer": {"torch", "decent_dp", "loguru", "bench.peer"},
    "bench.hivemind_peer": {
        *("torch.distributed", "hivemind", "bench.peer", "transport.connections")
    },
    "bench.contestants": {
        "lightning",
        "torch",
        "torch.distributed",
        "algorithm",
        "bench.decent_dp_peer",
        "bench.hivemind_peer",
        "bench.torchft_peers",
        "hyperparameters",
        "trainer",
    },
    "bench.throughput_cell": {
        "lightning",
        "torch",
        "torch.distributed",
        "bench.cells",
        "bench.contestants",
        "bench.throughput",
        "devices",
        "trainer",
        "transport.process_group",
    },
    "bench.convergence_cell": {
        "lightning",
        "torch",
        "bench.cells",
        "bench.contestants",
        "bench.rank",
        "bench.workloads",
        "trainer",
    },
}
# These stand above the contracts, may know Lightning, and are known to nothing in the table above.
ABOVE = {
    "", "trainer", "fabric", "pytorch_lightning", "cli", "__main__", "tasks",
}  # fmt: skip
# "transport" is what the contract exports, "torch" all of torch but its communication.
EXACT = {"transport"}
APART = {"torch.distributed"}


def modules() -> list[str]:
    """Every module's name, relative to the package."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def tree_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports(module: str, known: set[str]) -> set[str]:
    """The modules that it names in import statements, those under `if TYPE_CHECKING` included.

    Ours come relative to the package and with a dot in front.
    """
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                ours = whole.removeprefix("lightning_dsgd.")
                is_module = ours in known if ours != whole else whole in APART
                found.add(whole if is_module else node.module)
    return {
        re.sub(r"^lightning_dsgd(\.|$)", ".", name)
        for name in found
        if name.partition(".")[0] not in sys.stdlib_module_names
    }


def allows(rule: str, name: str) -> bool:
    """Whether a rule of the table covers an imported name."""
    ours = name.startswith(".")
    name = name.removeprefix(".")
    if not ours and any(name == apart or name.startswith(apart + ".") for apart in APART):
        return rule in APART
    return rule == name or (rule not in EXACT and name.startswith(rule + "."))


def rules_for(module: str) -> set[str] | None:
    """What a module may import; None where the table says nothing about it."""
    if module.partition(".")[0] in ABOVE:
        return None
    for key in (module, module.rpartition(".")[0] + ".*"):
        if key in MAY_IMPORT:
            return MAY_IMPORT[key]
    raise AssertionError(f"{module} is new: give it a line in MAY_IMPORT, or in ABOVE")


def offences(module: str, known: set[str]) -> list[str]:
    rules = rules_for(module)
    if rules is None:
        return []
    return [
        f"{module or 'the package'} imports {name}"
        for name in sorted(imports(module, known))
        if not any(allows(rule, name) for rule in rules)
    ]


@pytest.mark.parametrize("module", modules())
def test_imports_point_one_way(module: str) -> None:
    assert offences(module, set(modules())) == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("hyperparameters", "import torch"),
        ("replica.flat", "from torch import distributed"),
        ("replica.flat", "import lightning"),
        ("session.session", "import lightning"),
        ("session.session", "from lightning_dsgd.trainer import seams"),
        ("algorithm", "from lightning_dsgd.trainer.strategy import DecentralizedStrategy"),
        ("algorithms.dpsgd", "import torch.distributed as dist"),
        ("algorithms.dpsgd", "from lightning_dsgd.transport.simulated import World"),
        ("algorithms.dpsgd", "from lightning_dsgd.transport import simulated"),
        ("algorithms.dpsgd", "from lightning_dsgd.algorithms.local_sgd import LocalSGD"),
        ("transport.simulated.links", "from torch.distributed import TCPStore"),
        ("transport.endpoint", "import lightning_dsgd.transport.process_group"),
        ("algorithm", "import lightning_dsgd"),
        ("simulate.machines", "from lightning_dsgd.trainer.callbacks import StragglerInjector"),
        ("simulate.model", "from lightning_dsgd.bench.contestants import parse"),
        ("bench.report", "import lightning as L"),
    ],
)
def test_an_import_against_the_way_is_noticed(
    module: str, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "tree_of", lambda _: ast.parse(statement))
    known = {*modules(), "transport.simulated", "transport.process_group"}
    assert len(offences(module, known)) == 1


def circle(start: str, graph: dict[str, set[str]]) -> list[str]:
    """A way through imports from a module back to it; empty if there is none."""
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for name in sorted(graph[way[-1]] - seen):
            if name == start:
                return [*way, start]
            seen.add(name)
            ways.append([*way, name])
    return []


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count."""
    known = set(modules())
    graph = {
        module: {name[1:] for name in imports(module, known) if name[1:] in known - {""}}
        for module in known
    }
    assert [way for name in sorted(graph) if (way := circle(name, graph))] == []
    assert circle("a", {"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def said_by(code: str) -> str:
    """What a fresh interpreter prints; it must not warn."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_import_loads_neither_torch_nor_lightning() -> None:
    heavy = ("torch", "lightning", "pytorch_lightning", "mpi4py", "numpy")
    code = f"import sys, lightning_dsgd; print([n for n in {heavy} if n in sys.modules])"
    assert said_by(code) == "[]\n"


def test_the_core_loads_no_lightning() -> None:
    core = "algorithms, catalogue, session.session, session.meeting, transport.simulated"
    modules = ", ".join(f"lightning_dsgd.{name.strip()}" for name in core.split(","))
    code = f"import sys, {modules}; print('lightning' in sys.modules)"
    assert said_by(code) == "False\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_dsgd, lightning as L",
        *(
            pytest.param(imports, marks=pytest.mark.exhaustive)
            for imports in (
                "import lightning as L, lightning_dsgd",
                "import lightning_dsgd, pytorch_lightning as L",
                "import lightning_dsgd.trainer.named, lightning as L",
                "from lightning_dsgd import DecentralizedStrategy; import lightning as L",
                "import pytorch_lightning as L, lightning_dsgd",
            )
        ),
    ],
)
def test_the_names_are_registered_whichever_comes_first(imports: str) -> None:
    code = f"""
import logging, warnings
logging.disable()
warnings.simplefilter("ignore")
{imports}
trainer = L.Trainer(strategy="wagma", accelerator="cpu", devices=2, logger=False)
print(type(trainer.strategy).__name__, type(trainer.strategy).__module__)
"""
    where = "pytorch_lightning" if "pytorch_lightning" in imports else "trainer.named"
    assert said_by(code).split() == ["WAGMAStrategy", f"lightning_dsgd.{where}"]


def test_all_names_can_be_had() -> None:
    names: dict[str, Any] = {}
    exec("from lightning_dsgd import *", names)
    assert set(lightning_dsgd.__all__) <= set(names)
    assert names["WAGMAStrategy"].__name__ == "WAGMAStrategy"
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        _ = lightning_dsgd.NoSuchName


def test_every_algorithm_can_be_had() -> None:
    for algorithm in ALGORITHMS.values():
        assert getattr(lightning_dsgd, algorithm.__name__) is algorithm


@pytest.mark.exhaustive
def test_registering_initialises_no_mpi_and_brings_no_extra_in() -> None:
    """Beyond what Lightning brings in: its torchmetrics imports matplotlib where it finds it."""
    code = """
import sys
import lightning.pytorch
before = set(sys.modules)
import lightning_dsgd
for name in ("mpi4py", "sklearn", "matplotlib", "wandb", "jsonargparse", "pytorch_lightning"):
    if name in set(sys.modules) - before:
        print(name)
"""
    assert said_by(code) == ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that pip would install: an editable install does not show what is missing in it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        timeout=250,
    )
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def text_of(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_wheel_carries_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "lightning_dsgd/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightning_dsgd"}
    on_disk = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == on_disk
    assert "Apache License" in text_of(wheel, "licenses/LICENSE")


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = HeaderParser().parsestr(text_of(wheel, "METADATA"))
    assert metadata["Name"] == "lightning-dsgd"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", metadata["Version"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("bench", "control", "demo", "dev", "docs", "examples", "images", "mpi")
    }
    requirements = metadata.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=\[; ]", r)[0] for r in requirements if "extra ==" not in r}
    assert always == {"lightning", "torch", "torchmetrics", "numpy", "wandb", "jsonargparse"}
    mpi = {re.split(r"[<>=\[; ]", r)[0] for r in requirements if "extra == 'mpi'" in r}
    assert mpi == {"mpi4py", "mpich"}, "mpi4py must not come without an MPI library"


def test_only_pythons_that_the_tests_ran_on_are_claimed(wheel: zipfile.ZipFile) -> None:
    """docs/getting_started.md says on which."""
    metadata = HeaderParser().parsestr(text_of(wheel, "METADATA"))
    classifiers = "\n".join(metadata.get_all("Classifier", []))
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", classifiers)
    page = (ROOT / "docs" / "getting_started.md").read_text()
    assert claimed
    for version in claimed:
        row = rf"^\| {re.escape(version)}\.\d+ \|.*\| (all tests|`make test`) \|$"
        assert re.search(row, page, re.MULTILINE), version


def test_only_versions_that_the_smoke_ran_with_are_admitted() -> None:
    """From the oldest minor release to the newest; docs/getting_started.md tells what ran."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "getting_started.md").read_text()
    combinations = runpy.run_path(str(ROOT / "tests" / "versions.py"))["COMBINATIONS"]
    for package, versions in zip(
        ("torch", "lightning"), zip(*combinations, strict=True), strict=True
    ):
        minors = sorted(tuple(map(int, version.split(".")[:2])) for version in versions)
        (first, since), (last, until) = minors[0], minors[-1]
        assert f"{package}>={first}.{since},<{last}.{until + 1}" in project["dependencies"]
    for torch, lightning in combinations:
        assert f"| {torch} | {lightning} | " in page


def test_wheel_has_the_console_script(wheel: zipfile.ZipFile) -> None:
    assert "lightning-dsgd = lightning_dsgd.cli:main" in text_of(wheel, "entry_points.txt")


def test_changelog_has_a_place_for_what_is_unreleased() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [line for line in lines if line.startswith("## ")]
    assert releases[0] == "## [Unreleased]"


def test_a_released_version_is_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version: str = project["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "dev" in version or f"## [{version}]" in changelog


# ---- what `make` installs ----


def would_run(target: str, venv: Path) -> str:
    """What `make` would do for a target."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed: apt-get install make")
    command = ["make", "--dry-run", target, f"VENV={venv}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_installs_what_a_target_needs_and_once(tmp_path: Path) -> None:
    demo, everything = "install -e '.[demo]'", "install -e '.[dev,demo,docs,mpi]'"
    tmp_path.joinpath("bin").mkdir()
    tmp_path.joinpath("bin", "python").touch()
    assert demo in would_run("demo", tmp_path)
    tmp_path.joinpath(".installed-demo").touch()
    assert "-m pip" not in would_run("demo", tmp_path)
    for_test = would_run("test", tmp_path)
    assert everything in for_test
    # Whoever has all needs nothing for the demo.
    assert f"touch {tmp_path}/.installed {tmp_path}/.installed-demo" in for_test
    tmp_path.joinpath(".installed").touch()
    assert "-m pip" not in would_run("test", tmp_path)
