"""The private names of torch's GradScaler, and what is made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.amp import GradScaler

from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.session.scaling import agree_on_overflow
from tests.support.fake_device import FakeDevice
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld


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
