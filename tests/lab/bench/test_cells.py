"""What the benchmarks measure: contestants, workloads, paces, and what a rank does before."""

from __future__ import annotations

import importlib.util
import inspect
import time
from typing import Any

import pytest

from lightning_dsgd.lab.bench import contestants, throughput_cell
from lightning_dsgd.lab.bench.convergence_cell import Paced
from lightning_dsgd.lab.bench.run_cells import load
from lightning_dsgd.lab.bench.throughput_cell import Clock
from lightning_dsgd.lab.bench.workloads import WORKLOADS
from tests.support.fake_device import FakeDevice
from tests.support.fits import accelerator_of
from tests.support.worlds import FakeFitWorld


# ---- workloads ----
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_names_a_model_and_data_that_take_its_options(name: str) -> None:
    workload = WORKLOADS[name]
    for reference, options in (
        (workload.model, workload.model_options),
        (workload.data, workload.data_options),
    ):
        inspect.signature(load(reference)).bind(**options)


# ---- the pace of `bench convergence` ----
@pytest.mark.parametrize(("computed_s", "slept_s"), [(0.0, 0.1), (0.06, 0.04), (0.12, 0.0)])
def test_a_step_takes_at_least_so_long_and_the_pace_adds_nothing_to_a_longer_one(
    computed_s: float, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [5.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Paced(compute_s=0.1)
    pace.on_train_batch_start()
    now[0] += computed_s
    pace.on_after_backward()
    assert sum(slept) == pytest.approx(slept_s)


# ---- the model and the clock of `bench throughput` ----
def test_communication_is_counted_per_step() -> None:
    clock = Clock(steps=4)
    assert clock.communication_per_step() == {}
    clock.before = {"wait_s": 1.0, "bytes_sent": 1e6}
    clock.after = {"wait_s": 3.0, "bytes_sent": 9e6, "late_share": 0.25}
    assert clock.communication_per_step() == pytest.approx(
        {"wait_s_per_step": 0.5, "mb_sent_per_step": 2.0, "late_share": 0.25}
    )


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


# ---- the strategies of other packages, beside ours ----
PEERS = ["torchft_local_sgd:period=2", "decent_dp:topology=ring", "hivemind:period=2"]


@pytest.mark.parametrize("spec", PEERS)
def test_a_peer_that_is_not_installed_says_so(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which is not installed; install it \(pip install "):
        contestants.check(spec, 2)
