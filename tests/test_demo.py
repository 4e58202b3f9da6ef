"""What the demo makes of the jobs that it has run: the better rate, and when each is there."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DEMO = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "demo.py"), run_name="demo")


def job(strategy: str, lr: float, seed: int, accuracies: list[float], pace_s: float) -> Any:
    """One epoch in `pace_s` seconds."""
    rows = [
        {"seconds": pace_s * (epoch + 1), "accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies)
    ]
    return {"strategy": strategy, "lr": lr, "seed": seed, "rows": rows, "bytes_sent": None}


def test_each_strategy_has_the_rate_that_ends_best_over_all_seeds() -> None:
    jobs = [
        job("ddp", 0.02, 0, [0.5, 0.9], 1.0),
        job("ddp", 0.02, 1, [0.5, 0.9], 1.0),
        job("ddp", 0.05, 0, [0.8, 0.99], 1.0),
        job("ddp", 0.05, 1, [0.8, 0.7], 1.0),
    ]
    assert DEMO["at_best_lr"](jobs) == jobs[:2]


def test_the_table_has_medians_and_says_never(capsys: pytest.CaptureFixture[str]) -> None:
    ddp = [job("ddp", 0.05, seed, [0.5, 0.95, 1.0], 2.0) for seed in range(3)]
    soon = [job("wagma", 0.05, seed, [0.5, 0.99, 1.0], pace) for seed, pace in enumerate((1, 2, 4))]
    targets = dict.fromkeys(range(3), 0.99)
    assert [DEMO["seconds_to"](each, 0.99) for each in (*ddp, *soon)] == [6, 6, 6, 2, 4, 8]
    DEMO["show"]({"ddp": ddp, "wagma": soon}, targets)
    _, _, base, wagma = capsys.readouterr().out.splitlines()
    assert base.split() == ["ddp", "0.05", "6.0", "100.0%", "6.0", "1.00", "not", "counted"]
    assert wagma.split()[4:6] == ["4.0", "1.50"]
    DEMO["show"]({"ddp": ddp, "wagma": [job("wagma", 0.05, 0, [0.9], 1.0)]}, targets)
    assert "never" in capsys.readouterr().out
