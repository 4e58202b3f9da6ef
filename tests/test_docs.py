"""The documents: tables and examples are the code's own, and the site builds."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_dsgd
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.decisions import OWN_RATE, SITUATIONS
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import ended
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EVERY = [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
PAGE = DOCS / "own_algorithm.md"


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


# ---- tables ----
PAGES = "choosing strategies examples"
RESEARCH = "choosing strategies time_to_target wagma papers paper_recipes"


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        *(f"docs/{page}.md" for page in PAGES.split()),
        *(f"benchmarks/pages/{page}.md" for page in RESEARCH.split()),
    ],
)
def test_a_documents_tables_are_those_of_the_code(file: str) -> None:
    text = (ROOT / file).read_text()
    tables = runpy.run_path(str(DOCS / "tables.py"))
    of_the_code = r"(<!-- (?!figures of).+ -->\n\|.+\n\|.+\n)"
    without_its_first_row = re.sub(of_the_code + r"\|.+\n", r"\1", text)
    assert without_its_first_row != text
    renewed = tables["renewed"](without_its_first_row)
    assert renewed == text, "write them anew: python docs/tables.py"


def test_a_time_to_the_loss_of_ddp_is_told_where_most_seeds_have_it() -> None:
    tables = runpy.run_path(str(DOCS / "tables.py"))
    soon = tables["soon"]
    assert soon({"share": 0.9, "reached": 3}, 5) == "0.90 (3 of 5 seeds)"
    assert soon({"share": 0.9, "reached": 2}, 5) == "2 of 5 seeds"
    assert soon({"share": 0.9, "reached": 0}, 5) == "never"


@pytest.mark.parametrize("task", ["language", "translation"])
def test_what_adamw_costs_stands_beside_the_choice(task: str) -> None:
    tables = runpy.run_path(str(DOCS / "tables.py"))
    values: dict[str, float] = {}
    for file in dict(tables["ADAMW"])[task]:
        result = json.loads((DOCS / "results" / file).read_text())
        values |= {row["strategy"]: row["value"] for row in result["summary"]}
    here = SITUATIONS["random"]
    told = tables["with_adamw"](here.first, [here])
    ours = f"{here.first.strategy}:scale_steps=true"
    found = values.get(f"{ours}, claimed", values[ours])
    assert f"{task} {found:.3f} (DDP's {values['allreduce']:.3f}), " in told


def test_where_ddps_rate_stays_what_adamw_costs_is_of_that_rate() -> None:
    tables = runpy.run_path(str(DOCS / "tables.py"))
    here = SITUATIONS["random"]
    choice = here.choice(OWN_RATE)
    assert choice is not None
    file = DOCS / "results/choosing/adam_language_claimed.json"
    rows = {row["strategy"]: row for row in json.loads(file.read_text())["summary"]}
    row, base = rows[f"{choice.strategy}:scale_steps=true, claimed"], rows["allreduce"]
    assert row["lr"] != base["lr"]
    ours = base["value"] + row["at_baseline_lr"]["difference"]
    assert f"language {ours:.3f} (DDP's" in tables["with_adamw"](choice, [here])


WITH_RESULTS = [page for page in EVERY if "results/" in page.read_text()]


def test_a_figure_is_labelled_that_nobody_can_make_again() -> None:
    with_labels = runpy.run_path(str(DOCS / "tables.py"))["with_labels"]
    for page in WITH_RESULTS:
        text = page.read_text()
        without_labels = re.sub(r"(\. |(?<=\| ))Stale: [^|]*(?=\|)| \(stale\)", "", text)
        assert with_labels(without_labels) == text, f"label {page.name}: python docs/tables.py"


def test_the_label_of_a_table_says_what_its_results_lack() -> None:
    with_labels = runpy.run_path(str(DOCS / "tables.py"))["with_labels"]
    old, new = "docs/results/benchmarks/throughput_4.json", "docs/results/benchmarks/real_size.json"
    table = "<!-- figures of {} -->\n| strategy{} | steps/s |\n|---|---|\n"
    stale = table.format(f"{new} {old}", ". Stale: no commit, no hyperparameters")
    assert with_labels(table.format(f"{new} {old}", "")) == stale
    assert with_labels(stale) == stale
    assert with_labels(table.format(new, ". Stale: no commit")) == table.format(new, "")
    assert with_labels(f"[result]({old}), [result]({new})") == (
        f"[result]({old}) (stale), [result]({new})"
    )


def test_the_pictures_are_those_of_the_results() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]
    for name, draw in drawn.items():
        file = DOCS / "images" / f"{name}.svg"
        assert file.read_text() == draw(), f"draw it anew: python docs/pictures.py {name}"
        assert any(file.name in page.read_text() for page in EVERY)


def test_the_picture_of_real_runs_says_the_shares_of_its_result() -> None:
    stored = json.loads((DOCS / "results/know_before_you_choose/timeline.json").read_text())
    waits = [f"{run['strategy']} {run['wait']:.0%}" for run in stored["runs"]]
    drawn = (DOCS / "images" / "timeline.svg").read_text()
    title = " ".join(re.findall(r'class="t">([^<]*)', drawn))
    told = re.findall(r"(\w+) (\d+%)", title)
    assert [" ".join(each) for each in told] == waits


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda a: a.name)
def test_every_algorithm_has_a_section_that_names_its_hyperparameters(algorithm: Any) -> None:
    page = (DOCS / "strategies.md").read_text()
    head = f"\n## {algorithm.__module__.rpartition('.')[2]}\n"
    section = page.partition(head)[2].partition("\n## ")[0]
    assert f'"{algorithm.name}"' in section
    assert all(f"`{name}`" in section for name in algorithm().hyperparameters())


def test_every_result_is_shown_on_a_page() -> None:
    """A result's folder has the name of the page, or of the strategy, that it tells of."""
    text = "".join(page.read_text() for page in EVERY)
    shown = set(re.findall(r"\((?:\.\./)*(?:docs/)?results/([\w./]+)\)", text))
    results = DOCS / "results"
    assert shown == {path.relative_to(results).as_posix() for path in results.rglob("*.*")}
    assert {folder.name for folder in results.iterdir()} <= {page.stem for page in EVERY} | {
        *ALGORITHMS
    }


