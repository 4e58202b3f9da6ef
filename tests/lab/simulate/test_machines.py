"""Step times and stragglers of the machines."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.lab.simulate.machines import MACHINES, Machine
from lightning_dsgd.trainer.callbacks import StragglerInjector


def test_a_spread_has_the_figures_that_it_is_given() -> None:
    spread = MACHINES["piz-daint-habitat"]
    times = torch.tensor(spread.step_times(50, 100, seed=0)).flatten()
    assert times.min() >= 1.7
    assert times.max() <= 43.5
    assert float(times.median()) == pytest.approx(1.9, abs=0.02)
    assert times.max() > 20


def test_the_delayed_ranks_are_those_of_the_straggler_injector() -> None:
    machine = Machine(0.0, 1e9, compute_s=0.1, num_params=1, delay_s=0.2, delayed_ranks=2)
    times = machine.step_times(8, 5, seed=3)
    injector = StragglerInjector(0.2, 2, seed=3)
    for step in range(5):
        late = [rank for rank in range(8) if times[rank][step] > 0.15]
        assert late == sorted(injector.delayed_ranks(step, 8))
