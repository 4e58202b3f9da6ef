"""HPSGD: Equation (1).  Random schedules: `test_wait_avoiding.py`."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("optimizer", "num_steps", "outer"),
    [
        ("sgd", [25, 24, 23], (1.0, 0.0)),
        ("momentum", [25 - rank for rank in range(8)], (1.0, 0.0)),
        ("adam", [25], (1.0, 0.0)),
        ("adam", [0, 9, 20], (0.7, 0.9)),  # a rank without a batch
    ],
)
def test_equation_1_against_a_sequential_reference(
    optimizer: str, num_steps: list[int], outer: tuple[float, float]
) -> None:
    """For plain SGD the reference sums gradients, else the updates of each rank's optimizer.

    The outer optimizer is torch's.
    """
    world = SimulatedWorld(len(num_steps), latency_s=0.03, bandwidth_bytes_s=3e3)
    ranks, xs = zip(*world.run(descend, optimizer, num_steps, outer), strict=True)
    assert [sum(algorithm.counts) for algorithm in ranks] == num_steps
    expected = reference(optimizer, [[*algorithm.counts, 0] for algorithm in ranks], outer)
    assert len(ranks[0].models) == len(expected) >= 5
    for model, wanted in zip(ranks[0].models, expected, strict=True):
        torch.testing.assert_close(model, wanted, rtol=0, atol=1e-12)
    for x in xs:
        assert torch.equal(x, xs[0])
    torch.testing.assert_close(xs[0], expected[-1], rtol=0, atol=1e-12)


def test_a_rank_waits_once_it_has_made_as_many_steps_as_it_may() -> None:
    def train(net: Any) -> list[int]:
        algorithm = Recorded(max_local_steps=3)
        rank = Rank(net, algorithm, initial())
        for _ in range(10):
            rank.step(1.0, seconds=0.1)
        rank.finish()
        return algorithm.counts

    for counts in SimulatedWorld(2, latency_s=5.0).run(train):
        assert counts[:4] == [1, 3, 3, 3]


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
