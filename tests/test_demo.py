"""What the demo makes of the jobs that it has run: the better rate, and when each is there."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

DEMO = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "demo.py"), run_name="demo")


def job(strategy: str, lr: float, seed: int, accuracies: list[float], pace_s: float) -> Any:
    """One epoch in `pace_s` seconds."""
    rows = [
        {"seconds": pace_s * (epoch + 1), "accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies)
    ]
    return {"strategy": strategy, "lr": lr, "seed": seed, "rows": rows, "bytes_sent": None}


def test_the_target_is_of_the_rate_that_ends_best_over_all_seeds() -> None:
    jobs = [
        job("ddp", 0.02, 0, [0.5, 0.9], 1.0),
        job("ddp", 0.02, 1, [0.5, 0.9], 1.0),
        job("ddp", 0.05, 0, [0.8, 0.99], 1.0),
        job("ddp", 0.05, 1, [0.8, 0.7], 1.0),
    ]
    assert DEMO["targets_of"](jobs, [0.02, 0.05]) == {0: 0.99 * 0.9, 1: 0.99 * 0.9}


def test_each_strategy_has_the_rate_that_is_soonest_there() -> None:
    slow = [job("ddp", 0.02, seed, [0.5, 0.9], 2.0) for seed in range(3)]
    soon = [job("ddp", 0.05, seed, [0.9, 0.8], pace) for seed, pace in enumerate((3.0, 9.0, 3.0))]
    targets = dict.fromkeys(range(3), 0.9)
    assert DEMO["soonest"]([*slow, *soon], [0.02, 0.05], targets) == soon
    assert DEMO["soonest"]([*slow, *soon], [0.02], targets) == slow


def test_the_table_has_medians_and_says_never(capsys: pytest.CaptureFixture[str]) -> None:
    ddp = [job("ddp", 0.05, seed, [0.5, 0.95, 1.0], 2.0) for seed in range(3)]
    soon = [job("wagma", 0.05, seed, [0.5, 0.99, 1.0], pace) for seed, pace in enumerate((1, 2, 4))]
    targets = dict.fromkeys(range(3), 0.99)
    assert [DEMO["seconds_to"](each, 0.99) for each in (*ddp, *soon)] == [6, 6, 6, 2, 4, 8]
    DEMO["show"]({"ddp": ddp, "wagma": soon}, targets)
    _, base, wagma = capsys.readouterr().out.splitlines()
    assert base.split() == ["ddp", "0.05", "6.0", "100.0%", "6.0", "1.00", "not", "counted"]
    assert wagma.split()[4:6] == ["4.0", "1.50"]
    DEMO["show"]({"ddp": ddp, "wagma": [job("wagma", 0.05, 0, [0.9], 1.0)]}, targets)
    assert "never" in capsys.readouterr().out


def test_the_plot_has_a_line_for_each_seed_and_one_name_for_all(tmp_path: Path) -> None:
    ddp = [job("ddp", 0.05, seed, [0.5, 0.95, 1.0], 2.0) for seed in range(3)]
    never = [job("wagma", 0.05, seed, [0.5, 0.6], 1.0) for seed in range(3)]
    DEMO["plot"]({"ddp": ddp, "wagma": never}, dict.fromkeys(range(3), 0.99), tmp_path / "a.png")
    (axes,) = pyplot.gcf().axes
    assert [line.get_marker() for line in axes.lines] == ["None", *"ooo", "None", *"sss"]
    _, names = axes.get_legend_handles_labels()
    assert names[1:] == ["ddp: 6.0 s to the target", "wagma"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
