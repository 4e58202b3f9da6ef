"""HPSGD: Equation (1), and no waiting.  Random schedules: `test_wait_avoiding.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import Transport
from tests.support.rank import Rank

N = 24
LR = 0.05


@dataclass
class Recorded(HPSGD):
    """Writes down, for each round, what was handed over and the global model that came back."""

    def start(self, net: Transport, x: Tensor, *args: Any) -> None:
        super().start(net, x, *args)
        self.counts: list[int] = []
        self.models: list[Tensor] = []

    def hand_over(self, x: Tensor, *, stands_still: bool) -> None:
        self.counts.append(self.num_local_steps)
        super().hand_over(x, stands_still=stands_still)

    def merge(self, x: Tensor) -> bool:
        is_last = super().merge(x)
        self.models.append(self.merged if is_last else self.handed_over + self.merged)
        self.models[-1] = self.models[-1].clone()
        return is_last


# ---- Equation (1) ----
def gradient(rank: int, step: int, x: Tensor) -> Tensor:
    """Of a function of its own on each rank and step, and not linear."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.sin(x + torch.randn(N, generator=generator).double()) + 0.1 * rank * x


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda xs: SGD(xs, LR),
    "momentum": lambda xs: SGD(xs, LR, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda xs: Adam(xs, LR),
}


def initial() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(5)).double()


def descend(
    net: Any, optimizer: str, num_steps: list[int], outer: tuple[float, float] = (1.0, 0.0)
) -> tuple[Recorded, Tensor]:
    x = initial()
    algorithm = Recorded(outer_lr=outer[0], outer_momentum=outer[1])
    algorithm.start(net, x)
    local = OPTIMIZERS[optimizer]([x])
    for k in range(num_steps[net.rank]):
        net.compute(0.1 * (1 + (k * 3 + net.rank) % 4))
        algorithm.before_update(x, x[:0])
        x.grad = gradient(net.rank, k, x)
        local.step()
        algorithm.after_update(x)
    algorithm.settle(x)
    algorithm.finish(x)
    return algorithm, x


def reference(
    optimizer: str, counts: list[list[int]], outer: tuple[float, float] = (1.0, 0.0)
) -> list[Tensor]:
    """The global models, round by round; `counts`: of each rank, the steps in each round."""
    world_size = len(counts)
    model = initial()
    replicas = [initial() for _ in counts]
    locals_ = [OPTIMIZERS[optimizer]([replica]) for replica in replicas]
    done = [0] * world_size
    sums = [torch.zeros(N).double() for _ in counts]  # of updates; in flight
    outer_parameter = model.clone()
    outer_optimizer = SGD([outer_parameter], outer[0], outer[1], nesterov=outer[1] > 0)
    models = []
    for round_ in range(len(counts[0])):
        filling = [torch.zeros(N).double() for _ in counts]
        for rank in range(world_size):
            for _ in range(counts[rank][round_]):
                x = replicas[rank]
                x.grad = gradient(rank, done[rank], x)
                if optimizer == "sgd":  # as in the paper: sums of gradients
                    filling[rank] += -LR * x.grad
                    locals_[rank].step()
                else:
                    before = x.clone()
                    locals_[rank].step()
                    filling[rank] += x - before
                done[rank] += 1
        if round_:  # the last round's sum is there: all switch
            if any(counts[rank][round_ - 1] for rank in range(world_size)):
                outer_parameter.grad = -torch.stack(sums).mean(0)
                outer_optimizer.step()
                model = outer_parameter.clone()
            models.append(model)
            for rank in range(world_size):
                replicas[rank].copy_(model + filling[rank])
        sums = filling
    return models


