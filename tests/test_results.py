"""Result files: what is in them, and how they are laid out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.in_force import differences, in_force, lacks, measured_with

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
HEADLINES = {
    page: name
    for page in sorted(PAGES)
    for name in re.findall(r"results/([\w./]+\.json)", page.read_text())[:1]
}
"""The first result that a page shows."""
WITHOUT_A_RECORD = 13
"""How many results at the heads of pages are older than the record of hyperparameters."""
STORED = sorted(ROOT.joinpath("docs", "results").rglob("*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_the_command_of_a_result_names_files_that_exist(path: Path) -> None:
    words = json.loads(path.read_text())["command"].split()
    assert [w for w in words if "/" in w and not (ROOT / w).exists()] == []
    if "--output" in words:
        output = ROOT / words[words.index("--output") + 1]
        assert output in (path, path.parent)


def headline(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs" / "results" / name).read_text()))


@pytest.mark.parametrize("page", HEADLINES, ids=lambda page: page.stem)
def test_the_first_figures_of_a_page_are_of_todays_defaults(page: Path) -> None:
    result = headline(HEADLINES[page])
    if "hyperparameters" in result:
        stale = differences(result)
        again = f"measure docs/results/{HEADLINES[page]} anew: {result['command']}"
        assert not stale, f"{page.name} shows older defaults: {'; '.join(stale)}; {again}"


def test_no_new_result_lacks_its_hyperparameters() -> None:
    known = ["hyperparameters" in headline(name) for name in {*HEADLINES.values()}]
    assert known.count(False) <= WITHOUT_A_RECORD


def test_a_figure_of_other_defaults_is_told() -> None:
    result = {
        "made": "2026-11-25T20:00:00+00:00",
        "hyperparameters": in_force(["wagma", "ddp"], [8]),
    }
    assert result["hyperparameters"].keys() == {"wagma"}
    del result["hyperparameters"]["wagma"]["paper"]  # an option that is new, and off
    result["hyperparameters"]["wagma"]["grows"] = False  # one that has gone, and was off
    assert measured_with(result) == "Measured on 2026-11-25 with today's defaults."
    result["hyperparameters"]["wagma"] |= {"sync_period": 10, "group_size": {"8": 2}}
    result["hyperparameters"]["wagmas"] = {}
    told = measured_with(result)
    assert "with other defaults: `wagma` had group_size={'8': 2}, which is {'8': 4} now" in told
    assert "`wagma` had sync_period=10, which is 100 now" in told
    assert "`wagmas` is refused now: " in told


def test_what_a_result_lacks() -> None:
    commit = "0123456789" * 4
    measured = {"cells": [{"strategy": "wagma:overlap=true"}]}
    assert lacks(measured) == ["no commit", "no hyperparameters"]
    assert lacks(measured | {"commit": commit}) == ["no hyperparameters"]
    known = measured | {"hyperparameters": {}}
    assert lacks(known | {"commit": commit + "+"}) == ["uncommitted changes"]
    assert lacks(known | {"commit": commit}) == []
    assert lacks({"commit": commit, "rows": [{"strategy": "ddp"}]}) == []  # not one of ours


def test_a_slow_kernel_costs_its_partners_less_than_a_tenth_of_a_second() -> None:
    """Where nobody is to wait for it; benchmarks/pages/gpus.md says so."""
    stored = json.loads((ROOT / "docs" / "results" / "gpus" / "slow_kernel.json").read_text())
    costs = {row["strategy"]: row["median_s"] - stored["kernel_s"] for row in stored["summary"]}
    assert (stored["kernel_s"], stored["slow_kernel_s"]) == (0.05, 0.6)
    wagma = ("", ":grace_s=0", ":overlap=true")
    names = [f"wagma:sync_period=1000{options}" for options in wagma]
    names += ["eager_sgd:quorum=solo:grace_s=0", "sgp:overlap=100", "adpsgd", "popsgd", "hpsgd"]
    assert max(costs[name] for name in names) < 0.1
    assert costs["allreduce"] > 0.5
