"""Weights in half precision: what is done of them by step, and that it changes no bit."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.replica.wide import WideParameters
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.digits import DigitsData
from tests.algorithms.table import TABLE
from tests.support.fake_device import FakeDevice, parameters_allowed
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld

P, STEPS = 4, 24
AVERAGING = [name for name, row in TABLE.items() if row.make().traits.averages_weights]
NOW = ["diloco", "hpsgd", "wagma_group_period"]
MORE = {
    "local_sgd_scaled": "local_sgd:sync_period=4:scale_steps=true",
    "local_sgd_momentum": "local_sgd:sync_period=4:average_momentum=true",
    "sgp_momentum": "sgp:average_momentum=true",
    "popsgd_momentum": "popsgd:blocking=true:average_momentum=true",
    "wagma_of_nodes": "wagma:node_size=2",
    "wagma_of_nodes_in_pieces": "wagma:node_size=2:num_buckets=3",
    "sgp_of_nodes": "sgp:node_size=2",
}
SPECS = {name: TABLE[name].spec for name in AVERAGING} | MORE


class Digits:
    """One rank's training of a small network for digits, in half precision."""

    def __init__(self, net: Any, spec: str, dtype: torch.dtype) -> None:
        self.net, self.dtype = net, dtype
        self.chance = random.Random(f"{spec}/{net.rank}")
        self.generator = torch.Generator().manual_seed(net.rank)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        data = DigitsData()
        data.setup("fit")
        pairs = zip(*data.splits["train"], strict=True)
        self.images, self.digits = (torch.stack(each) for each in pairs)
        self.replica = Replica(net, self.model, [self.optimizer], make_algorithm(spec))
        self.replica.synchronize()

    def step(self) -> None:
        self.net.compute(self.chance.choice([0.1, 0.1, 0.1, 0.5]))
        some = torch.randint(len(self.images), (16,), generator=self.generator)
        images = self.images[some].flatten(1).to(self.dtype)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images).float(), self.digits[some]).backward()
        self.replica.before_update(self.optimizer)
        self.optimizer.step()
        self.replica.after_update(self.optimizer)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def train(net: Any, spec: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, float]]:
    """All that a rank has had of weights, and its figures."""
    digits, found = Digits(net, spec, dtype), []
    for number in range(STEPS):
        digits.step()
        found += digits.weights()
        if number == STEPS // 2:
            digits.replica.show_consensus()
            found += digits.weights()
            digits.replica.show_own()
    digits.replica.finish()
    return found + digits.weights(), digits.replica.metrics()


def train_all(
    spec: str, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[list[Tensor], dict[str, float]]]:
    return SimulatedWorld(P, latency_s=0.01, bandwidth_bytes_s=1e6).run(train, spec, dtype)


def pull_in_ten_kernels(weights: WideParameters) -> None:
    """What `WideParameters.pull` must equal to the bit."""
    x, p = weights.x, weights.home.x
    before = x.to(p.dtype)
    change = p.float().sub_(before).masked_fill_(p == before, 0)
    x.add_(change).masked_fill_((p == 0) & (before != 0), 0)


@cases("name", now=NOW, later=[name for name in SPECS if name not in NOW])
def test_no_bit_depends_on_how_seldom_weights_are_looked_at(name: str) -> None:
    """As with a pass before and after every update, for every strategy that averages weights."""
    with (
        mock.patch.object(WideParameters, "pull", pull_in_ten_kernels),
        mock.patch.object(Replica, "_must_look", return_value=True),
    ):
        eager = train_all(SPECS[name])
    for (found, figures), (expected, others) in zip(train_all(SPECS[name]), eager, strict=True):
        assert all(map(torch.equal, found, expected))
        assert figures == pytest.approx(others, abs=1e-9)
        assert not found[-2].equal(found[0])


class Watched(DiLoCo):
    """Looks at x before each update, which `DiLoCo` does not."""

    def before_update(self, x: Tensor, g: Tensor) -> None:
        super().before_update(x, g)
        self.seen = x.sum().item()


