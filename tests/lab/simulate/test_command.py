"""`lightning-dsgd simulate`: what it compares, and its check against measured runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd import cli
from lightning_dsgd.lab.simulate.check import check
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run


def test_nothing_that_simulates_imports_lightning(tmp_path: Path) -> None:
    """A console script, whose package loads nothing by itself."""
    code = f"""
import sys
sys.argv[0] = "/somewhere/bin/lightning-dsgd"
from lightning_dsgd.cli import main
main("simulate --strategies wagma --ranks 2 --steps 2 --output {tmp_path}/r.json".split())
loaded = {{"lightning", "pytorch_lightning", "lightning_dsgd.trainer"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250, capture_output=True)
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["algorithm"] == "wagma"


# ---- rows, table and plot ----
def test_table_result_file_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    cli.main(
        f"simulate --strategies wagma,allreduce --ranks 4,8 --profile emulated-1gbit --params 25e5 "
        f"--compute-ms 100 --delay-ms 0 --steps 10 --output {tmp_path}/a/r.json "
        f"--plot {tmp_path}/p.png".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert "| steps/s (mean of ranks) |" in lines[0]
    assert "| x allreduce (slowest rank) |" in lines[0]
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert lines[2].startswith("| `allreduce` | 4 | 4.5")  # 0.1 + 0.12 s
    report = json.loads((tmp_path / "a" / "r.json").read_text())
    assert report["command"].startswith("lightning-dsgd simulate --strategies wagma,allreduce")
    assert report["profile"]["num_params"] == 2_500_000
    assert report["cores"] > 0
    for row in report["rows"]:
        assert row["ideal_steps_per_s"] == pytest.approx(10)
        assert row["slowest_steps_per_s"] == pytest.approx(row["steps_per_s"], rel=0.05)
        assert row["of_ideal"] == pytest.approx(row["steps_per_s"] / 10)
        if row["algorithm"] == "allreduce":
            assert row["ratio"] == row["slowest_ratio"] == 1
        else:
            assert min(row["ratio"], row["slowest_ratio"]) > 1.05  # half of the bytes at 4 ranks
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_without_all_reduce_nothing_is_compared_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["simulate", "--strategies", "dpsgd", "--ranks", "4", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].count("|  |") == 2
    assert lines[-1] == "One endless epoch: no rank stands still before the end."


# ---- the check against measured runs ----
def measured(**rates: float) -> dict[str, Any]:
    """A result file of `bench throughput`."""
    return {
        "summary": [{"strategy": spec, "steps_per_s": rate} for spec, rate in rates.items()],
        "cells": [{"round": 0}, {"round": 1}],
        "settings": {
            "ranks": 4,
            "compute_s": 0.1,
            "delay_s": 0.05,
            "delayed_ranks": 4,
            "params": "25e5",
            "steps": 10,
            "network": {"rate_bit_s": 8e8, "latency_s": 0.0, "emulated": True},
        },
    }


def test_check_compares_with_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 150 ms, 10 MB at 100 MB/s: an all-reduce takes 150 ms more."""
    report = measured(ddp=3.0, no_sync=6.0)
    report["summary"].append({"strategy": "ddp_powersgd:rank=2", "steps_per_s": 4.0})
    rows, overhead_s = check(report)
    assert overhead_s == pytest.approx(1 / 6 - 0.15)
    predicted = {row["strategy"]: row["predicted"] for row in rows}
    assert predicted["no_sync"] == pytest.approx(6.0)
    assert predicted["ddp"] == pytest.approx(1 / (1 / 6 + 0.15), rel=1e-3)
    assert predicted["ddp_powersgd:rank=2"] is None
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(report))
    cli.main(["simulate", "--check", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `ddp` | 3.000 | 3.158 | 1.05 |"
    assert lines[4] == "| `ddp_powersgd:rank=2` | 4.000 | not ours | |"
    assert lines[-1].endswith(" 16.7 ms")


def test_check_takes_the_rounds_as_seeds_and_loopback_as_no_cost() -> None:
    report = measured(allreduce=1.0)
    report["settings"] |= {"delayed_ranks": 1, "ranks": 8, "delay_s": 0.4}
    report["settings"]["network"] = {"rate_bit_s": None, "latency_s": None, "emulated": False}
    rows, overhead_s = check(report)
    assert overhead_s == 0
    assert rows[0]["predicted"] == pytest.approx(2.0)  # one of eight is late in each step
    report["summary"] = [{"strategy": "no_sync", "steps_per_s": 1e3}]
    machine = Machine(0.0, math.inf, 0.1, 25_000_000, delay_s=0.4, delayed_ranks=1)
    rates = [run("no_sync", 8, machine, 10, seed).slowest_steps_per_s for seed in (0, 1)]
    assert check(report)[0][0]["predicted"] == pytest.approx(sum(rates) / 2)


def test_check_names_what_a_result_file_lacks() -> None:
    report = measured(ddp=1.0)
    del report["settings"]["delay_s"]
    with pytest.raises(ValueError, match="with its settings, got one without 'delay_s'"):
        check(report)
