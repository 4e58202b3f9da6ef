"""Averages once per period: the outer optimizer, fragments, overlap, and where each update goes."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.primitives.periodic import PeriodicAverage
from lightning_dsgd.transport.simulated import SimulatedWorld

N = 100
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_fragments": 3},
    {"overlap_steps": 6},
    {"num_fragments": 2, "overlap_steps": 1},
    {"wire_dtype": "bfloat16"},
    {"wire_dtype": "int4", "overlap_steps": 4},
    {"wire_dtype": "int8", "num_fragments": 6, "overlap_steps": 1},
]
every_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "plain"
)


def step(algorithm: PeriodicAverage, x: Tensor, update: Tensor) -> None:
    algorithm.before_update(x, x[:0])
    x += update
    algorithm.after_update(x)


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


# ---- each update once ----


def wander(net: Any, options: dict[str, Any], seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random updates at random times, with pauses and resumes.

    What this rank began with and added, what it has and what is kept for it, and the consensus.
    """
    chance = random.Random(f"{seed}/{net.rank}")
    plan = random.Random(seed)  # of all ranks
    x = target(net.rank)
    added = x.clone()
    algorithm = LocalSGD(sync_period=6, **options)
    algorithm.start(net, x)
    seen = []
    for pause in range(5):
        for _ in range(chance.randrange(14)):
            net.compute(chance.choice([0.1, 0.1, 0.5, 1.0]))
            update = torch.full_like(x, chance.gauss(0, 1))
            update[chance.randrange(N)] = 30.0
            added += update
            step(algorithm, x, update)
        algorithm.settle(x)
        has = x.clone()
        if algorithm.pending is not None:
            begin, correction = algorithm.pending
            has[begin : begin + len(correction)] += correction
        if algorithm.kept is not None:
            has += algorithm.kept
        seen.append((added.clone(), has, algorithm.consensus(x)))
        if plan.random() < 0.5:
            state = algorithm.state_dict()
            algorithm.stop()
            algorithm = LocalSGD(sync_period=6, **options)
            algorithm.start(net.sub(f"again-{pause}"), x)
            algorithm.load_state_dict(state)
    algorithm.finish(x)
    return seen


@every_option
@pytest.mark.parametrize("world_size", [2, 5])
def test_each_update_counts_once_whatever_is_under_way(
    options: dict[str, Any], world_size: int
) -> None:
    for seed in range(2):
        world = SimulatedWorld(world_size, latency_s=0.01, bandwidth_bytes_s=3e3)
        for pause in zip(*world.run(wander, options, seed), strict=True):
            added, has, consensus = (torch.stack(each).mean(0) for each in zip(*pause, strict=True))
            torch.testing.assert_close(has, added, rtol=0, atol=1e-11)
            torch.testing.assert_close(consensus, added, rtol=0, atol=1e-11)


def resume(net: Any, options: dict[str, Any], stop_at: int | None) -> list[Tensor]:
    """Saved where a sum may be under way, and gone on from there."""
    options = {"sync_period": 6, "outer_lr": 0.9, "outer_momentum": 0.4, **options}
    x, goal, seen = torch.ones(N).double(), target(net.rank), []
    algorithm = DiLoCo(**options)
    algorithm.start(net, x)
    for k in range(16):
        if k == stop_at:
            algorithm.settle(x)
            state = algorithm.state_dict()
            algorithm.stop()
            x = x.clone()
            algorithm = DiLoCo(**options)
            algorithm.start(net.sub("again"), x)
            algorithm.load_state_dict(state)
        step(algorithm, x, 0.1 * (goal - x))
        seen.append(x.clone())
    algorithm.settle(x)
    algorithm.finish(x)
    return seen