def test_a_class_of_another_package_has_newest_weights_before_updates() -> None:
    parameters = nn.ParameterList([torch.zeros(3).bfloat16()])
    optimizer = torch.optim.SGD(parameters, 1.0)

    def train(net: Any) -> None:
        replica = Replica(net, parameters, [optimizer], Watched())
        replica.synchronize()
        for number in range(1, 4):
            parameters[0].data += 1  # by a script, between two steps
            parameters[0].grad = torch.zeros(3).bfloat16()
            replica.before_update(optimizer)
            optimizer.step()
            replica.after_update(optimizer)
            assert replica.parts[0].algorithm.seen == 3.0 * number
        replica.stop()

    SimulatedWorld(1).run(train)


def resume_with_two_optimizers(net: Any) -> float:
    """A resume that waits for what is frozen; what another optimizer's weight is in the end."""
    first, second, frozen = weights = nn.ParameterList([torch.ones(1).bfloat16() for _ in range(3)])
    optimizers = [torch.optim.SGD([first, frozen], 1.0), torch.optim.SGD([second], 1.0)]

    def step(replica: Replica, number: int) -> None:
        for p in weights:
            p.grad = torch.full((1,), 0.25).bfloat16()
        replica.before_update(optimizers[number])
        optimizers[number].step()
        replica.after_update(optimizers[number])

    before = Replica(net.sub("before"), weights, optimizers, LocalSGD())
    before.synchronize()
    step(before, 0)
    before.settle()
    saved = before.state_dict(), before.names()
    before.stop()
    frozen.requires_grad_(False)
    replica = Replica(net.sub("after"), weights, optimizers, LocalSGD())
    replica.load_state_dict(*saved)
    frozen.requires_grad_(True)
    step(replica, 0)
    second.data.fill_(8.0)  # by a script, between the steps of two optimizers
    step(replica, 1)
    replica.stop()
    return second.item()


def test_a_resume_that_waited_overwrites_nothing_of_another_optimizer() -> None:
    assert SimulatedWorld(1).run(resume_with_two_optimizers) == [7.75]


# ---- what a step queues on a device ----


def passes(net: Any, fake: FakeDevice, spec: str) -> list[tuple[int, int]]:
    """How many passes over all weights each step makes before and after its update."""
    with parameters_allowed():
        weights = nn.ParameterList([nn.Parameter(torch.ones(64).bfloat16().to(fake.device))])
        optimizer = torch.optim.SGD(weights, 0.5, foreach=False)
        replica = Replica(net, weights, [optimizer], make_algorithm(spec))
        replica.synchronize()
        found, num = [], [0]

        def counting(kind: str) -> Any:
            really = getattr(WideParameters, kind)

            def count(given: WideParameters) -> None:
                queued = fake.num_queued
                really(given)
                num[0] += fake.num_queued - queued

            return mock.patch.object(WideParameters, kind, count)

        with counting("pull"), counting("push"):
            for _ in range(8):
                weights[0].grad = torch.ones_like(weights[0])
                num[0] = 0
                replica.before_update(optimizer)
                before, num[0] = num[0], 0
                optimizer.step()
                replica.after_update(optimizer)
                found.append((before, num[0]))
        replica.finish()
    return found


@cases(
    "spec",
    now=["diloco:sync_period=4"],
    later=["local_sgd", "noloco", "hpsgd", "wagma", "adpsgd", "popsgd", "sgp"],
)
def test_nothing_is_done_of_all_weights_before_an_update(spec: str) -> None:
    """But in the first step, where some algorithms copy the weights that training begins with."""
    for found in FakeWorld(timeout_s=30).run(2, passes, spec):
        assert [before for before, _ in found[1:]] == [0] * 7
        assert all(after >= 2 for _, after in found)


def frozen(net: Any) -> list[Tensor]:
    """The first layer's weights, which are frozen after some steps of the ranks' own."""
    digits = Digits(net, "local_sgd:sync_period=8", torch.bfloat16)
    for _ in range(3):
        digits.step()
    digits.optimizer.zero_grad()
    for p in list(digits.model.parameters())[:2]:
        p.requires_grad_(False)
    digits.step()
    digits.replica.stop()
    return digits.weights()[:2]


def test_what_is_frozen_is_the_same_on_all_ranks() -> None:
    first, *others = SimulatedWorld(P).run(frozen)
    for other in others:
        assert all(map(torch.equal, other, first))
