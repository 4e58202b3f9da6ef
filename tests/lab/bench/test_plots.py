"""Plots of result files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_dsgd.lab.bench import plots

SETTINGS = {"ranks": 4, "compute_s": 0.4, "delay_s": 0.32, "delayed_ranks": 2}


def test_ranks_that_never_wait_share_the_delays() -> None:
    assert plots.ideal_steps_per_s(SETTINGS) == pytest.approx(1 / 0.56)
    assert plots.ideal_steps_per_s(SETTINGS | {"compute_s": 0, "delay_s": 0}) == math.inf


def test_throughput_of_several_files_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        {
            "settings": SETTINGS | {"ranks": ranks},
            "summary": [
                {"strategy": "ddp", "steps_per_s": 1.3, "mb_sent_per_step": None},
                {"strategy": "wagma", "steps_per_s": 1.5, "mb_sent_per_step": 6.0},
            ],
        }
        for ranks in (8, 4)
    ]
    plots.plot_throughput(results, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000
