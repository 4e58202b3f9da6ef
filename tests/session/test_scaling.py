"""The private names of torch's GradScaler, and what is made of them."""

from __future__ import annotations

import pytest
import torch
from torch.amp import GradScaler

from lightning_dsgd.session.scaling import agree_on_overflow, is_unscaled, overflow_flags


@pytest.mark.parametrize(("reduced", "skips"), [(1.0, False), (torch.inf, True), (torch.nan, True)])
def test_a_step_is_skipped_for_what_the_reduced_gradient_holds(reduced: float, skips: bool) -> None:
    x = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([x], 0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(x.sum() * (1.0 if skips else torch.inf)).backward()
    assert not is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert is_unscaled(scaler, optimizer)
    assert [bool(flag) for flag in overflow_flags(scaler, optimizer)] == [not skips]
    assert x.grad is not None
    x.grad.fill_(reduced)
    agree_on_overflow(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert bool(x.eq(0).all()) == skips
    assert scaler.get_scale() == (2.0 if skips else 4.0)
