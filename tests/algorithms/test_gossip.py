"""Gossip conserves the mean, is nowhere held up, and does what its papers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.primitives import topology
from lightning_dsgd.simulated import SimulatedWorld
from tests.algorithms.table import Row
from tests.algorithms.test_algorithms import run_in
from tests.support import matrices
from tests.support.rank import Rank
from tests.support.thorough import cases

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
        *(f"sgp:topology={graph}:num_peers=2" for graph in topology.GRAPHS),
        *(f"sgp:topology={graph}:overlap=3" for graph in topology.GRAPHS),
        *("popsgd:wire_dtype=int8", "popsgd:blocking=true:topology=cycle:seed=5"),
    ],
)
@cases("world_size", now=[5], later=[8])
def test_no_update_is_lost_on_any_graph(spec: str, world_size: int) -> None:
    for mean, ends, figures in run_in("late messages", Row(spec), world_size):
        for end in ends:
            torch.testing.assert_close(end, mean, rtol=0, atol=1e-12)
        weights = [each.get("push_weight", 1.0) for each in figures]
        assert sum(weights) == pytest.approx(world_size, abs=1e-12)  # nothing is under way


def take_nothing(net: Any, spec: str, counts: list[int]) -> None:
    """Trains on an empty shard, with as many steps as this rank has, between two settlements."""
    rank = Rank(net, make_algorithm(spec), torch.zeros(0))
    for _ in range(2):
        for _ in range(counts[net.rank]):
            rank.descend(torch.zeros(0), LR, seconds=0.1)
        rank.settle()
    rank.finish()


@pytest.mark.parametrize("spec", ["dpsgd", "sgp", "sgp:overlap=1", "popsgd:blocking=true"])
@pytest.mark.parametrize("counts", [[1, 0], [2, 0, 1]])
def test_an_empty_shard_holds_nobody_up(spec: str, counts: list[int]) -> None:
    SimulatedWorld(len(counts)).run(take_nothing, spec, counts)


# ---- SGP: the recursion ----
def push_on(net: Any, spec: str, num_steps: int) -> tuple[float, Tensor]:
    """The least push weight, and the consensus, where the last rank stops after three steps."""
    rank, least = Rank(net, make_algorithm(spec), whole_numbers(net.rank).float()), 1.0
    for _ in range(num_steps if net.rank < net.world_size - 1 else 3):
        rank.step()
        least = min(least, rank.algorithm.metrics()["push_weight"])
    return least, rank.finish()


@pytest.mark.parametrize("graph", topology.GRAPHS)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_rank_that_gets_nothing_any_more_keeps_its_weight(graph: str, overlap: int) -> None:
    mean = sum(whole_numbers(rank) for rank in range(5)) / 5
    spec = f"sgp:topology={graph}:overlap={overlap}"
    for least, end in SimulatedWorld(5).run(push_on, spec, 200):
        assert least >= 0.5 ** (overlap + 2)
        torch.testing.assert_close(end, mean.float(), rtol=1e-4, atol=1e-2)


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
@pytest.mark.parametrize("num_peers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
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


def with_late_messages(net: Any, overlap: int) -> tuple[float, float]:
    rank, began = Rank(net, SGP(overlap=overlap), target(net.rank)), net.now()
    for _ in range(12):
        rank.step(seconds=1.0)
    took, late = net.now() - began, rank.algorithm.metrics().get("staleness", 0.0)
    rank.finish()
    return took, late


def test_with_overlap_nobody_waits_for_messages_that_take_less() -> None:
    for overlap, latency, steps in ((1, 0.9, 12.0), (2, 1.9, 12.0), (0, 0.5, 18.0)):
        for took, late in SimulatedWorld(8, latency_s=latency).run(with_late_messages, overlap):
            assert took == pytest.approx(steps, abs=0.01)
            assert late == pytest.approx(overlap, abs=0.2)


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


@pytest.mark.parametrize("world_size", [2, 5, 8, 9])
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


def meet_in_bytes(net: Any, jump: float) -> list[tuple[Tensor, int, int]]:
    """What a rank has after each meeting, its exponent, and what it sent; rank 1 jumps once."""
    algorithm = PopSGD(blocking=True, wire_dtype="int8")
    rank, history = Rank(net, algorithm, target(net.rank).repeat(1000)), []
    for step in range(6):
        before = net.counters.bytes_sent
        if net.rank == 1 and step == 4:
            rank.x[::7] += jump
            rank.x[1::7] -= jump  # so that the sum of all is none the wiser
        rank.step()
        sent = net.counters.bytes_sent - before
        history.append((rank.x.clone(), algorithm.exponent, sent))
    rank.finish()
    return history


@pytest.mark.parametrize("jump", [0.0, 100.0])
def test_a_byte_tells_the_way_to_the_partner_or_the_weights_are_sent_in_full(jump: float) -> None:
    mine, theirs = SimulatedWorld(2).run(meet_in_bytes, jump)
    total = mine[0][0] + theirs[0][0]
    for step, ((x, exponent, sent), (y, other, _)) in enumerate(zip(mine, theirs, strict=True)):
        assert exponent == other
        is_full = step == 0 or (step == 4 and jump > 0)
        assert (sent >= x.nbytes) == is_full
        if not is_full:
            assert sent == len(x) + 2056 + 16
        if step == 4:
            total[::7] += jump
            total[1::7] -= jump
        torch.testing.assert_close(x + y, total, rtol=0, atol=1e-12)
        # The exponent is made for the next meeting, from the distance that has gone.
        if step and not is_full:
            assert (x - y).abs().max() <= 2.0 ** mine[step - 1][1]
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def meet_apart(net: Any, where: list[int], distance: float, s: float) -> tuple[Tensor, int]:
    """Half of these entries are so far from rank 0's, the others as far on the other side."""
    algorithm = PopSGD(blocking=True, wire_dtype="int8")
    x = torch.zeros(2100).double()
    x[where[::2]], x[where[1::2]] = distance * net.rank, -distance * net.rank
    rank = Rank(net, algorithm, x)
    algorithm.exponent = int(math.log2(s))
    rank.step()
    return x, net.counters.messages_sent


