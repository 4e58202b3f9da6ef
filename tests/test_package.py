"""What is installed: metadata, what a bare import brings in, and which module may import which."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_dsgd
from lightning_dsgd import wings
from lightning_dsgd.algorithms import ALGORITHMS
from tests.support.thorough import cases

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dsgd"

# Folder, or module of the package's own: what else of ours it may import.  Further down may import
# further up, never the other way round; the core is all that is not in WINGS, and imports no wing.
CORE = {
    "arrival": "", "hyperparameters": "", "wings": "",
    "keywords": "hyperparameters",
    "buffers": "",
    "devices": "buffers",
    "transport": "buffers devices wings",
    "agreement": "transport",
    "algorithm": "agreement hyperparameters transport",
    "primitives": "agreement algorithm buffers devices hyperparameters transport",
    "algorithms": "agreement algorithm devices hyperparameters primitives transport wings",
    "replica": "agreement algorithm devices primitives transport",
    "data": "transport",
    "session": "agreement algorithm data devices hyperparameters keywords primitives replica "
    "transport wings",
    "plain": "agreement algorithm algorithms data devices keywords replica session transport wings",
    "trainer": "agreement algorithm algorithms data devices hyperparameters keywords replica "
    "session transport wings",
    "fabric": "algorithm algorithms devices keywords plain session trainer transport wings",
    "pytorch_lightning": "algorithms keywords trainer",
    "tasks": "",
    PACKAGE.name: "algorithm algorithms arrival fabric hyperparameters plain trainer transport "
    "wings sharded tasks lab elastic data",  # public names, which type checkers alone import there
    "cli": f"{PACKAGE.name} hyperparameters wings",
    "__main__": "cli",
}  # fmt: skip
WINGS = {
    "why": f"{PACKAGE.name} lab",
    "simulated": "transport",
    "mpi": "buffers devices transport",
    "lab": f"{PACKAGE.name} agreement algorithm algorithms data devices hyperparameters "
    "primitives replica simulated tasks trainer transport wings",
    "sharded": "agreement algorithm keywords replica session trainer transport",
    "elastic": "agreement algorithm algorithms data devices replica session simulated "
    "trainer transport",
}
# These run on ranks, or load late: the lab's other modules know no Lightning and are there at once.
LAB_ON_RANKS = "lab.jobs.fit lab.callbacks lab.timeline.step_trace lab.trackers"
# Whoever imports `transport` sees its contract, and so knows no wire.  These know more of it.
BEHIND_THE_CONTRACT = {
    "transport.endpoint transport.view": "primitives.nodes elastic session sharded simulated",
    "transport.counters": "simulated replica.replica lab.simulate.model",
    "transport.messages": "simulated elastic mpi",
    "transport.works": "simulated mpi",
    "transport.mailboxes transport.staging": "mpi",
    "transport.wire": "elastic mpi",
    "transport.mpi_job": "session.opening plain.launch trainer.launched mpi",
    "transport.mesh transport.processes": "elastic mpi",
    "transport.process_group": "session.opening elastic lab mpi",
    "transport.rendezvous": "session.opening elastic lab",
    "transport.host_names": "session.opening plain.launch elastic lab",
}
# What is not ours, and who alone may know it; all but ground and launchers may know torch.
LIBRARIES = {
    "torch.distributed": "elastic session plain.launch transport.native transport.native_groups "
    "transport.native_sends transport.processes transport.process_group transport.rendezvous "
    "sharded trainer tasks.language fabric lab",
    "lightning_dsgd_rank": "why.inside",  # on the path of a watched job alone
    "mpi4py": "transport.mpi_job",
    "lightning pytorch_lightning lightning_fabric lightning_utilities": "trainer fabric sharded "
    f"pytorch_lightning cli tasks elastic.handover {LAB_ON_RANKS} "
    "why.inside.lightning_dsgd_rank.callbacks",
    "torchmetrics": "trainer tasks",
    "numpy": "data.claims primitives session tasks",
    "triton": "primitives.sparse_triton replica.wide_triton",
    "wandb": "lab",
    "PIL gymnasium sklearn tokenizers": "tasks lab",
    "matplotlib tqdm": "lab",
    "torch": "agreement algorithm algorithms buffers data devices elastic fabric lab mpi plain "
    "primitives replica session sharded simulated tasks trainer transport",
}


def known_to(table: dict[str, str]) -> dict[str, set[str]]:
    """For each name of a table's keys, who may import it."""
    return {name: set(who.split()) for names, who in table.items() for name in names.split()}