# ---- the example ----
def example() -> dict[str, Any]:
    """What the page's first block defines."""
    names: dict[str, Any] = {}
    exec(blocks(PAGE)[0], names)
    return names


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
    """Without its momentum, and with Local SGD."""
    still = lightning_dsgd.DecentralizedStrategy(example()["BMUF"](sync_period=4, momentum=0.0))
    ends = []
    local = lightning_dsgd.DecentralizedStrategy(lightning_dsgd.LocalSGD(sync_period=4))
    for strategy in (still, local):
        torch.manual_seed(0)
        model = Regression()
        trainer(strategy, 2).fit(model, loader())
        ends.append(weights(model))
    return ends[0], ends[1]


def test_the_example_trains_with_the_trainer_and_is_local_sgd_without_momentum() -> None:
    (ours, averaged), (theirs, _) = FitWorld().run(2, fit_with_the_example)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, averaged)


def run_the_script(folder: Path) -> float:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(blocks(DOCS / "getting_started.md")[0], names)
    return float(names["trainer"].callback_metrics["val_loss"])


def test_the_first_script_learns_on_every_rank(tmp_path: Path) -> None:
    losses = FitWorld().run(4, run_the_script, tmp_path)
    assert len(set(losses)) == 1
    assert losses[0] < 0.1  # 8 is the variance of the target


def test_the_sampler_of_the_page_deals_a_slow_rank_half_as_many_batches() -> None:
    source = blocks(DOCS / "choosing.md")[0].partition("\n\n\ndef train_dataloader")[0]
    sampler = source.partition("class BySpeed")[2]
    assert sampler in (ROOT / "benchmarks" / "slow_rank_epochs.py").read_text()  # what was measured
    names: dict[str, Any] = {}
    exec(source, names)
    ranks = [names["BySpeed"](range(7 * 24), [2, 2, 2, 1], rank) for rank in range(4)]
    first = [list(rank) for rank in ranks]
    for rank in ranks:
        rank.set_epoch(1)
    for dealt in (first, [list(rank) for rank in ranks]):
        assert [len(own) for own in dealt] == [48, 48, 48, 24]
        assert sorted(index for own in dealt for index in own) == list(range(7 * 24))
    assert [list(rank) for rank in ranks] != first


def anchors(page: Path) -> set[str]:
    """What links to the page may name: its headings, as GitHub and MkDocs write them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


def test_links_within_the_repository_lead_somewhere() -> None:
    """Those of the site's API reference are checked where the site is built."""
    broken = []
    for page in (*EVERY, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"):
        for file, heading in re.findall(
            r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()
        ):
            target = (page.parent / file) if file else page
            is_found = target.exists() and (
                not heading
                or target.suffix != ".md"
                or target.name == "api.md"
                or heading in anchors(target)
            )
            if not is_found:
                broken.append(f"{page.name}: {file}#{heading}")
    assert broken == []


def test_code_of_the_pages_compiles() -> None:
    for page in EVERY:
        for block in blocks(page):
            compile(block, str(page), "exec")


# ---- the site ----


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
def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(\S+)", page.read_text()
        )
        assert found
        assert [url for url in found if re.match(r"https?:|//", url)] == [], page.name
