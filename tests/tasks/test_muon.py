"""One optimizer of Muon and AdamW is to the bit what both are apart."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_dsgd.tasks import LinearRegression, MuonWithAdamW


def backward(
    model: nn.Module, batch: torch.Tensor, *optimizers: torch.optim.Optimizer
) -> torch.Tensor:
    for each in optimizers:
        each.zero_grad()
    loss: torch.Tensor = model(batch).square().sum()
    loss.backward()
    return loss


def test_muon_with_adamw_is_both_apart_also_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    one, apart = (nn.Linear(6, 4) for _ in range(2))
    apart.load_state_dict(one.state_dict())
    together = MuonWithAdamW([one.weight], [one.bias], lr=0.1)
    both = [
        torch.optim.AdamW([apart.bias], lr=0.1, weight_decay=0.1),
        torch.optim.Muon([apart.weight], lr=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(6):
        batch = torch.randn(8, 6)
        assert together.step(partial(backward, one, batch, together)) > 0
        backward(apart, batch, *both)
        for each in both:
            each.step()
        assert torch.equal(one.weight, apart.weight)
        assert torch.equal(one.bias, apart.bias)
        if step == 2:
            state = copy.deepcopy(together.state_dict())
            together = MuonWithAdamW([one.weight], [one.bias])
            together.load_state_dict(state)


def test_muon_is_refused_where_a_model_has_no_layers() -> None:
    with pytest.raises(ValueError, match="'layers'"):
        LinearRegression(optimizer="muon").configure_optimizers()