@cache
def modules() -> tuple[str, ...]:
    """Every module's name, relative to the package."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return tuple(names)


@cache
def tree_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports(module: str, known: set[str]) -> set[str]:
    """The modules that it names in import statements, those under `if TYPE_CHECKING` included.

    Ours come relative to the package and with a dot in front.
    """
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and node.attr == "distributed":
            found.add("torch.distributed")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                ours = whole.removeprefix("lightning_dsgd.")
                is_module = ours in known if ours != whole else whole == "torch.distributed"
                found.add(whole if is_module else node.module)
    return {
        re.sub(r"^lightning_dsgd(\.|$)", ".", name)
        for name in found
        if name.partition(".")[0] not in sys.stdlib_module_names
    }


def is_of(module: str, folders: set[str]) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def folder_of(module: str) -> str:
    """The folder, or module of the package's own, that it belongs to."""
    return module.partition(".")[0] or PACKAGE.name


def why_not(module: str, name: str) -> str:
    """Why a module may not import a name; empty if it may."""
    home = folder_of(module)
    if not name.startswith("."):
        is_of_torch = name == "torch.distributed" or name.startswith("torch.distributed.")
        library = "torch.distributed" if is_of_torch else name.partition(".")[0]
        who = known_to(LIBRARIES).get(library, set())
        return "" if is_of(module, who) else f"only {sorted(who)} may"
    name = name[1:]
    folder = folder_of(name)
    if folder == home:
        is_of_other_paper = home == "algorithms" and home not in (module, name)
        return "one algorithm does not stand on another" if is_of_other_paper else ""
    is_of_ranks = (home, folder) != ("lab", "trainer") or module in LAB_ON_RANKS.split()
    if folder not in {**CORE, **WINGS}[home].split() or not is_of_ranks:
        return f"{module} does not stand on {folder}"
    if folder != "transport" or name in ("transport", "transport.contract"):
        return ""
    who = known_to(BEHIND_THE_CONTRACT).get(".".join(name.split(".")[:2]), set())
    return "" if is_of(module, who) else f"only {sorted(who)} may look behind the contract"


def offences(module: str, known: set[str]) -> list[str]:
    home = folder_of(module)
    assert home in {**CORE, **WINGS}, f"{home} is new: give it a line in CORE or WINGS"
    flags = {each.attr for each in ast.walk(tree_of(module)) if isinstance(each, ast.Attribute)}
    asked = sorted(flags & {"_survivors", "is_alone"}) if home != "elastic" else []
    return [f"{module} asks its session {flag}" for flag in asked] + [
        f"{module or home} imports {name}: {reason}"
        for name in sorted(imports(module, known))
        if (reason := why_not(module, name))
    ]


def test_imports_point_one_way() -> None:
    known = set(modules())
    assert [offence for module in modules() for offence in offences(module, known)] == []


WRONG = {
    "import torch": "hyperparameters",
    "from torch import distributed": "replica.flat",
    "from lightning_dsgd.trainer import seams": "session.session",
    "from lightning_dsgd.algorithms.local_sgd import LocalSGD": "algorithms.dpsgd",
    "import torch\n\ntorch.distributed.barrier()": "algorithms.dpsgd",
    "from lightning_dsgd.transport.mesh import Mesh": "replica.replica",
    "self._survivors.share(first)": "trainer.strategy",
    "from lightning_dsgd.elastic.members import Members": "session.session",
    "import lightning_dsgd": "algorithm",
    "import lightning as L": "lab.simulate.model",
    "from benchmarks.compare import target": "lab.diagnose.words",
}


def test_a_wrong_import_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for statement, module in WRONG.items():
        monkeypatch.setattr(sys.modules[__name__], "tree_of", lambda _, s=statement: ast.parse(s))
        known = {*modules(), "transport.process_group"}
        assert len(offences(module, known)) == 1, statement


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count."""
    known = set(modules())
    graph = {
        module: {name[1:] for name in imports(module, known) if name[1:] in known - {""}} - {module}
        for module in known
    }
    TopologicalSorter(graph).prepare()  # which names a circle in its error
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_the_package_names_the_wings_of_the_rule() -> None:
    assert wings.WINGS.keys() == WINGS.keys()


def test_scripts_import_modules_that_are_there() -> None:
    known = {"lightning_dsgd", *(f"lightning_dsgd.{name}" for name in modules())}
    for script in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        for node in ast.walk(ast.parse(script.read_text())):
            asked = (isinstance(node, ast.ImportFrom) and node.module) or ""
            assert not asked.startswith("lightning_dsgd") or asked in known, f"{script}: {asked}"


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


@cases(
    "imports",
    now=["import lightning as L"],
    later=[
        "import torch, lightning as L",
        "import pytorch_lightning as L",
        "import lightning_dsgd, lightning as L",
        "import lightning as L, lightning_dsgd",
        "import lightning_dsgd.trainer.named, lightning as L",
        "import pytorch_lightning as L, lightning_dsgd",
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
    where = "pytorch_lightning" if "pytorch_lightning" in imports else "trainer.strategy"
    assert said_by(code).split() == ["DecentralizedStrategy", f"lightning_dsgd.{where}"]


def test_what_waits_for_a_package_that_imports_us_is_imported_at_its_end(tmp_path: Path) -> None:
    """As with Lightning: it imports torch, which imports us.  The first try here fails."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "__init__.py").write_text("""
