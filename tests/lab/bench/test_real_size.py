"""`benchmarks/real_size.py`: what it makes of its result file, and a tiny training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.bench.job import Job
from lightning_dsgd.lab.bench.run_cells import load
from lightning_dsgd.lab.results import save
from tests.support.bench import run_bench

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "real_size.py"
OURS = "popsgd:data=claimed"


@pytest.fixture
def script() -> Any:
    return sys.modules[load(f"{SCRIPT}:main").__module__]


def cell(spec: str, lr: float, seed: int, last: float) -> dict[str, Any]:
    row = {"seconds": 10.0, "step": 5, "mb_sent": -1.0}
    rows = [row | {"value": 3.0}, row | {"seconds": 20.0, "value": last}]
    return {"situation": "both", "strategy": spec, "lr": lr, "seed": seed, "rows": rows}


CELLS = [
    *(cell("ddp", lr, 1000, last) for lr, last in ((0.1, 2.1), (0.2, 2.0))),
    *(cell(OURS, lr, 1000, last) for lr, last in ((0.1, 2.0), (0.2, 2.1))),
    *(cell("ddp", 0.2, seed, 2.0) for seed in (1, 2)),
    *(cell(OURS, 0.1, seed, last) for seed, last in ((1, 2.01), (2, 2.5), (3, 9.0))),
]


def test_the_tuning_seed_chooses_and_the_others_are_compared(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save({"settings": {"tuning_seed": 1000}, "cells": CELLS}, path)
    results = script.opened(path)
    ddp, ours = results.comparison("both")["summary"]
    assert (ddp["lr"], ours["lr"]) == (0.2, 0.1)
    assert ours["last"] == pytest.approx((2.01 + 2.5) / 2)  # DDP has not trained seed 3 yet
    assert ours["reached"] == 1  # 2.0 / 0.99 is 2.02
    script.main(["--plot", str(tmp_path / "r.svg"), "--output", str(path)])
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


def test_other_settings_are_not_mixed(script: Any, tmp_path: Path) -> None:
    path, job = tmp_path / "r.json", Job("", {"epochs": 8}, 4)
    results = script.taken_up(path, job, 1000, ["ddp", OURS])
    results.write()
    assert script.taken_up(path, job, 1000, ["wagma"]).report["hyperparameters"].keys() == {
        "popsgd",
        "wagma",
    }
    with pytest.raises(SystemExit, match="measured with other settings"):
        script.taken_up(path, Job("", {"epochs": 9}, 4), 1000, ["ddp"])


@pytest.mark.exhaustive
def test_a_run_goes_on(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--ranks 2 --network none --epochs 2 --epoch-steps 3 --size 16,160,4,2 --lrs 0.01"
    options += " --compute-ms 20 --delay-ms 10 --validated 32 --seeds 1 --strategies "
    run_bench(script, tmp_path / "r.json", options + "ddp,ddp_powersgd")  # DDP has two buckets
    result = run_bench(script, tmp_path / "r.json", f"{options}ddp,{OURS}")
    assert "1 of 1: " in capsys.readouterr().out
    assert [one["strategy"] for one in result["cells"]] == ["ddp", "ddp_powersgd", OURS]
    ours = result["cells"][2]["rows"]
    assert [row["step"] for row in ours] == [3, 6]  # the mean of the ranks, whoever made them
    assert ours[0]["value"] > ours[1]["value"]
    assert json.loads((tmp_path / "r.json").read_text())["summary"][2]["strategy"] == OURS
