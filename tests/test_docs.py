"""The documents: tables and examples are the code's own, the site builds and fits a phone."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_dsgd
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import Transport
from tests.support.browser import chromium
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import ended
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "own_algorithm.md"
PHONE_PX = 390
DESKTOP_PX = 1280


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


# ---- tables ----
PAGES = (
    "index choosing evidence/choosing time_to_target evidence/wagma evidence/papers examples "
    "paper_recipes"
)


@pytest.mark.parametrize("file", ["README.md", *(f"docs/{page}.md" for page in PAGES.split())])
def test_a_documents_tables_are_those_of_the_code(file: str) -> None:
    text = (ROOT / file).read_text()
    tables = runpy.run_path(str(DOCS / "tables.py"))
    without_its_first_row = re.sub(r"(-->\n\|.+\n\|.+\n)\|.+\n", r"\1", text)
    assert without_its_first_row != text
    renewed = tables["renewed"](without_its_first_row)
    assert renewed == text, "write them anew: python docs/tables.py"


def test_the_pictures_are_those_of_the_results() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]
    for name, draw in drawn.items():
        file = DOCS / "images" / f"{name}.svg"
        assert file.read_text() == draw(), f"draw it anew: python docs/pictures.py {name}"
        shown = [p for p in (ROOT / "README.md", *DOCS.rglob("*.md")) if file.name in p.read_text()]
        assert shown


def test_a_table_has_the_rows_that_are_chosen_beside_the_baselines() -> None:
    targets = runpy.run_path(str(DOCS / "tables.py"))["targets"]
    file = "docs/results/choosing/target_epochs.json"
    rows = {row["strategy"] for row in targets(f"{file} of popsgd,wagma")["summary"]}
    assert rows == {"allreduce", "popsgd", "popsgd, claimed", "wagma", "wagma, claimed"}
    with pytest.raises(ValueError, match="got none of"):
        targets(f"{file} of wagam")


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda a: a.name)
def test_every_algorithm_has_a_page_that_names_its_hyperparameters(algorithm: Any) -> None:
    page = (DOCS / "algorithms" / f"{algorithm.__module__.rpartition('.')[2]}.md").read_text()
    assert f'"{algorithm.name}"' in page
    assert all(f"`{name}`" in page for name in algorithm().hyperparameters())


def test_every_result_is_shown_on_a_page() -> None:
    """A result's folder has the name of the page that tells of it."""
    pages = list(DOCS.rglob("*.md"))
    text = "".join(page.read_text() for page in pages)
    shown = set(re.findall(r"\((?:\.\./)?results/([\w./]+)\)", text))
    results = DOCS / "results"
    assert shown == {path.relative_to(results).as_posix() for path in results.rglob("*.*")}
    assert {folder.name for folder in results.iterdir()} <= {page.stem for page in pages}


# ---- the example ----
def example() -> dict[str, Any]:
    """What the page's first block defines."""
    names: dict[str, Any] = {}
    exec(blocks(PAGE)[0], names)
    return names


def train(net: Transport, make: Callable[[], Any], steps: int) -> tuple[Tensor, Tensor]:
    x, algorithm = torch.zeros(10), make()
    algorithm.start(net, x)
    for _ in range(steps + net.rank):  # ranks run out of data one after the other
        x -= 0.1 * (x - net.rank)
        algorithm.after_update(x)
    algorithm.settle(x)
    before = x.clone()
    algorithm.finish(x)
    return before, x


def test_the_example_without_momentum_is_local_sgd() -> None:
    bmuf = example()["BMUF"]
    ours, reference = (
        SimulatedWorld(world_size=4).run(train, make, 30)
        for make in (lambda: bmuf(sync_period=4, momentum=0.0), lambda: LocalSGD(sync_period=4))
    )
    for (_, mine), (_, theirs) in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_example_in_the_simulated_world_of_the_page() -> None:
    names: dict[str, Any] = example()
    exec(blocks(PAGE)[2], names)
    models = names["models"]
    assert all(torch.equal(model, models[0]) for model in models)
    targets = []
    for rank in range(4):
        torch.manual_seed(rank)
        targets.append(torch.randn(10))
    torch.testing.assert_close(models[0], torch.stack(targets).mean(0), atol=1e-3, rtol=0)