import sys
import lightning_dsgd.arrival
lightning_dsgd.arrival.when_imported("host", "guest")
if "sched" not in sys.modules:
    raise ImportError("not yet")
is_ready = True
import host._graveyard
""")
    (tmp_path / "host" / "_graveyard.py").touch()
    (tmp_path / "guest.py").write_text("import host; print('ready:', host.is_ready)")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import host
except ImportError:
    import sched
import host
"""
    assert said_by(code) == "ready: True\n"


def test_all_names_can_be_had() -> None:
    names: dict[str, Any] = {}
    exec("from lightning_dsgd import *", names)
    assert set(lightning_dsgd.__all__) <= set(names)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        _ = lightning_dsgd.NoSuchName
    for algorithm in ALGORITHMS.values():
        assert getattr(lightning_dsgd, algorithm.__name__) is algorithm


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the index would get: an editable install does not show what is missing in it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        timeout=250,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (file,) = dist.glob("*.whl")
    return zipfile.ZipFile(file)


def text_of(wheel: zipfile.ZipFile, name: str) -> str:
    own = re.compile(r"[^/]+\.dist-info/" + re.escape(name))  # a watched job's path has another
    (path,) = filter(own.fullmatch, wheel.namelist())
    return wheel.read(path).decode()


def on_disk(*patterns: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for each in patterns for path in ROOT.glob(each)}


def test_wheel_carries_package_recipes_examples_and_no_more(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "lightning_dsgd/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightning_dsgd"}
    carried = on_disk("recipes/**/*.yaml", "examples/*.py", "examples/*.ipynb", "examples/own/*.*")
    ours = on_disk("lightning_dsgd/**/*.py") | {f"lightning_dsgd/{name}" for name in carried}
    suffixes = (".py", ".yaml", ".yml", ".ipynb", ".sbatch")
    assert {name for name in names if name.endswith(suffixes)} == ours
    assert "Apache License" in text_of(wheel, "licenses/LICENSE")
    assert "lightning-dsgd = lightning_dsgd.cli:main" in text_of(wheel, "entry_points.txt")


def test_a_wheels_recipes_are_found(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    command = [sys.executable, "-m", "lightning_dsgd", "recipes", "sweeps/digits_wagma", "own"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=250)
    for name in {"recipes/sweeps/digits_wagma.yaml"} | on_disk("examples/own/*.*"):
        assert tmp_path.joinpath(name).read_text() == ROOT.joinpath(name).read_text()


IN_THE_SDIST = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO"),
    *("README.md", "SECURITY.md", "hatch_build.py", "mkdocs.yml", "pyproject.toml", ".gitignore"),
    *("benchmarks", "docs", "examples", "lightning_dsgd", "packaging", "recipes", "tests"),
)


def test_sdist_is_small_and_has_all_but_the_results(dist: Path) -> None:
    (file,) = dist.glob("*.tar.gz")
    assert file.stat().st_size < 3_000_000
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == {*IN_THE_SDIST}
    assert not [name for name in names if name.startswith("docs/results/")]
    patterns = (
        "benchmarks/**/*.py",
        "benchmarks/papers/*",
        "docs/*",
        "lightning_dsgd/**/*.py",
        "tests/**/*.py",
        "recipes/*",
    )
    kept = on_disk(*patterns) - {"recipes/sweeps"}
    assert {name for name in kept if ROOT.joinpath(name).is_file()} <= names


