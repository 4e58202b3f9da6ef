"""Averages once per period: the outer optimizer, fragments, overlap, and where each update goes."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.primitives.called import Period
from lightning_dsgd.primitives.periodic import PeriodicAverage
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.rank import STEPPED, Rank

N = 100


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


# ---- the outer optimizer ----
def descend(net: Any, algorithm: Callable[[], PeriodicAverage], num_steps: int) -> list[Tensor]:
    rank, goal, seen = Rank(net, algorithm(), torch.zeros(N).double()), target(net.rank), []
    for _ in range(num_steps):
        rank.step(0.1 * (goal - rank.x))
        seen.append(rank.x.clone())
    rank.finish()
    return seen


@pytest.mark.parametrize(("nesterov", "num_fragments"), [(True, 2), (False, 1)])
def test_the_outer_optimizer_is_torchs_sgd(nesterov: bool, num_fragments: int) -> None:
    period, lr, momentum = 4, 0.8, 0.5

    def make() -> PeriodicAverage:
        return DiLoCo(period, lr, momentum, nesterov, num_fragments)

    ranks = SimulatedWorld(3).run(descend, make, 5 * period)
    starts = [0, N // 2] if num_fragments == 2 else [0]
    for begin, end in pairwise([*starts, N]):
        first = period * (starts.index(begin) + 1) // num_fragments  # the step of its first average
        model = torch.zeros(end - begin).double().requires_grad_()
        outer = torch.optim.SGD([model], lr, momentum, nesterov=nesterov)
        locals_ = [torch.zeros(end - begin).double() for _ in range(3)]
        for k in range(1, 5 * period + 1):
            for rank, x in enumerate(locals_):
                x += 0.1 * (target(rank)[begin:end] - x)
            if k % period == first % period:
                model.grad = model.detach() - torch.stack(locals_).mean(0)
                outer.step()
                for x in locals_:
                    x.copy_(model.detach())
            for rank, x in enumerate(locals_):
                found = ranks[rank][k - 1][begin:end]
                torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


def begin_late(net: Any) -> Tensor:
    """The weights are loaded after the start: that is no progress."""
    algorithm = DiLoCo(sync_period=2, outer_momentum=0.1)
    rank = Rank(net, algorithm, torch.full((N,), float(net.rank)))
    rank.settle()
    rank.x.fill_(5.0)
    rank.settle()
    for _ in range(4):
        rank.step()
    return rank.finish()


def test_training_begins_with_what_the_weights_are_at_the_first_step() -> None:
    for x in SimulatedWorld(3).run(begin_late):
        assert torch.equal(x, torch.full((N,), 5.0))


# ---- claimed batches ----
PERIODIC = "local_sgd:sync_period=4"
CALLED = (PERIODIC, f"{PERIODIC}:num_fragments=2")


@pytest.mark.parametrize(("spec", "is_called"), [(PERIODIC, False), *((s, True) for s in CALLED)])
def test_a_slow_rank_that_claims_holds_up_for_a_step(spec: str, is_called: bool) -> None:
    """Of 4 ranks that share 56 batches the last is half as fast: 16 s if nobody ever waits."""
    left = list(range(56))

    def train(net: Any) -> tuple[Tensor, float, int]:
        conditions = replace(STEPPED, claims_batches=is_called)
        rank = Rank(net, make_algorithm(spec), torch.zeros(N), conditions)
        num_own = 0
        while left:
            left.pop()
            rank.step(1.0, seconds=2.0 if net.rank == 3 else 1.0)
            num_own += 1
        rank.settle()
        seconds = net.now()
        rank.settle()  # once more, where all stand still already
        return rank.finish(), seconds, num_own

    ends, seconds, num_own = zip(*SimulatedWorld(4).run(train), strict=True)
    for x in ends:
        torch.testing.assert_close(x, torch.full((N,), 56 / 4))  # each update once
    assert sum(num_own) == 56
    assert (max(seconds) < 24) == is_called
    assert (num_own[3] < 12) == is_called


def step_two_parts(net: Any, seed: int) -> None:
    chance = random.Random(f"{seed}/{net.rank}")
    conditions = replace(STEPPED, claims_batches=True, is_whole=False)
    parts = [Rank(net.sub(p), LocalSGD(sync_period=4), torch.zeros(3), conditions) for p in "ab"]
    for step in range(48):
        parts[0].step(seconds=chance.uniform(0.5, 2.0))
        if step % 3 == 0:
            parts[1].step()


def test_nobody_waits_in_a_round_of_this_part_for_one_in_a_round_of_that() -> None:
    for seed in range(5):
        SimulatedWorld(3, latency_s=0.01).run(step_two_parts, seed)


# ---- a growing period ----
RATES = [0.0] * 2 + [1.0] * 6 + [0.25] * 16 + [0.0] * 80


@pytest.mark.parametrize("resumed_at", [None, 13])
@pytest.mark.parametrize("options", [{"overlap_steps": 1}, {"num_fragments": 2}])
def test_a_period_grows_as_the_rate_falls(options: Any, resumed_at: int | None) -> None:
    """Meetings are 2 steps apart, then 8 at a quarter of the rate, and 64 at none."""

    def train(net: Any) -> list[int]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        make = partial(LocalSGD, 2, growing_period=True, **options)
        rank, met = Rank(net, make(), torch.zeros(N), Conditions(optimizer=optimizer)), []
        for step, lr in enumerate(RATES):
            if step == resumed_at:
                rank.settle()
                rank.resume(make())
            optimizer.param_groups[0]["lr"] = lr
            before = rank.algorithm.round  # type: ignore[attr-defined]
            rank.step(float(net.rank))
            met += [step + 1] * (rank.algorithm.round > before)  # type: ignore[attr-defined]
        rank.finish()
        return met

    share = options.get("num_fragments", 1)
    expected, wish = [0], 2
    while (end := expected[-1] + wish // share) <= len(RATES):
        expected.append(end)
        highest = max(RATES[m - 1] for m in expected[1:])
        wish = 2 * round(min(max(1.0, (highest / 2 / max(RATES[end - 1], 1e-9)) ** 2), 32))
    for met in SimulatedWorld(3).run(train):
        assert met == expected[1:]


def test_a_period_grows_to_32_times_the_first_at_most() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    conditions = Conditions(optimizer=optimizer)
    period = Period(5, conditions, grows=True)
    for lr, expected in ((1.0, 5), (0.25, 20), (0.05, 160), (0.0, 160), (0.5, 5)):
        optimizer.param_groups[0]["lr"] = lr
        assert period.wish().tolist() == [expected, 1]
    resumed = Period(5, conditions, grows=True)
    optimizer.param_groups[0]["lr"] = 0.25
    resumed.load_state_dict(period.state_dict())
    assert resumed.wish().tolist() == [20, 1]  # the highest rate was another one
    period.take(torch.tensor([7, 20 + 10 + 10, 3]))  # and what else is counted
    assert period.steps == 13


# ---- messages ----
def seconds_of_two_periods(net: Any, overlap_steps: int) -> float:
    made = LocalSGD(sync_period=4, overlap_steps=overlap_steps)
    rank = Rank(net, made, torch.zeros(960))
    for k in range(12):
        if k == 4:
            begin: float = net.now()
        rank.step(1.0, seconds=1.0)
    took = net.now() - begin
    rank.finish()
    return took


def test_nobody_waits_for_a_sum_that_comes_in_time() -> None:
    def seconds(overlap_steps: int) -> float:
        world = SimulatedWorld(2, latency_s=0.1, bandwidth_bytes_s=2e3)  # about two steps
        return max(world.run(seconds_of_two_periods, overlap_steps))

    assert seconds(3) == pytest.approx(8.0)
    assert seconds(0) > 11.0


# ---- what should not be done ----
def started(net: Any, algorithm: Algorithm) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm.start(net, torch.zeros(4))
    algorithm.stop()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (DiLoCo(), []),
        (DiLoCo(sync_period=8), ["fewer than 30 local steps .*sync_period=8.* 7.0 times"]),
        (DiLoCo(sync_period=8, outer_momentum=0.5), []),
        (DiLoCo(outer_lr=1.5), ["outer_lr must be below 1.36 with this outer_momentum"]),
        (DiLoCo(outer_lr=1.5, outer_nesterov=False), []),
        (HPSGD(max_local_steps=2, outer_momentum=0.9), ["with max_local_steps=2: .* 10.0 times"]),
    ],
)
def test_outer_rates_that_are_too_large_are_told(algorithm: Algorithm, expected: list[str]) -> None:
    [texts] = SimulatedWorld(1).run(started, algorithm)
    assert len(texts) == len(expected)
    assert all(re.search(e, text) for e, text in zip(expected, texts, strict=True))
