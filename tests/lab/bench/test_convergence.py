"""`lightning-dsgd bench convergence`, plots and runs of W&B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb

from lightning_dsgd.lab.bench import convergence, report, tracking
from tests.support.bench import run_bench


@pytest.mark.exhaustive
def test_convergence_counts_steps_and_seconds_to_the_target(tmp_path: Path) -> None:
    options = "--task digits --ranks 2 --strategies allreduce,wagma:group_size=2,adaptive --seeds 1"
    options += " --epochs 4 --val-every 2 --target 0.5"
    options += " --compute-ms 5 --delay-ms 10 --delayed-ranks 1"
    options += ' --model {"lr":0.03} --data {"batch_size":16}'
    result = run_bench(convergence, tmp_path / "c.json", options)
    ours, chosen = result["summary"][1:]
    assert chosen["strategy"] == "adaptive"
    assert result["cells"][2]["decisions"]
    assert ours["strategy"] == "wagma:group_size=2"
    assert result["settings"]["model"] == {"lr": 0.03}
    assert ours["reached"] == 1
    rows = result["cells"][0]["rows"]
    assert [row["step"] for row in rows] == [68, 136]
    for row in rows:
        assert row["seconds"] > row["step"] * 0.015  # one of the two is late in each step
    first = next(row for row in rows if row["value"] >= 0.5)
    assert result["summary"][0]["step_to_target"] == first["step"]
    report.main([str(tmp_path / "c.json"), "--output", str(tmp_path / "report")])
    assert (tmp_path / "report" / "c.png").stat().st_size > 10_000


# ---- comparisons as W&B runs ----
@pytest.mark.exhaustive
def test_a_comparison_is_logged_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    curve = [{"step": 10, "seconds": 1.0, "value": 0.5}, {"step": 20, "seconds": 2.0, "value": 0.7}]
    specs = ("allreduce", "wagma:group_size=2")
    result = {
        "settings": {"ranks": 4, "task": "digits"},
        "monitor": "val_accuracy",
        "target": 0.6,
        "higher_is_better": True,
        "cells": [{"strategy": spec, "seed": 0, "rows": curve} for spec in specs],
        "summary": [{"strategy": spec, "last": 0.7, "last_range": [0.7, 0.7]} for spec in specs],
    }
    output = tmp_path / "convergence.json"
    output.write_text(json.dumps(result))
    tracking.log_comparison(result, output, "tests")
    wandb.teardown()  # what wandb's own process has not written yet, it writes now
    runs = [file.read_bytes() for file in sorted(tmp_path.rglob("*.wandb"))]
    assert len(runs) == 3  # one for each strategy and seed, and the comparison
    (allreduce,) = (run for run in runs if b"allreduce seed 0" in run)
    (wagma,) = (run for run in runs if b"wagma:group_size=2 seed 0" in run)
    (comparison,) = (run for run in runs if b"artifact" in run)
    assert b'{"name":"wagma","num_ranks":4,"group_size":2}' in wagma
    assert allreduce.count(b"seconds") >= len(curve)
    assert b"table-file" in comparison
    assert b"image-file" in comparison
