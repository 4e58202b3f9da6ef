"""Comparisons as W&B runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb

from lightning_dsgd.lab.bench import tracking


@pytest.mark.exhaustive
def test_a_comparison_is_logged_to_offline_wandb_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