@every_option
def test_resumed_equals_uninterrupted_to_the_bit_also_while_a_sum_is_under_way(
    options: dict[str, Any],
) -> None:
    straight = SimulatedWorld(3, latency_s=0.1).run(resume, options, None)
    for stop_at in (1, 4, 7, 12, 13):
        resumed = SimulatedWorld(3, latency_s=0.1).run(resume, options, stop_at)
        for xs, ys in zip(straight, resumed, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# ---- the outer optimizer ----


def descend(net: Any, algorithm: Callable[[], PeriodicAverage], num_steps: int) -> list[Tensor]:
    x, goal, seen = torch.zeros(N).double(), target(net.rank), []
    made = algorithm()
    made.start(net, x)
    for _ in range(num_steps):
        step(made, x, 0.1 * (goal - x))
        seen.append(x.clone())
    made.settle(x)
    made.finish(x)
    return seen


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_the_outer_optimizer_is_torchs_sgd_on_the_global_model(
    nesterov: bool, num_fragments: int
) -> None:
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
    x = torch.full((N,), float(net.rank))
    algorithm = DiLoCo(sync_period=2, outer_momentum=0.1)
    algorithm.start(net, x)
    algorithm.settle(x)
    x.fill_(5.0)
    algorithm.settle(x)
    for _ in range(4):
        step(algorithm, x, torch.zeros_like(x))
    algorithm.settle(x)
    algorithm.finish(x)
    return x


def test_training_begins_with_what_the_weights_are_at_the_first_step() -> None:
    for x in SimulatedWorld(3).run(begin_late):
        assert torch.equal(x, torch.full((N,), 5.0))


# ---- messages ----


def watch(net: Any, algorithm: Callable[[], PeriodicAverage]) -> tuple[list[int], float, float]:
    """The bytes of each of two later periods' steps, the seconds they took and were waited for."""
    x, made = torch.zeros(960), algorithm()
    made.start(net, x)
    period, sent = made.sync_period, []
    for k in range(3 * period):
        if k == period:
            begin, waited = net.now(), net.counters.wait_s
        net.compute(1.0)
        sent.append(net.counters.bytes_sent)
        step(made, x, torch.ones_like(x))
    net.compute(1.0)
    sent.append(net.counters.bytes_sent)
    figures = net.now() - begin - 1.0, net.counters.wait_s - waited
    made.settle(x)
    made.finish(x)
    return [later - earlier for earlier, later in pairwise(sent)][period:], *figures


def test_a_fragment_is_sent_at_a_time() -> None:
    whole, parts = (
        SimulatedWorld(2).run(watch, lambda n=n: LocalSGD(sync_period=8, num_fragments=n))[1][0]
        for n in (1, 4)
    )
    assert max(whole) == pytest.approx(960 * 4, abs=16)
    assert max(parts) == pytest.approx(960, abs=16)
    assert sum(parts) == pytest.approx(sum(whole), abs=100)
    assert [bool(sent) for sent in parts] == [False, True] * 8


def test_nobody_waits_for_a_sum_that_comes_in_time() -> None:
    def seconds(overlap_steps: int) -> float:
        world = SimulatedWorld(2, latency_s=0.1, bandwidth_bytes_s=2e3)  # about two steps
        make = lambda: LocalSGD(sync_period=4, overlap_steps=overlap_steps)  # noqa: E731
        return max(took for _, took, _ in world.run(watch, make))

    assert seconds(3) == pytest.approx(8.0)
    assert seconds(0) > 11.0


# ---- what cannot work, and what should not be done ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_fragments": 9}, "num_fragments must be at most sync_period, .*=9 .*=8; try .*=8"),
        ({"overlap_steps": 9}, "overlap_steps must be at most sync_period / num_fr.*; try .*=8"),
        ({"overlap_steps": 5, "num_fragments": 2}, "one sum travels at a time, .*; try .*=4"),
        ({"wire_dtype": "int2"}, 'wire_dtype must be "float32", "bfloat16", "int8" or "int4"'),
        ({"outer_momentum": 1.0}, "outer_momentum must be a number of at least 0 and below 1"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**options).check_hyperparameters()


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
        (LocalSGD(outer_lr=2.0), ["outer_lr must be below 2.00"]),
        (HPSGD(outer_lr=1.5, outer_momentum=0.9), ["outer_lr must be below 1.36"]),
        (HPSGD(max_local_steps=2, outer_momentum=0.9), ["with max_local_steps=2: .* 10.0 times"]),
        (HPSGD(outer_lr=0.7, outer_momentum=0.9), []),
    ],
)
def test_outer_rates_that_diverge_or_are_too_large_are_told(
    algorithm: Algorithm, expected: list[str]
) -> None:
    [texts] = SimulatedWorld(1).run(started, algorithm)
    assert len(texts) == len(expected)
    assert all(re.search(e, text) for e, text in zip(expected, texts, strict=True))


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov", "limit"), [(1.0, 0.9, True, 3.8 / 2.8), (1.0, 0.5, False, 3.0)]
)
def test_the_limit_is_that_of_a_quadratic(
    lr: float, momentum: float, nesterov: bool, limit: float
) -> None:
    """Each period reaches the minimum, at 0, exactly."""
    for rate, diverges in ((0.98 * limit, False), (1.02 * limit, True)):
        weight = torch.ones(1).double().requires_grad_()
        outer = torch.optim.SGD([weight], rate, momentum, nesterov=nesterov)
        for _ in range(2000):
            weight.grad = weight.detach().clone()
            outer.step()
        assert (weight.detach().abs() > 1.0).item() is diverges
