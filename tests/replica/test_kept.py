"""The metric `updates_kept`, of every strategy: on slow links, with late ranks and uneven data."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.replica.part import NUM_MEASURED, UpdatesKept
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.fits import some_now

WIDTH = 48  # more weights than are measured
SITUATIONS: dict[str, tuple[Callable[[random.Random, int], float], float]] = {
    "stragglers": (lambda chance, rank: chance.choice([0.1, 0.1, 0.5, 1.0]), 1e7),
    "slow link": (lambda chance, rank: chance.uniform(0.09, 0.11), 2e5),
    "slow rank": (lambda chance, rank: 0.1 if rank else 0.3, 1e7),
}
"""How long a step takes, and how many bytes a second pass."""
MORE = [
    *("wagma:overlap=true", "wagma:wire_dtype=int8", "wagma:node_size=2"),
    *("sgp:overlap=1", "sgp:node_size=2", "popsgd:blocking=true"),
    *("hpsgd:wire_dtype=int8", "local_sgd:sync_period=4:num_fragments=2:overlap_steps=2"),
    *("wagma:scale_steps=true", "sgp:overlap=1:scale_steps=true"),
    "diloco:sync_period=4:outer_lr=1.0:outer_momentum=0.0",
]
SPARSE = [name for name in ALGORITHMS if issubclass(ALGORITHMS[name], ErrorFeedback)]
OWN = [*SPARSE, "eager_sgd"]  # which say it of gradients
PLAIN = [name for name in ALGORITHMS if name not in (*OWN, "diloco", "noloco")]


def test_a_state_of_another_layout_is_left_alone() -> None:
    x, longer = torch.arange(10.0), torch.arange(12.0)
    kept, of_another = UpdatesKept(x), UpdatesKept(longer)
    kept.load(of_another.state(), x)
    assert torch.equal(kept.state()["begin"], x.double())
    kept.load(UpdatesKept(x + 1).state(), x)
    assert torch.equal(kept.state()["begin"], x.double() + 1)


class Run:
    """One rank's training: a regression whose goal differs between ranks."""

    def __init__(
        self,
        net: Any,
        spec: str,
        situation: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net, self.spec = net, spec
        self.step_s = SITUATIONS[situation][0]
        self.chance = random.Random(f"{situation}/{net.rank}")
        self.generator = torch.Generator().manual_seed(net.rank)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02)
        self.replica = self.new("begin")
        self.replica.synchronize()
        self.begin, self.updates = self.weights(), torch.zeros(WIDTH * WIDTH + WIDTH).double()

    def new(self, channel: str) -> Replica:
        return Replica(
            self.net.sub(channel), self.model, [self.optimizer], make_algorithm(self.spec)
        )

    @property
    def algorithm(self) -> Algorithm:
        return self.replica.parts[0].algorithm

    def weights(self) -> Tensor:
        return self.replica.parts[0].x.detach().double()

    def steps(self, num: int) -> float | None:
        """So many, and then the metric; evaluation is left again."""
        for _ in range(num):
            self.net.compute(self.step_s(self.chance, self.net.rank))
            x = torch.randn(8, WIDTH, generator=self.generator).to(self.model.weight.dtype)
            self.optimizer.zero_grad()
            goal = torch.roll(x, self.net.rank, 1) + 1
            (self.model(x) - goal).pow(2).mean().backward()
            self.replica.before_update(self.optimizer)
            self.updates -= self.weights()
            self.optimizer.step()
            self.updates += self.weights()
            self.replica.after_update(self.optimizer)
        self.replica.show_consensus()
        share = self.replica.metrics().get("updates_kept")
        self.shown = self.weights()
        self.replica.show_own()
        return share

    def resume(self) -> None:
        """In a replica that knows only what was saved."""
        saved = copy.deepcopy(self.replica.state_dict())
        names, updates = self.replica.names(), self.replica.updates()
        self.replica.stop()
        self.replica = self.new("resumed")
        self.replica.load_state_dict(saved, names, updates)


def train(
    net: Any, spec: str, situation: str, uneven: bool, resumes: bool, dtype: torch.dtype
) -> list[float | None]:
    run = Run(net, spec, situation, dtype)
    shares = []
    for phase in range(2):
        if resumes and phase:
            run.resume()
        shares.append(run.steps(run.chance.randrange(6, 14) if uneven else 10))
    run.replica.stop()
    return shares


