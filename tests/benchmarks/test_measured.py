"""`python -m benchmarks throughput` and `benchmarks convergence`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import convergence, report, throughput, throughput_cell
from benchmarks.compare.workloads import WORKLOADS
from lightning_dsgd.lab.jobs import network
from lightning_dsgd.lab.jobs.run_cells import load
from tests.support.bench import run_bench
from tests.support.fake_device import FakeDevice
from tests.support.fits import accelerator_of
from tests.support.worlds import FakeFitWorld


@pytest.mark.exhaustive
def test_throughput_of_ours_and_of_their_peers(tmp_path: Path) -> None:
    strategies = (
        "ddp,ddp_fp16,ddp_bf16,ddp_powersgd,post_local_sgd:period=2,wagma:group_size=2,no_sync"
    )
    options = f"--ranks 2 --strategies {strategies} --rounds 1 --steps 14 --params 1e4"
    options += " --compute-ms 20 --delay-ms 200 --delayed-ranks 1"
    if not network.why_not():
        options += " --network 200mbit"
    result = run_bench(throughput, tmp_path / "t.json", options)
    rows = {row["strategy"]: row for row in result["summary"]}
    assert list(rows) == strategies.split(",")
    # Of two ranks one is 200 ms late in each step, so whoever waits for both takes 220 ms.
    assert 0 < rows["ddp"]["steps_per_s"] < 1 / 0.22
    assert rows["no_sync"]["ratio"] > 1.0
    assert rows["wagma:group_size=2"]["mb_sent_per_step"] > 0
    assert rows["ddp"]["mb_sent_per_step"] is None
    if not network.why_not():
        assert 0.3 < result["link_check"]["share_of_link"] < 1.15
    assert not (tmp_path / "t.json.cells").exists()
    report.main([str(tmp_path / "t.json"), "--output", str(tmp_path / "report")])
    assert "| `ddp_fp16` |" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "throughput.png").stat().st_size > 10_000


def test_summary_is_made_of_ratios_within_a_round() -> None:
    cells = [
        {"strategy": name, "round": turn, "steps_per_s": rate, "with_finish": rate}
        for turn, factor in enumerate((1.0, 2.0, 10.0))
        for name, rate in (("ddp", factor), ("wagma", factor * (1.1 + turn / 10)))
    ]
    ours = throughput.summarize(cells, "ddp")[1]
    assert ours["ratio"] == pytest.approx(1.2)
    assert ours["ratio_range"] == pytest.approx([1.1, 1.3])
    assert ours["of_no_sync"] is None


def measure_on(fake: FakeDevice, settings: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """What a cell measures on the emulated device, and how long its kernels were to spin."""
    on_device = settings | {"device": accelerator_of(fake.device)}
    return throughput_cell.run({"strategy": "wagma", "round": 0}, on_device), fake.spun


def test_a_cell_delays_the_device() -> None:
    settings = {"steps": 4, "world_size": 2, "params": 100, "compute_s": 0.0}
    settings |= {"delay_s": 0.05, "delayed_ranks": 1, "delay_on": "device", "shares_device": False}
    spun = []
    for measured, kernels in FakeFitWorld().run(2, measure_on, settings):
        assert measured["seconds"] > 0
        assert "late_share" in measured
        spun += [seconds for seconds in kernels if seconds]
    assert spun == [0.05] * 4


# ---- convergence ----
@pytest.mark.exhaustive
def test_convergence_counts_steps_and_seconds_to_the_target(tmp_path: Path) -> None:
    options = "--task digits --ranks 2 --strategies allreduce,wagma:group_size=2 --seeds 1"
    options += " --epochs 4 --val-every 2 --target 0.5"
    options += " --compute-ms 5 --delay-ms 10 --delayed-ranks 1"
    options += ' --model {"lr":0.03} --data {"batch_size":16}'
    result = run_bench(convergence, tmp_path / "c.json", options)
    [ours] = result["summary"][1:]
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


def test_a_workload_names_a_model_and_data_that_take_its_options() -> None:
    for workload in WORKLOADS.values():
        inspect.signature(load(workload.model)).bind(**workload.model_options)
        inspect.signature(load(workload.data)).bind(**workload.data_options)