@pytest.mark.parametrize("address", ["", "https://index.example/x"])
def test_links_on_the_indexs_page_lead_somewhere(address: str) -> None:
    on_the_index = runpy.run_path(str(ROOT / "hatch_build.py"))["on_the_index"]
    whole = on_the_index((ROOT / "README.md").read_text(), address, "v1.0")
    assert re.findall(r"\]\((?!https?:|#)", whole) == []
    assert not address or f"]({address}/blob/v1.0/docs/metrics.md)" in whole


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = HeaderParser().parsestr(text_of(wheel, "METADATA"))
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = metadata.get_all("Requires-Dist", [])
    names = {r: re.split(r"[<>=!\[; ]", r)[0] for r in requirements}
    always = {name for r, name in names.items() if "extra ==" not in r}
    assert always == {"lightning", "torch", "torchmetrics", "numpy", "jsonargparse"}
    mpi = {name for r, name in names.items() if "extra == 'mpi'" in r}
    assert mpi == {"mpi4py", "mpich"}, "mpi4py must not come without an MPI library"
    # docs/getting_started.md says on which Pythons the tests ran, and no others are claimed.
    classifiers = "\n".join(metadata.get_all("Classifier", []))
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", classifiers)
    page = (ROOT / "docs" / "getting_started.md").read_text()
    for version in claimed:
        row = rf"^\| {re.escape(version)}\.\d+ \|.*\| (all tests|`make test`) \|$"
        assert re.search(row, page, re.MULTILINE), version


def test_only_versions_that_the_smoke_ran_with_are_admitted() -> None:
    """From the oldest minor release to the newest; docs/getting_started.md tells what ran."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "getting_started.md").read_text()
    script = runpy.run_path(str(ROOT / "tests" / "versions.py"))
    ran = {row["wanted"]: row for row in json.loads((ROOT / script["RESULT"]).read_text())["rows"]}
    assert {*ran} <= {*map("/".join, script["COMBINATIONS"])}
    _, *both = zip(*(name.split("/") for name in ran), strict=True)
    for package, versions in zip(("torch", "lightning"), both, strict=True):
        minors = sorted(tuple(map(int, version.split(".")[:2])) for version in versions)
        (first, since), (last, until) = minors[0], minors[-1]
        malware = ",!=2.6.2,!=2.6.3" if package == "lightning" else ""
        admitted = f"{package}>={first}.{since},<{last}.{until + 1}{malware}"
        assert admitted in project["dependencies"]
    for name, row in ran.items():
        _, torch, lightning = name.split("/")
        assert row["passed"]
        assert f"| {row['python']} | {torch} | {lightning} | `make test-versions`" in page
    for test in script["SMOKE"]:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), test


# ---- what tells of the package elsewhere ----
def yaml_of(name: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(name).read_text())


def test_what_tells_of_the_package_elsewhere_agrees_with_pyproject() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, hooks = pyproject["project"], pyproject["tool"]["hatch"]["metadata"]["hooks"]
    citation, conda = yaml_of("CITATION.cff"), yaml_of("packaging/conda/recipe.yaml")
    version, authors = project["version"], project["authors"]
    assert (version, authors) == (citation["version"], citation["authors"])
    assert version == lightning_dsgd.__version__ == conda["context"]["version"]
    assert project["license"] == citation["license"] == conda["about"]["license"]
    assert project["description"] == conda["about"]["summary"]
    of_pip = {line.replace("torch>", "pytorch>") for line in project["dependencies"]}
    of_conda = {line.replace(" ", "") for line in conda["requirements"]["run"]}
    assert {line.replace("[signatures]", "") for line in of_pip} <= of_conda
    address = hooks["custom"]["repository"]
    told = (citation.get("repository-code", ""), conda["about"].get("repository", ""))
    assert told == (address, address), "the repository's address stands in these too"


def test_the_changelog_and_the_citation_have_the_date_of_the_version() -> None:
    version = lightning_dsgd.__version__
    released = re.compile(r"^## \[(?!Unreleased)(.+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
    newest, date = released.findall((ROOT / "CHANGELOG.md").read_text())[0]
    assert newest == version or "dev" in version
    assert str(yaml_of("CITATION.cff")["date-released"]) == date


def test_the_notebook_installs_the_wheel_of_this_version(dist: Path) -> None:
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    (address,) = re.findall(r'WHEEL = "(.+)"', "\n".join("".join(c["source"]) for c in cells))
    (file,) = dist.glob("*.whl")
    assert address.rpartition("/")[2] == file.name


def test_an_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    built = tmp_path / "built"
    build_wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built]
    subprocess.run(build_wheel, cwd=source, check=True, capture_output=True, timeout=250)
    of_both = [zipfile.ZipFile(file) for file in (wheel, built / wheel.name)]
    ours, theirs = ({info.filename: info.CRC for info in of.infolist()} for of in of_both)
    assert ours == theirs
