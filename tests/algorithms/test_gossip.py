"""Gossip conserves the mean, is nowhere held up, and does what its papers say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.primitives import topology
from lightning_dsgd.simulated import SimulatedWorld
from tests.algorithms.table import Row
from tests.algorithms.test_algorithms import run_in
from tests.support import matrices
from tests.support.rank import Rank
from tests.support.thorough import cases, tries

N = 12
LR = 0.1


def whole_numbers(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (N,), generator=generator).double()


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


# ---- each update once ----
@pytest.mark.parametrize(
    "spec",
    [
        *(f"sgp:topology={graph}:num_peers=2:overlap=3" for graph in topology.GRAPHS),
        "sgp:num_peers=2:wire_dtype=int8",
        *("popsgd:wire_dtype=int8", "popsgd:blocking=true:topology=cycle:seed=5"),
    ],
)
def test_no_update_is_lost_on_any_graph(spec: str) -> None:
    for mean, ends, figures in run_in("late messages", Row(spec), 5):
        for end in ends:
            torch.testing.assert_close(end, mean, rtol=0, atol=1e-12)
        weights = [each.get("push_weight", 1.0) for each in figures]
        assert sum(weights) == pytest.approx(5, abs=1e-12)  # nothing is under way


# ---- SGP: the recursion ----


def gradient(z: Tensor, rank: int) -> Tensor:
    return (z - target(rank)) * (1 + rank % 3)


def descend(
    net: Any, make: Callable[[], Algorithm], num_steps: int, momentum: float
) -> list[Tensor]:
    """The weights after every step, on a quadratic that is another one on every rank."""
    parameter = torch.nn.Parameter(target(100))
    optimizer = torch.optim.SGD([parameter], LR, momentum=momentum, nesterov=True)
    rank, xs = Rank(net, make(), parameter.data), []
    for _ in range(num_steps):
        parameter.grad = gradient(rank.x, net.rank)
        rank.algorithm.before_update(rank.x, parameter.grad)
        optimizer.step()
        rank.algorithm.after_update(rank.x)
        xs.append(rank.x.clone())
    return [*xs, rank.finish()]


@pytest.mark.parametrize("graph", topology.GRAPHS)
@pytest.mark.parametrize(("num_peers", "world_size"), [(1, 2), (2, 5)])
def test_with_nesterov_it_is_algorithm_2(graph: str, num_peers: int, world_size: int) -> None:
    m, num_steps = 0.9, 15
    ranks = SimulatedWorld(world_size).run(
        descend, lambda: SGP(num_peers=num_peers, topology=graph), num_steps, m
    )
    x = torch.stack([target(100)] * world_size)
    w = torch.ones(world_size, 1).double()
    u, z = torch.zeros_like(x), x.clone()
    for k in range(num_steps):
        g = torch.stack([gradient(z[rank], rank) for rank in range(world_size)])
        u = m * u + g
        x = x - LR * (m * u + g)
        rows = matrices.mixing_matrix(graph, k, world_size, num_peers)
        p = torch.tensor(rows, dtype=torch.float64)
        x, w = p @ x, p @ w
        z = x / w
        given = torch.stack([xs[k] for xs in ranks])
        torch.testing.assert_close(given, z, rtol=0, atol=1e-12)
    mean = x.sum(0) / world_size
    for xs in ranks:
        torch.testing.assert_close(xs[-1], mean, rtol=0, atol=1e-12)


@dataclass
class Pushed:
    """What became of one rank that has pushed."""

    own: Tensor
    """What it began with and added."""
    end: Tensor
    least: float
    """Its smallest push weight."""
    largest: float
    """The largest magnitude of its weights at any time."""


def push_on(
    net: Any, spec: str, count: int, seconds: float, dtype: torch.dtype, lr: float | None = None
) -> Pushed:
    """Adds random updates, or descends on a quadratic where there is a learning rate."""
    draw = torch.Generator().manual_seed(net.rank)
    rank = Rank(net, make_algorithm(spec), target(net.rank).to(dtype))
    own, least, largest = rank.x.to(torch.float64, copy=True), 1.0, 0.0
    for _ in range(count):
        update = torch.randn(N, generator=draw).to(dtype)
        if lr is not None:
            update = (target(100 + net.rank).to(dtype) - rank.x) * lr
        own += update
        rank.step(update, seconds=seconds)
        least = min(least, rank.algorithm.metrics()["push_weight"])
        largest = max(largest, float(rank.x.abs().max()))
    return Pushed(own, rank.finish(), least, largest)


def push_all(
    spec: str,
    counts: Sequence[int],
    seconds: Sequence[float],
    dtype: torch.dtype,
    latency_s: float = 0.01,
    lr: float | None = None,
) -> tuple[float, float, float]:
    """How far the consensus is off the mean, the least push weight, and the largest magnitude."""

    def run(net: Any) -> Pushed:
        return push_on(net, spec, counts[net.rank], seconds[net.rank], dtype, lr)

    ranks = SimulatedWorld(len(counts), latency_s, 1e6).run(run)
    mean = torch.stack([each.own for each in ranks]).mean(0)
    off = max(float((each.end - mean).abs().max()) for each in ranks)
    return off, min(each.least for each in ranks), max(each.largest for each in ranks)


def least_push_weight(num_peers: int, overlap: int) -> float:
    """p^2 / (1 + (1 - p) overlap), as the head of `sgp.py` promises."""
    return 1 / ((num_peers + 1) * (num_peers + 1 + num_peers * overlap))


@pytest.mark.parametrize("seed", tries(60, fast=10))
def test_a_push_weight_has_a_lower_bound_on_every_schedule(seed: int) -> None:
    """Ranks 1000 times slower than others, without any batches, and messages that come late.

    The mean is off by the rounding of the largest weights alone: by no more than ten units in
    their last place.  A rank with a small push weight w moves z by 1 / w of its updates.  With a
    w of 1e-5 z was in the millions, so the mean was off by 1e-9 in fp64, and no share was lost.
    """
    chance = random.Random(seed)
    num_peers, overlap = chance.choice([1, 1, 2]), chance.choice([0, 1, 2, 5, 8])
    graph = chance.choice(["exponential", "ring", "complete", "bipartite_exponential"])
    dtype = chance.choice([torch.float32, torch.float64])
    off, least, largest = push_all(
        f"sgp:topology={graph}:num_peers={num_peers}:overlap={overlap}",
        [0, *(chance.choice([0, 1, 3, 10, 20, 60]) for _ in range(7))],
        [chance.choice([0.01, 0.1, 0.1, 1.0, 10.0]) for _ in range(8)],
        dtype,
        latency_s=chance.choice([0.001, 0.1, 1.0]),
    )
    assert least >= least_push_weight(num_peers, overlap) * (1 - 1e-9)
    assert off <= 10 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("seed", tries(20, fast=4))
def test_where_nothing_bounds_the_push_weight_the_mean_is_off_by_rounding_alone(seed: int) -> None:
    """8 ranks, one of them without batches: on random graphs, and with `paper=True`."""
    chance = random.Random(seed)
    spec = chance.choice(
        [
            *("sgp:topology=random", "sgp:topology=random_exponential:overlap=2"),
            *(f"sgp:paper=true:overlap={overlap}" for overlap in (2, 5)),
        ]
    )
    dtype = chance.choice([torch.float32, torch.float64])
    off, _, largest = push_all(
        spec,
        [0, *(chance.choice([1, 10, 20, 60]) for _ in range(7))],
        [chance.choice([0.01, 0.1, 0.1, 1.0, 10.0]) for _ in range(8)],
        dtype,
        latency_s=chance.choice([0.001, 0.1, 1.0]),
    )
    assert off <= 10 * torch.finfo(dtype).eps * largest


def test_a_slow_rank_starves_nobody() -> None:
    """Here w was 1e-5 after seven ranks had given away all that they had, and z was infinite."""
    off, least, _ = push_all(
        "sgp:topology=ring:overlap=5", [50] * 8, [10.0] + [0.1] * 7, torch.float32, lr=0.1
    )
    assert least >= least_push_weight(1, 5)
    assert off < 1e-5


# ---- pairs: PopSGD and AD-PSGD ----
def meet(net: Any, num_steps: int) -> tuple[list[Tensor], list[int]]:
    algorithm = PopSGD(blocking=True, seed=3)
    rank, xs, clocks = Rank(net, algorithm, whole_numbers(net.rank)), [], []
    for _ in range(num_steps):
        net.compute(0.1 * (1 + net.rank))
        rank.x += net.rank
        rank.step()
        xs.append(rank.x.clone())
        clocks.append(algorithm.clock)
    rank.finish()
    return xs, clocks


@pytest.mark.parametrize("world_size", [5, 8])
def test_partners_hold_the_same_bits_and_the_lower_tick_moves_on(world_size: int) -> None:
    ranks = SimulatedWorld(world_size).run(meet, 30)
    x = [whole_numbers(rank) for rank in range(world_size)]
    ticks = [0] * world_size
    for k in range(30):
        partners = topology.random_partners(k, world_size, seed=3)
        half = [x[rank] + rank for rank in range(world_size)]
        x = [(half[rank] + half[p]) / 2 for rank, p in enumerate(partners)]
        for a, b in enumerate(partners):
            if a < b:
                ticks[a if ticks[a] <= ticks[b] else b] += 1
        assert all(torch.equal(ranks[rank][0][k], x[rank]) for rank in range(world_size))
        assert [ranks[rank][1][k] for rank in range(world_size)] == ticks
    assert sum(ticks) == 30 * (world_size // 2)
    assert max(ticks) - min(ticks) <= 6


def meet_apart(net: Any, where: list[int], distance: float, s: float) -> tuple[Tensor, int]:
    """Half of these entries are so far from rank 0's, the others as far on the other side."""
    algorithm = PopSGD(blocking=True, wire_dtype="int8")
    x = torch.zeros(2100).double()
    x[where[::2]], x[where[1::2]] = distance * net.rank, -distance * net.rank
    rank = Rank(net, algorithm, x)
    algorithm.exponent = int(math.log2(s))
    rank.step()
    return x, net.counters.bytes_sent


