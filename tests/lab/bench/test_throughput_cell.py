"""The model and the clock of `bench throughput`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_dsgd.lab.bench import throughput_cell
from lightning_dsgd.lab.bench.throughput_cell import Clock, Sleeper
from tests.support.fake_device import FakeDevice
from tests.support.fits import accelerator_of
from tests.support.worlds import FakeFitWorld


def test_a_step_sleeps_and_every_weight_has_a_gradient() -> None:
    model = Sleeper(params=100, compute_s=0.05)
    begin = time.perf_counter()
    model.training_step(None, 0).backward()
    assert time.perf_counter() - begin >= 0.05
    assert model.weight.numel() == 100
    assert model.weight.grad is not None
    assert model.weight.grad.count_nonzero() == 100


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
    settings |= {"delay_s": 0.05, "delayed_ranks": 1, "delay_on": "device"}
    spun = []
    for measured, kernels in FakeFitWorld().run(2, measure_on, settings):
        assert measured["seconds"] > 0
        assert "late_share" in measured
        spun += [seconds for seconds in kernels if seconds]
    assert spun == [0.05] * 4
