"""The model and the clock of `bench throughput`."""

from __future__ import annotations

import time

import pytest

from lightning_dsgd.lab.bench.throughput_cell import Clock, Sleeper


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
