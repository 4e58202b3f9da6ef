"""Steps that an average does not shrink: what the ranks tell each other, and what follows of it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.primitives.step_scaling import (
    BLOCK,
    EVERY,
    EXCHANGED_BLOCK,
    ScaledSteps,
    Similarity,
    StepScaling,
)
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld

N = 20 * BLOCK + 5  # the last block is not full


def step(net: Any, scaling: StepScaling, x: Tensor, update: Tensor | float = 0.0) -> None:
    net.compute(0.1)
    scaling.update_begins(x)
    x += update
    scaling.update_ends(x)


def make_steps(net: Any, num_steps: int, agreement: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Steps of which all ranks share a part; gives the factors, the last step and it scaled.

    The part is the same in every step: what comes is some steps old.  A message that is lost, or
    taken for another, shares nothing with the rank's own steps.
    """
    common = torch.randn(N, generator=torch.Generator().manual_seed(0))
    chance = random.Random(net.rank)
    own = torch.Generator().manual_seed(1 + net.rank)
    x = torch.zeros(N)
    scaling = StepScaling(net, x)
    for _ in range(num_steps):
        net.compute(chance.choice([0.0, 0.0, 1.9]))
        u = agreement.sqrt() * common
        u += (1 - agreement).sqrt() * torch.randn(N, generator=own)
        before = x.clone()
        step(net, scaling, x, u)
    scaling.settle()
    return scaling.factors(), u, x - before


@pytest.mark.parametrize(("world_size", "agreement"), [(4, 1.0), (1, 0.0)])
def test_where_all_ranks_agree_steps_stay_as_they_are(world_size: int, agreement: float) -> None:
    shared = torch.full((N,), agreement)
    for factors, u, scaled in SimulatedWorld(world_size).run(make_steps, 30, shared):
        assert torch.equal(factors, torch.ones(21))
        torch.testing.assert_close(scaled, u, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 5])
def test_where_ranks_differ_by_noise_the_mean_is_as_large_as_one(world_size: int) -> None:
    """And in between, where a part is shared."""
    agreement = torch.full((N,), 0.3)
    agreement[: 10 * BLOCK] = 0.0
    results = SimulatedWorld(world_size, latency_s=0.3).run(make_steps, 150, agreement)
    for factors, _, scaled in results:
        assert float(factors[:10].mean()) == pytest.approx(math.sqrt(world_size), rel=0.15)
        expected = 1 / math.sqrt(0.3 + 0.7 / world_size)
        assert float(factors[10:].mean()) == pytest.approx(expected, rel=0.15)
        assert scaled.isfinite().all()
    mean = torch.stack([scaled for *_, scaled in results]).mean(0)
    assert float(mean.pow(2).mean().sqrt()) == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_steps_of_no_size_or_none_that_is_finite_tell_nothing(bad: float) -> None:
    def go(net: Any) -> Tensor:
        own = torch.Generator().manual_seed(net.rank)
        x, found = torch.zeros(N), []
        scaling = StepScaling(net, x)
        for k in range(100):
            noisy = 1.0 + 0.1 * torch.randn(N, generator=own)
            step(net, scaling, x, bad if k < 3 else noisy)
            x.zero_()
            found.append(float(scaling.factors().max()))
        scaling.settle()
        return torch.tensor(found)

    for found in SimulatedWorld(4).run(go):
        assert found.isfinite().all()
        assert float(found.max()) < 1.1


def test_a_step_sends_a_thirtieth_of_the_weights() -> None:
    def count(net: Any) -> int:
        x = torch.zeros(30 * BLOCK * EVERY)
        scaling = StepScaling(net, x)
        for _ in range(10):
            step(net, scaling, x)
        sent = net.counters.bytes_sent
        scaling.settle()
        return int(sent)

    for sent in SimulatedWorld(4).run(count):
        assert sent == 10 * 30 * 17
        assert sent / 10 == pytest.approx(30 * BLOCK * EVERY * 4 / 30, rel=0.01)


