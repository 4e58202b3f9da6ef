"""The private names of torch's GradScaler, and what is made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.session.scaling import agree_on_overflow, is_unscaled
from tests.support.fake_device import FakeDevice
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld


def flags(scaler: Any, optimizer: Any) -> list[bool]:
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return [bool(flag) for flag in found.values()]


@pytest.mark.parametrize(("reduced", "skips"), [(1.0, False), (torch.inf, True), (torch.nan, True)])
def test_a_step_is_skipped_for_what_the_reduced_gradient_holds(reduced: float, skips: bool) -> None:
    x = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([x], 0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(x.sum() * (1.0 if skips else torch.inf)).backward()
    assert not is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert is_unscaled(scaler, optimizer)
    assert flags(scaler, optimizer) == [not skips]
    assert x.grad is not None
    x.grad.fill_(reduced)
    agree_on_overflow(scaler, optimizer)
    assert x.grad.equal(torch.full((3,), reduced)) or reduced != reduced
    scaler.step(optimizer)
    scaler.update()
    assert bool(x.eq(0).all()) == skips
    assert scaler.get_scale() == (2.0 if skips else 4.0)


def step_with_many_parameters(
    net: Any, fake: FakeDevice, known: bool | None
) -> list[tuple[str, str, str]]:
    xs = [torch.zeros(3, device=fake.device).requires_grad_() for _ in range(9)]
    optimizer, scaler = torch.optim.SGD(xs, 0.1), GradScaler("fake")
    scaler.scale(torch.stack(xs).sum()).backward()
    scaler.unscale_(optimizer)
    part: Any = SimpleNamespace(optimizer=optimizer, algorithm=OkTopk())
    part.algorithm.overflowed = known
    fake.syncs.clear()
    agree_on_overflow(scaler, optimizer, [part])
    scaler.step(optimizer)
    scaler.update()
    syncs = list(fake.syncs)
    assert [bool(x.cpu().any()) for x in xs] == [not known] * 9
    return syncs


@cases("known", now=[None, False], later=[True])
def test_the_host_waits_once_for_all_parameters_or_not_again(known: bool | None) -> None:
    """Where the algorithm has asked whether any gradient has overflowed, nobody asks again."""
    [found] = FakeWorld().run(1, step_with_many_parameters, known)
    assert len(found) == (known is None), found