def shares_in(
    situation: str,
    spec: str,
    dtype: torch.dtype = torch.float32,
    *,
    uneven: bool = False,
    resumes: bool = False,
) -> list[float]:
    world = SimulatedWorld(4, latency_s=0.01, bandwidth_bytes_s=SITUATIONS[situation][1])
    first, *others = world.run(train, spec, situation, uneven, resumes, dtype)
    if spec != "eager_sgd":  # each of whose ranks tells its own
        assert others == [first] * 3  # the same on all ranks
    return first


@some_now("spec", PLAIN + MORE, now=["allreduce", "popsgd", "wagma", *MORE[:1]])
def test_what_loses_no_update_is_seen_to_keep_all(spec: str) -> None:
    for situation in SITUATIONS:
        shares = shares_in(situation, spec, uneven=situation == "stragglers")
        assert shares == [pytest.approx(1.0, abs=1e-3)] * 2, situation
    halves = shares_in("stragglers", spec, torch.bfloat16)
    near = (
        1e-3 if make_algorithm(spec).traits.averages_weights else 0.01
    )  # its mean is rounded once
    assert halves == [pytest.approx(1.0, abs=near)] * 2, "bfloat16"


@pytest.mark.parametrize("spec", ["wagma:paper=true", "hpsgd:outer_momentum=0.5", "oktopk"])
def test_a_resume_goes_on_counting(spec: str) -> None:
    near = 0.05 if "paper" in spec else 1e-3  # who is late differs a little
    undisturbed, resumed = shares_in("slow rank", spec), shares_in("slow rank", spec, resumes=True)
    assert resumed == [pytest.approx(share, abs=near) for share in undisturbed]


def resume(net: Any, resumes: bool) -> tuple[Tensor, Tensor]:
    """What a rank ends with in bfloat16, saved and resumed while the consensus is shown, or not."""
    run = Run(net, "local_sgd:sync_period=3", "slow rank", dtype=torch.bfloat16)
    run.steps(4)
    if resumes:
        run.replica.show_consensus()
        saved, names = copy.deepcopy(run.replica.state_dict()), run.replica.names()
        run.replica.show_own()
        run.replica.stop()
        run.replica = run.new("resumed")
        run.replica.load_state_dict(saved, names)
    run.steps(4)
    run.replica.stop()
    return run.weights(), run.model.weight.detach().flatten().clone()


def test_a_resume_has_what_was_rounded_off() -> None:
    straight, resumed = (SimulatedWorld(2).run(resume, resumes) for resumes in (False, True))
    for (x, p), (same_x, same_p) in zip(straight, resumed, strict=True):
        assert x.equal(same_x)
        assert p.equal(same_p)
        assert (x[: len(p)] != p.double()).any()


def compare_with_all(net: Any, spec: str, situation: str) -> tuple[float | None, Tensor, Tensor]:
    run = Run(net, spec, situation)
    share = run.steps(12)
    run.replica.stop()
    return share, run.shown - run.begin, run.updates


@pytest.mark.parametrize(
    "spec", ["wagma:paper=true", "oktopk:local_steps=4:density=0.2", "hpsgd:outer_momentum=0.5"]
)
def test_it_is_what_all_entries_say(spec: str) -> None:
    """Of updates that are lost, held back or multiplied; from a part of the entries."""
    assert WIDTH * WIDTH > 2 * NUM_MEASURED
    for situation in SITUATIONS:
        world = SimulatedWorld(4, latency_s=0.01, bandwidth_bytes_s=SITUATIONS[situation][1])
        shares, ways, updates = zip(*world.run(compare_with_all, spec, situation), strict=True)
        mean = torch.stack(updates).mean(0)
        exact = float(ways[0] @ mean / (mean @ mean))
        assert abs(exact - 1) > 0.05
        assert shares == (pytest.approx(exact, abs=0.05),) * 4


def test_late_gradients_are_told() -> None:
    assert all(0.6 < share <= 1 for share in shares_in("stragglers", "eager_sgd"))
