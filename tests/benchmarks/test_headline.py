"""README's figures, and the command that measures them anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.headline import HEADLINES, table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["demo", "virtual", "language", "digits", "slow-link"])
def test_readme_shows_the_figures_of_the_results_behind_it(name: str) -> None:
    stored = json.loads((ROOT / "docs/results" / HEADLINES[name].stored).read_text())
    figures = HEADLINES[name].figures(stored)
    assert figures
    for figure, value in figures.items():
        shown = f"{value + 0:+.1f} points" if figure.endswith("points") else f"{value:.2f}"
        assert shown.replace("-0.0", "+0.0") in README, figure


def test_a_figure_of_now_stands_beside_readmes() -> None:
    assert "0.73      0.71" in table("demo", {"balanced: of ddp's time": 0.71})


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_the_command_measures_anew(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "headline", "--only", "virtual"]
    ran = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [line] = [line for line in ran.stdout.splitlines() if "16 ranks, stalls" in line]
    assert line.split()[-2] == "0.28"
    assert 0.2 < float(line.split()[-1]) < 0.4