def test_a_resume_goes_on_with_what_was_known_of_the_same_layout() -> None:
    def resume(net: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.zeros(N)
        scalings = [
            StepScaling(net.sub(name), x[:n]) for name, n in {"a": N, "b": N, "c": N - 1}.items()
        ]
        scalings[0].similarity.own.fill_(2.0)
        scalings[0].similarity.shared.fill_(1.0)
        for scaling in scalings[1:]:
            scaling.load_state_dict(scalings[0].state_dict())
        first, second, third = (scaling.factors() for scaling in scalings)
        return first, second, third

    for first, second, third in SimulatedWorld(2).run(resume):
        assert torch.equal(first, torch.full((21,), 1 / math.sqrt(0.5 + 0.5 / 2)))
        assert torch.equal(second, first)
        assert torch.equal(third, torch.ones(21))


@pytest.mark.parametrize("world_size", [2, 5])
def test_exchanges_tell_how_similar_steps_are(world_size: int) -> None:
    """Ranks differ by noise alone in the first block, share a part in the second, then agree."""
    n, draw = EXCHANGED_BLOCK, torch.Generator().manual_seed(0)
    known = Similarity(torch.zeros(3 * n - 5), world_size, n)
    assert torch.equal(known.factors(), torch.ones(3))
    shared = torch.tensor([0.0, 0.3, 1.0]).repeat_interleave(n)[: 3 * n - 5]
    for _ in range(150):
        common = shared.sqrt() * torch.randn(len(shared), generator=draw)
        noise = torch.randn(world_size, len(shared), generator=draw)
        v = common + (1 - shared).sqrt() * noise
        places = torch.randperm(len(shared), generator=draw)[: len(shared) // 4]
        known.compare(places, v[0, places], v.sum(0)[places], world_size - 1)
    expected = 1 / (torch.tensor([0.0, 0.3, 1.0]) * (1 - 1 / world_size) + 1 / world_size).sqrt()
    torch.testing.assert_close(known.factors(), expected, rtol=0.1, atol=0)


def test_a_state_of_other_blocks_is_left_alone() -> None:
    """A resume may set other options, by which messages tell what exchanges told, or none does."""

    def resume(net: Any) -> list[Tensor]:
        x = torch.zeros(N)
        told = ScaledSteps(net, x, Similarity(x, net.world_size, EXCHANGED_BLOCK))
        told.similarity.own.fill_(2.0)
        again = ScaledSteps(net, x, Similarity(x, net.world_size, EXCHANGED_BLOCK))
        other = StepScaling(net, x)
        for each in (again, other):
            each.load_state_dict(told.state_dict())
        return [told.factors(), again.factors(), other.factors()]

    for told, again, other in SimulatedWorld(2).run(resume):
        torch.testing.assert_close(told, torch.full((1,), math.sqrt(2)))
        assert torch.equal(again, told)
        assert torch.equal(other, torch.ones(21))


APART = PopSGD(local_steps=10**6, scale_steps=True)  # without an exchange of weights
TOLD = OkTopk(exchanges="changes", density=1.0, scale_steps=True)


def weight_decay(net: Any, optimizer: str, algorithm: Algorithm) -> tuple[nn.ParameterDict, float]:
    """A model after steps that decay weights; the mean factor.

    Some weights have a gradient of noise, one group of them no decay; some have a gradient of zero,
    so they decay alone; some have no gradient.
    """
    names = ("noisy", "free", "unused", "still")
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(32)) for name in names})
    kind = getattr(torch.optim, optimizer)
    options = {} if optimizer == "AdamW" else {"decoupled_weight_decay": True}
    groups = [
        {"params": [p for n, p in model.items() if n != "free"], "weight_decay": 0.5},
        {"params": [model["free"]], "weight_decay": 0.0},
    ]
    made = kind(groups, 0.01, **options)
    replica = Replica(net, model, [made], algorithm)
    own = torch.Generator().manual_seed(net.rank)
    for _ in range(40):
        net.compute(0.1)
        for name in ("noisy", "free"):
            model[name].grad = torch.randn(32, generator=own)
        model["still"].grad = torch.zeros(32)
        replica.before_update(made)
        made.step()
        replica.after_update(made)
    factors = replica.parts[0].scaling.metrics()["step_scale"]
    replica.finish()
    return model, factors


@pytest.mark.parametrize(
    ("optimizer", "algorithm"), [("AdamW", APART), ("NAdam", APART), ("AdamW", TOLD)]
)
def test_a_weight_decay_beside_the_step_is_not_scaled(optimizer: str, algorithm: Algorithm) -> None:
    """It is as without the ranks, to the last digits; what has no gradient does not decay."""
    for model, factor in SimulatedWorld(4).run(weight_decay, optimizer, algorithm):
        assert factor > 1.05
        assert torch.equal(model["unused"], torch.ones(32))
        decayed = torch.full((32,), (1 - 0.01 * 0.5) ** 40)
        torch.testing.assert_close(model["still"].detach(), decayed, rtol=0, atol=1e-5)
