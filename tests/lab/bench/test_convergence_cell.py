"""The pace of `bench convergence`."""

from __future__ import annotations

import time

import pytest

from lightning_dsgd.lab.bench.convergence_cell import Paced


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
