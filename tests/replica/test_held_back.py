"""Gradients that were held back are applied in little memory, and the optimizer's state stays."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.fake_device import FakeDevice, parameters_allowed
from tests.support.worlds import FakeWorld

LR, NUM, LENGTH = 0.125, 16, 4096


def train(net: Any, weights: nn.ParameterList, optimizer: Any) -> Replica:
    """Two steps, after which most of the gradients are held back."""
    replica = Replica(net, weights, [optimizer], OkTopk(density=0.01))
    replica.synchronize()
    for number in range(2):
        for p in weights:
            draw = torch.Generator().manual_seed(10 * number + net.rank)
            p.grad = torch.randn(p.shape, generator=draw).to(p)
        replica.before_update(optimizer)
        optimizer.step()
        replica.after_update(optimizer)
        optimizer.zero_grad()
    replica.settle()
    return replica


def memory(net: Any, fake: FakeDevice) -> float:
    with parameters_allowed():
        zeros = torch.zeros(LENGTH, device=fake.device)
        weights = nn.ParameterList([nn.Parameter(zeros.clone()) for _ in range(NUM)])
        optimizer = torch.optim.Adam(weights, LR, foreach=False)
        replica = train(net, weights, optimizer)
        really, live, peak = fake.tensor, 0, 0

        def tensor(inner: Tensor) -> Any:
            nonlocal live, peak
            made, nbytes = really(inner), inner.untyped_storage().nbytes()
            live, peak = live + nbytes, max(peak, live + nbytes)

            def free() -> None:
                nonlocal live
                live -= nbytes

            weakref.finalize(made.block, free)
            return made

        fake.tensor = tensor  # type: ignore[method-assign]
        before = weights[0].cpu()
        replica.finish()
        assert not weights[0].cpu().equal(before)
        return peak / (NUM * LENGTH * 4)


def test_what_was_held_back_takes_as_much_on_the_device_as_the_gradient() -> None:
    assert FakeWorld().run(1, memory)[0] < 1.1


class Wide(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in [p for p in group["params"] if p.grad is not None]:
                kept = self.state[p].setdefault("momentum", torch.zeros(p.shape))
                kept.mul_(0.9).add_(p.grad)
                self.state[p]["some"] = [*self.state[p].get("some", []), group["k"]][-2:]
                p.data.sub_(kept.to(p) * group["lr"])


class Outer(Wide):
    def __init__(self, params: Any, lr: float) -> None:
        params = [*params]
        super().__init__(params, lr)
        self.inner = Wide(params, lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def keep_state(net: Any, kind: Any, dtype: torch.dtype) -> tuple[list[Any], list[Any], Tensor]:
    """The momenta before and after, with what else is kept, and what the weights have changed."""
    weights = nn.ParameterList([nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(2)])
    optimizer = kind(weights, LR)
    replica = train(net, weights, optimizer)
    inner = getattr(optimizer, "inner", optimizer)

    def kept() -> list[Any]:
        inside = [inner.state[p] for p in weights]
        return [
            (each["momentum"].clone(), each["some"], inner.param_groups[0]["k"]) for each in inside
        ]

    states, before = kept(), [p.detach().clone() for p in weights]
    [part] = replica.parts
    held_back = part.algorithm.held_back()
    assert held_back is not None
    rest = part.weights.views(held_back)
    replica.finish()
    ways = [p.detach() - x + LR * g for p, x, g in zip(weights, before, rest, strict=True)]
    return states, kept(), torch.stack([way.abs().max() for way in ways])


@pytest.mark.parametrize(("kind", "dtype"), [(Wide, torch.bfloat16), (Outer, torch.float32)])
def test_the_optimizers_state_stays_to_the_bit(kind: Any, dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else 0.02
    for before, after, left in SimulatedWorld(2).run(keep_state, kind, dtype):
        assert left.max() < rounding
        for (old, *others), (new, *same) in zip(before, after, strict=True):
            assert (new.dtype, same) == (torch.float32, others)
            assert new.equal(old)