@pytest.mark.parametrize("where", [[7], [7, 7 + 256], [0, 2099], [3, 3 + 1024, 5, 5 + 1024]])
@pytest.mark.parametrize("distance", [127.0, 128.0, -128.0, 129.0, 199.0, 256.0, 2.0**70])
def test_a_byte_that_is_too_small_is_noticed_on_both_sides(
    distance: float, where: list[int]
) -> None:
    for s in (1.0, 2.0**-40):
        (x, num), (y, other) = SimulatedWorld(2).run(meet_apart, where, distance * s, s)
        assert x.equal(y)
        assert x[where].abs().eq(abs(distance) * s / 2).all()
        assert num == other == (3 if abs(distance) < 128 else 4)


def with_a_slow_partner(net: Any, num_versions: int) -> list[float]:
    rank, times = Rank(net, PopSGD(blocking=True), target(net.rank)), []
    for _ in range(num_versions):
        rank.step(seconds=10.0 if net.rank == 0 else 1.0)
        times.append(net.now())
    rank.finish()
    return times


def test_blocking_popsgd_waits_for_its_partner_alone() -> None:
    ranks = SimulatedWorld(8).run(with_a_slow_partner, 6)
    expected = [0.0] * 8
    for k in range(6):
        ready = [t + (10.0 if rank == 0 else 1.0) for rank, t in enumerate(expected)]
        partners = topology.random_partners(k, 8)
        expected = [max(ready[rank], ready[p]) for rank, p in enumerate(partners)]
        assert [times[k] for times in ranks] == pytest.approx(expected)
    assert min(expected) < 60


def exchange_in_halves(net: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rank 1 asks rank 0 while both are within a step."""
    rank = Rank(net, ADPSGD(), whole_numbers(net.rank))
    rank.step()
    before = rank.x.clone()
    net.compute(1.0)  # the exchange takes place
    assert torch.equal(rank.x, before)  # nothing touches the weights meanwhile
    rank.step(7.0)  # what the optimizer does to weights that lack the correction
    after, figures = rank.x.clone(), rank.algorithm.metrics()
    rank.finish()
    return before, after, figures


def test_adpsgd_loses_no_update_to_an_exchange() -> None:
    (a, x, ask), (b, y, answer) = SimulatedWorld(2, latency_s=0.1).run(exchange_in_halves)
    assert torch.equal(x, (a + b) / 2 + 7)
    assert torch.equal(y, x)
    assert ask["exchanges_per_step"] == answer["exchanges_per_step"] == 0.5


def agree(net: Any, spec: str, num_steps: int) -> Tensor:
    rank = Rank(net, make_algorithm(spec), target(net.rank))
    for _ in range(num_steps):
        rank.step(seconds=1.0)
    own = rank.settle()
    rank.finish()
    return own


@pytest.mark.parametrize(
    "spec",
    [
        *("popsgd", "popsgd:wire_dtype=int8", "popsgd:local_steps=2:wire_dtype=bfloat16", "adpsgd"),
        *("popsgd:blocking=true", "popsgd:blocking=true:local_steps=2:topology=cycle:seed=5"),
    ],
)
@cases("world_size", now=[3], later=[8])
def test_pairs_bring_all_ranks_together(spec: str, world_size: int) -> None:
    begin = torch.stack([target(rank) for rank in range(world_size)])
    for steps, factor in ((40, 0.2), (160, 0.02)):
        ranks = SimulatedWorld(world_size).run(agree, spec, steps)
        assert torch.stack(ranks).std(0).mean() < factor * begin.std(0).mean()