@pytest.mark.parametrize("where", [[7], [0, 2099], [3, 3 + 1024, 5, 5 + 1024]])
@pytest.mark.parametrize("distance", [127.0, 128.0, -128.0, 256.0, 2.0**70])
def test_a_byte_that_is_too_small_is_noticed_on_both_sides(
    distance: float, where: list[int]
) -> None:
    s = 2.0**-40
    (x, sent), (y, other) = SimulatedWorld(2).run(meet_apart, where, distance * s, s)
    assert x.equal(y)
    assert x[where].abs().eq(abs(distance) * s / 2).all()
    in_bytes = len(x) + 2056 + 16
    assert sent == other == in_bytes + (0 if abs(distance) < 128 else x.nbytes)


def agree(net: Any, spec: str, num_steps: int) -> Tensor:
    rank = Rank(net, make_algorithm(spec), target(net.rank))
    for _ in range(num_steps):
        rank.step(seconds=1.0)
    own = rank.settle()
    rank.finish()
    return own


SPECS = ["popsgd:wire_dtype=int8", "adpsgd", "popsgd:blocking=true:topology=cycle"]


@pytest.mark.parametrize("spec", SPECS)
@cases("world_size", now=[3], later=[8])
def test_pairs_bring_all_ranks_together(spec: str, world_size: int) -> None:
    begin = torch.stack([target(rank) for rank in range(world_size)])
    ranks = SimulatedWorld(world_size).run(agree, spec, 160)
    assert torch.stack(ranks).std(0).mean() < 0.02 * begin.std(0).mean()