def fit_with_the_example() -> tuple[Tensor, Tensor]:
    """With its momentum, and with Local SGD."""
    moving = lightning_dsgd.DecentralizedStrategy(example()["BMUF"](sync_period=4, momentum=0.5))
    ends = []
    for strategy in (moving, lightning_dsgd.LocalSGDStrategy(sync_period=4)):
        torch.manual_seed(0)
        model = Regression()
        trainer(strategy, 2).fit(model, loader())
        ends.append(weights(model))
    return ends[0], ends[1]


def test_the_example_trains_with_the_trainer() -> None:
    (ours, averaged), (theirs, _) = FitWorld().run(2, fit_with_the_example)
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, averaged)


def run_the_script(folder: Path) -> float:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(blocks(DOCS / "getting_started.md")[0], names)
    return float(names["trainer"].callback_metrics["val_loss"])


def test_the_first_script_learns_on_every_rank(tmp_path: Path) -> None:
    losses = FitWorld().run(4, run_the_script, tmp_path)
    assert len(set(losses)) == 1
    assert losses[0] < 0.1  # 8 is the variance of the target


def fit_dealt_by_speed() -> tuple[int, list[int], list[int]]:
    """Steps of two epochs, and what this rank's sampler deals it in each."""
    names: dict[str, Any] = {}
    exec(blocks(DOCS / "choosing.md")[0], names)
    kind = type("Model", (Regression,), {"train_dataloader": names["train_dataloader"]})
    model = kind()
    model.train_set = loader(7 * 24).dataset
    fitted = trainer("popsgd", 4, max_epochs=2)
    fitted.fit(model, val_dataloaders=loader())
    sampler = names["BySpeed"](model.train_set, [2, 2, 2, 1], fitted.global_rank)
    first = list(sampler)
    sampler.set_epoch(1)
    return fitted.global_step, first, list(sampler)


def test_the_sampler_of_the_page_deals_a_slow_rank_half_as_many_batches() -> None:
    source = blocks(DOCS / "choosing.md")[0].partition("\n\n\ndef train_dataloader")[0]
    sampler = source.partition("class BySpeed")[2]
    assert sampler in (ROOT / "benchmarks" / "slow_rank_epochs.py").read_text()  # what was measured
    steps, *epochs = zip(*FitWorld().run(4, fit_dealt_by_speed), strict=True)
    assert steps == (12, 12, 12, 6)
    for dealt in epochs:
        assert sorted(index for rank in dealt for index in rank) == list(range(7 * 24))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_code_of_the_pages_compiles(page: Path) -> None:
    for block in blocks(page):
        compile(block, str(page), "exec")


# ---- the site ----
once = pytest.mark.xdist_group("site")  # which takes long to build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = ended(command, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.exhaustive
@once
def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(\S+)", page.read_text()
        )
        assert found
        assert [url for url in found if re.match(r"https?:|//", url)] == [], page.name


@pytest.mark.exhaustive
@once
def test_the_reference_shows_what_the_docstrings_say(site: Path) -> None:
    text = (site / "api.html").read_text()
    for cls in lightning_dsgd.STRATEGIES.values():
        assert f'id="lightning_dsgd.trainer.named.{cls.__name__}"' in text
    assert (
        "number of steps from one global average to the next" in text
    )  # of a docstring by reference
    assert "wait_avoiding" in text


@once
@pytest.mark.exhaustive
def test_no_page_is_wider_than_the_screen(site: Path, tmp_path: Path) -> None:
    """Frames as wide as a phone's and a desktop's screen, each with one page, report its width."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    (site / "widths.htm").write_text(
        f"""<!doctype html><body><pre id="result"></pre><script>
const pages = {json.dumps(pages)}, widths = [{PHONE_PX}, {DESKTOP_PX}], found = {{}}
let open = pages.length * widths.length
for (const page of pages) for (const width of widths) {{
  const frame = document.createElement("iframe")
  frame.style.cssText = `width:${{width}}px;height:800px;border:0`
  frame.onload = () => {{
    const root = frame.contentDocument.documentElement
    found[`${{page}} at ${{width}}`] = root.scrollWidth - width
    if (--open == 0) document.getElementById("result").textContent = JSON.stringify(found)
  }}
  frame.src = page
  document.body.append(frame)
}}
</script>"""
    )
    url = (site / "widths.htm").as_uri()
    document = chromium(tmp_path / "profile", "--dump-dom", url).stdout
    result = re.search(r'<pre id="result">({.*?})</pre>', document)
    assert result is not None, document[-2000:]
    excess = json.loads(result[1])
    assert len(excess) == 2 * len(pages)
    assert {page: px for page, px in excess.items() if px > 0} == {}
