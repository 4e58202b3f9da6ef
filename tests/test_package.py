"""What is installed: metadata, what a bare import brings in, and which module may import which."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dsgd"

# Module: what it may import besides the standard library.  A name covers what is below it.
# A package's own line is for its __init__; its modules go by lines of their own, or by `.*`.
MAY_IMPORT = {
    "algorithm": {"torch", "transport"},
    "algorithms": {"algorithms"},
    "algorithms.*": {
        "torch",
        "algorithm",
        "topology",
        "sparse",
        "error_feedback",
        "published",
        "wait_avoiding",
        "transport",
    },
    "error_feedback": {"torch", "algorithm", "sparse", "transport"},
    "wait_avoiding": {"torch", "algorithm", "topology", "transport"},
    "published": {"torch"},
    "catalogue": {"algorithm", "algorithms"},
    "doctor": {"bench.network"},
    "topology": set(),
    "sparse": {"torch", "numpy", "sparse_triton"},
    "sparse_triton": {"torch", "triton"},
    "flat": {"torch"},
    "replica": {"torch", "algorithm", "flat", "transport"},
    "stopping": {"torch", "transport"},
    "transport": {"torch"},
    "transport.endpoint": {"torch", "transport"},
    "transport.simulated": {"torch", "transport", "transport.endpoint"},
    "transport.process_group": {
        "torch",
        "torch.distributed",
        "transport",
        "transport.endpoint",
        "transport.room",
    },
    "transport.room": {"torch"},
    # MPI carries the messages; the mesh of process_group, mailboxes and news of lost ranks.
    "transport.mpi": {
        "torch",
        "mpi4py",
        "transport",
        "transport.endpoint",
        "transport.process_group",
        "transport.room",
    },
}
# These stand above the contracts, may know Lightning, and are known to nothing in the table above.
ABOVE = {"", "strategy", "checkpoint", "callbacks", "loggers", "cli", "__main__", "tasks", "bench"}
# "transport" is the Protocols alone, "torch" all of torch but its communication.
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
        ("topology", "import torch"),
        ("flat", "from torch import distributed"),
        ("flat", "import lightning"),
        ("algorithm", "from lightning_dsgd.strategy import DecentralizedStrategy"),
        ("algorithms.dpsgd", "import torch.distributed as dist"),
        ("algorithms.dpsgd", "from lightning_dsgd.transport.simulated import World"),
        ("algorithms.dpsgd", "from lightning_dsgd.transport import simulated"),
        ("algorithms.dpsgd", "from lightning_dsgd.algorithms.local_sgd import LocalSGD"),
        ("transport.simulated", "from torch.distributed import TCPStore"),
        ("transport.endpoint", "import lightning_dsgd.transport.process_group"),
        ("algorithm", "import lightning_dsgd"),
    ],
)
def test_an_import_against_the_way_is_noticed(
    module: str, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "tree_of", lambda _: ast.parse(statement))
    known = {*modules(), "transport.simulated", "transport.process_group"}
    assert len(offences(module, known)) == 1


def test_a_bare_import_initialises_no_mpi_and_brings_no_extra_in() -> None:
    """Beyond what Lightning brings in: its torchmetrics imports matplotlib where it finds it."""
    code = """
import sys
import lightning.pytorch
before = set(sys.modules)
import lightning_dsgd
for name in ("mpi4py", "sklearn", "matplotlib", "wandb", "jsonargparse"):
    if name in set(sys.modules) - before:
        print(name)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
        timeout=100,
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
        *("bench", "control", "demo", "dev", "docs", "images", "mpi")
    }
    requirements = metadata.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=\[; ]", r)[0] for r in requirements if "extra ==" not in r}
    assert always == {"lightning", "torch", "torchmetrics", "numpy", "wandb", "jsonargparse"}
    mpi = {re.split(r"[<>=\[; ]", r)[0] for r in requirements if "extra == 'mpi'" in r}
    assert mpi == {"mpi4py", "mpich"}, "mpi4py must not come without an MPI library"


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