def trained(
    num_steps: list[int], optimizer: str, outer: tuple[float, float] = (1.0, 0.0)
) -> tuple[list[Recorded], list[Tensor]]:
    world = SimulatedWorld(len(num_steps), latency_s=0.03, bandwidth_bytes_s=3e3)
    ranks = world.run(descend, optimizer, num_steps, outer)
    assert all(torch.equal(x, ranks[0][1]) for _, x in ranks)
    return [algorithm for algorithm, _ in ranks], [x for _, x in ranks]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_equation_1_against_a_sequential_reference(world_size: int, optimizer: str) -> None:
    """For plain SGD the reference sums gradients, else the updates of each rank's optimizer."""
    num_steps = [25 - rank for rank in range(world_size)]
    ranks, xs = trained(num_steps, optimizer)
    counts = [algorithm.counts for algorithm in ranks]
    assert [sum(c) for c in counts] == num_steps
    expected = reference(optimizer, [[*c, 0] for c in counts])
    assert len(ranks[0].models) == len(expected) >= 5
    for model, wanted in zip(ranks[0].models, expected, strict=True):
        torch.testing.assert_close(model, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(xs[0], expected[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("outer", [(0.7, 0.9), (0.5, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("num_steps", [[25, 24, 25], [0, 9, 20]])
def test_the_outer_optimizer_is_nesterov(outer: tuple[float, float], num_steps: list[int]) -> None:
    """Against torch's; also with a rank that has no batch at all."""
    ranks, xs = trained(num_steps, "adam", outer)
    expected = reference("adam", [[*a.counts, 0] for a in ranks], outer)
    for model, wanted in zip(ranks[0].models, expected, strict=True):
        torch.testing.assert_close(model, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(xs[0], expected[-1], rtol=0, atol=1e-12)


# ---- nobody waits ----
def measure_sync(net: Any) -> float:
    words, x = torch.zeros(2, dtype=torch.int64), torch.zeros(N)
    net.all_reduce(words).wait()
    net.all_reduce(x).wait()
    return net.now()


def run_steps(
    net: Any, make: Callable[[], Any], step_s: list[float], num_steps: int
) -> tuple[float, float, dict[str, float]]:
    rank = Rank(net, make(), torch.zeros(N))
    for _ in range(num_steps):
        rank.step(-1.0, seconds=step_s[net.rank])
    seconds, waited = net.now(), net.counters.wait_s
    rank.finish()
    return seconds, waited, rank.algorithm.metrics()


@pytest.mark.parametrize(("k", "world_size"), [(0.4, 3), (1.3, 4), (3.5, 3), (8.2, 4)])
def test_the_trainer_never_waits_and_local_steps_follow_the_link(k: float, world_size: int) -> None:
    """k = t_sync / t_train, with steps of 200 ms."""
    [t_sync, *_] = SimulatedWorld(world_size, 1e-3, 1e3).run(measure_sync)
    step_s = t_sync / k
    world = SimulatedWorld(world_size, 1e-3, 1e3)
    num_steps = 40 * math.ceil(k)
    for seconds, waited, figures in world.run(run_steps, HPSGD, [step_s] * world_size, num_steps):
        assert waited == 0
        assert seconds == pytest.approx(num_steps * step_s, rel=1e-3)
        assert figures["local_steps_per_sync"] == pytest.approx(math.ceil(k), rel=0.05)


@dataclass
class Ahead(HPSGD):
    longest = 0

    def hand_over(self, x: Tensor, *, stands_still: bool) -> None:
        self.longest = max(self.longest, self.num_local_steps)
        super().hand_over(x, stands_still=stands_still)

    def metrics(self) -> dict[str, float]:
        return {"longest": self.longest}


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_max_local_steps_bounds_how_far_a_rank_runs_ahead(bound: int) -> None:
    """On a link where the sum takes longer than so many steps."""
    [t_sync, *_] = SimulatedWorld(4, 1e-3, 1e3).run(measure_sync)
    step_s = t_sync / 8.2
    world = SimulatedWorld(4, 1e-3, 1e3)
    ranks = world.run(run_steps, lambda: Ahead(max_local_steps=bound), [step_s] * 4, 40)
    for seconds, waited, figures in ranks:
        assert figures["longest"] == bound
        assert waited > 0
        assert seconds == pytest.approx(40 * step_s + waited, rel=1e-3)


# ---- standing still, saving, failing ----
def stand_still(net: Any) -> tuple[Tensor, list[int]]:
    rank, sent = Rank(net, HPSGD(), initial() + net.rank), []
    for _ in range(3):
        rank.step(1.0)
    for _ in range(3):
        rank.settle()
        sent.append(net.counters.bytes_sent)
    return rank.finish(), sent


def test_standing_still_again_sends_three_words_and_changes_nothing() -> None:
    ranks = SimulatedWorld(3).run(stand_still)
    for x, _ in ranks:
        assert torch.equal(x, ranks[0][0])
    words = 3 * 2 / 3 * 2 * 8  # of each rank in the mean
    for before, after in ((0, 1), (1, 2)):
        assert sum(sent[after] - sent[before] for _, sent in ranks) == pytest.approx(3 * words)


def test_as_printed_a_replica_goes_on_from_the_global_model_alone() -> None:
    def train(net: Any) -> list[float]:
        rank = Rank(net, HPSGD(paper=True), torch.zeros(1).double())
        seen = []
        for step in range(3):  # a sum takes less than a step
            rank.step(float(net.rank + 1) * 10.0**step, seconds=1.0)
            seen.append(float(rank.x))
        return [*seen, float(rank.finish())]

    # Each step is lost to its own rank until the mean of it has come back.
    assert SimulatedWorld(2).run(train) == [[0.0, 1.5, 16.5, 166.5]] * 2
