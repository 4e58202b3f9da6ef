"""Gossip conserves the mean, is nowhere held up, and does what its papers say.

The simulated world first, then real processes under `Trainer.fit`.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dsgd import ADPSGDStrategy, PopSGDStrategy, SGPStrategy
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.simulated import SimulatedWorld
from tests.support import matrices
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import times
from tests.support.worlds import FitWorld, ProcessWorld

N = 12
LR = 0.1
POWERS = pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])


def whole_numbers(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (N,), generator=generator).double()


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


def finish(algorithm: Algorithm, x: Tensor) -> Tensor:
    algorithm.settle(x)
    algorithm.finish(x)
    return x


# ---- SGP: mass ----


class Ledger:
    """A network that keeps account of the mass that leaves and enters this rank."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.w_out = self.w_into = 0.0
        self.x_out = self.x_into = torch.zeros(N).double()
        self.seen: dict[int, float] = {}  # weights that have come, by rank; x is taken after w

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Any:
        if tag:
            self.x_out = self.x_out + x
        elif len(x):
            self.w_out += float(x)
        return self.net.send(x, dst, tag, copy=copy)

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Any:
        return _Entry(self, self.net.recv(like, src, tag), tag, src)


class _Entry:
    def __init__(self, ledger: Ledger, receipt: Any, tag: int, src: int) -> None:
        self.ledger, self.receipt, self.tag, self.src = ledger, receipt, tag, src

    def done(self) -> bool:
        return bool(self.receipt.done())

    def wait(self, timeout_s: float | None = None) -> Tensor:
        x: Tensor = self.receipt.wait(timeout_s)
        if self.tag:
            self.ledger.x_into = self.ledger.x_into + x
            self.ledger.w_into += self.ledger.seen[self.src]
        elif len(x):
            self.ledger.seen[self.src] = float(x)
        return x


def push_at_random_times(
    net: Any, options: dict[str, Any], seed: int, with_updates: bool
) -> dict[str, Any]:
    """What a rank holds after each step, and the mass that has left and entered it until then."""
    algorithm = SGP(**options)
    x = whole_numbers(net.rank)
    begin = x.clone()
    algorithm.start(net, x)
    assert algorithm.pusher is not None
    ledger = Ledger(net)
    algorithm.pusher.net = ledger
    draw = random.Random(f"{seed} {net.rank}")
    states, updates = [], torch.zeros(N).double()
    for phase in range(2):
        for _ in range(draw.randrange(7)):
            net.compute(draw.random() ** 3)
            algorithm.before_update(x, x[:0])
            if with_updates:
                u = torch.tensor([draw.gauss(0, 100) for _ in range(N)]).double()
                x += u
                updates += u
            algorithm.after_update(x)
            held = algorithm.w * x + ledger.x_out - ledger.x_into
            states.append(float((held - begin - updates).abs().max()))
            assert algorithm.w + ledger.w_out - ledger.w_into == 1  # in halves: exact
        algorithm.settle(x)
        consensus = algorithm.consensus(x)
        assert phase or torch.isfinite(consensus).all()
    return {
        "error": max([0.0, *states]),
        "w": algorithm.w,
        "x": algorithm.w * x,
        "updates": updates,
        "consensus": consensus,
    }


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("graph", ["exponential", "ring", "complete", "bipartite_exponential"])
@pytest.mark.parametrize("with_updates", [False, True])
def test_the_mass_held_and_under_way_is_conserved(
    overlap: int, graph: str, with_updates: bool
) -> None:
    for seed in range(8):
        world_size = 1 + seed
        world = SimulatedWorld(world_size, latency_s=0.3)
        options = {"overlap": overlap, "topology": graph}
        ranks = world.run(push_at_random_times, options, seed, with_updates)
        begin = sum(whole_numbers(rank) for rank in range(world_size))
        assert sum(r["w"] for r in ranks) == world_size  # nothing is under way any more
        total = sum(r["x"] for r in ranks)
        expected = begin + sum(r["updates"] for r in ranks)
        if not with_updates:
            assert torch.equal(total.round(), expected)
        torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-9)
        assert max(r["error"] for r in ranks) < 1e-9
        for r in ranks:
            assert torch.equal(r["consensus"], ranks[0]["consensus"])
            torch.testing.assert_close(r["consensus"], expected / world_size, rtol=1e-13, atol=1e-9)


def draws(net: Any, graph: str, num_peers: int) -> tuple[Tensor, float]:
    x = whole_numbers(net.rank)
    algorithm = SGP(num_peers=num_peers, topology=graph)
    algorithm.start(net, x)
    for _ in range(9):
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
    w, middle = algorithm.w, x.clone()
    finish(algorithm, x)
    return x, float((middle * w).sum())


@pytest.mark.parametrize("graph", ["random", "random_exponential"])
@pytest.mark.parametrize("num_peers", [1, 2])
def test_random_graphs_conserve_the_mass_too(graph: str, num_peers: int) -> None:
    for world_size in (1, 2, 3, 6, 9):
        ranks = SimulatedWorld(world_size).run(draws, graph, num_peers)
        begin = sum(whole_numbers(rank) for rank in range(world_size))
        assert sum(mass for _, mass in ranks) == pytest.approx(float(begin.sum()), abs=1e-8)
        for x, _ in ranks:
            torch.testing.assert_close(x, begin / world_size, rtol=1e-12, atol=1e-10)


def average_only(net: Any, num_steps: int) -> Tensor:
    x = whole_numbers(net.rank)
    algorithm = SGP()
    algorithm.start(net, x)
    for _ in range(num_steps):
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
    own = x.clone()
    finish(algorithm, x)
    return own


@POWERS
def test_averaging_alone_is_exact_after_log2_p_steps(world_size: int) -> None:
    mean = sum(whole_numbers(rank) for rank in range(world_size)) / world_size
    steps = world_size.bit_length() - 1
    assert all(torch.equal(x, mean) for x in SimulatedWorld(world_size).run(average_only, steps))
    early = SimulatedWorld(world_size).run(average_only, steps - 1)
    assert not any(torch.equal(x, mean) for x in early)


# ---- SGP: the recursion ----


def gradient(z: Tensor, rank: int) -> Tensor:
    return (z - target(rank)) * (1 + rank % 3)


def descend(
    net: Any, make: Callable[[], Algorithm], num_steps: int, momentum: float = 0.0
) -> list[Tensor]:
    """The weights after every step, on a quadratic that is another one on every rank."""
    x = torch.zeros(N).double() if momentum == 0 else target(100)
    parameter = torch.nn.Parameter(x)
    optimizer = torch.optim.SGD([parameter], LR, momentum=momentum, nesterov=momentum > 0)
    algorithm = make()
    algorithm.start(net, parameter.data)
    xs = []
    for _ in range(num_steps):
        parameter.grad = gradient(parameter.data, net.rank)
        algorithm.before_update(parameter.data, parameter.grad)
        optimizer.step()
        algorithm.after_update(parameter.data)
        xs.append(parameter.data.clone())
    finish(algorithm, parameter.data)
    return [*xs, parameter.data]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_with_all_weights_one_pth_it_is_all_reduce_sgd(world_size: int) -> None:
    def make() -> Algorithm:
        return SGP(num_peers=max(1, world_size - 1), topology="complete")

    if world_size > 1:
        w = torch.tensor(matrices.mixing_matrix("complete", 3, world_size, world_size - 1))
        torch.testing.assert_close(w, torch.full_like(w, 1 / world_size))
    x = torch.zeros(N).double()
    expected = []
    for _ in range(20):
        x = x - LR * torch.stack([gradient(x, rank) for rank in range(world_size)]).mean(0)
        expected.append(x)
    for xs in SimulatedWorld(world_size).run(descend, make, 20):
        for x, y in zip(xs, expected, strict=False):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("graph", topology.GRAPHS)
@pytest.mark.parametrize("num_peers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_with_nesterov_momentum_it_is_algorithm_2(
    graph: str, num_peers: int, world_size: int
) -> None:
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


def with_late_messages(net: Any, latency_steps: int, overlap: int) -> tuple[float, float, float]:
    x = target(net.rank)
    algorithm = SGP(overlap=overlap)
    algorithm.start(net, x)
    weights, began = [], net.now()
    for _ in range(12):
        net.compute(1.0)
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
        weights.append(algorithm.w)
    took = net.now() - began
    late = algorithm.metrics().get("staleness", 0.0)
    finish(algorithm, x)
    assert algorithm.w == 1
    assert latency_steps == 0 or min(weights) < 1
    return took, late, weights[-1]


def test_with_overlap_nobody_waits_for_messages_that_take_less() -> None:
    for overlap, latency, steps in ((1, 0.9, 12.0), (2, 1.9, 12.0), (0, 0.5, 18.0)):
        ranks = SimulatedWorld(8, latency_s=latency).run(with_late_messages, overlap and 1, overlap)
        for took, late, _ in ranks:
            assert took == pytest.approx(steps, abs=0.01)
            assert late == pytest.approx(overlap, abs=0.2)


# ---- SGP: nodes ----


def in_nodes(net: Any, counts: list[int], overlap: int) -> list[Tensor]:
    x = target(100)
    algorithm = SGP(hierarchical=True, node_size=2, overlap=overlap)
    algorithm.start(net, x)
    xs = []
    for _ in range(counts[net.rank]):
        net.compute(0.1 * (1 + net.rank))
        g = gradient(x, net.rank)
        algorithm.before_update(x, g)
        x -= LR * g
        algorithm.after_update(x)
        xs.append(x.clone())
    algorithm.settle(x)
    xs.append(x.clone())
    algorithm.finish(x)
    return [*xs, x]


def test_two_nodes_of_two_ranks_are_two_ranks_with_their_mean_gradients() -> None:
    ranks = SimulatedWorld(4).run(in_nodes, [10] * 4, 0)
    z = torch.stack([target(100)] * 2)
    for k in range(10):
        g = [(gradient(z[i], 2 * i) + gradient(z[i], 2 * i + 1)) / 2 for i in range(2)]
        half = z - LR * torch.stack(g)
        z = half.mean(0).expand(2, N).clone()  # two nodes: both weights 1/2
        for rank in range(4):
            torch.testing.assert_close(ranks[rank][k], z[rank // 2], rtol=0, atol=1e-13)
    assert all(torch.equal(ranks[0][-1], xs[-1]) for xs in ranks)


@pytest.mark.parametrize("counts", [[3, 5, 2, 2], [0, 4, 4, 1], [6, 0, 0, 0], [1, 1, 5, 9]])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_node_goes_on_as_long_as_one_of_its_ranks(counts: list[int], overlap: int) -> None:
    ranks = SimulatedWorld(4, latency_s=0.05).run(in_nodes, counts, overlap)
    for a, b in ((0, 1), (2, 3)):
        assert torch.equal(ranks[a][-2], ranks[b][-2])
    assert all(torch.equal(ranks[0][-1], xs[-1]) for xs in ranks)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_peers": 0}, "num_peers must be a whole number of at least 1, got num_peers=0"),
        ({"overlap": -1}, "overlap must be a whole number of at least 0, got overlap=-1"),
        ({"topology": "star"}, "topology must be .exponential., .*got topology='star'"),
        ({"hierarchical": True}, "node_size must divide world_size, got node_size=None"),
        ({"hierarchical": True, "node_size": 3}, "got node_size=3 with world_size=4"),
    ],
)
def test_sgp_refuses_what_cannot_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SGP(**options).check(4)


# ---- pairs: PopSGD and AD-PSGD ----

PAIRS: dict[str, Callable[[], Algorithm]] = {
    "popsgd": PopSGD,
    "popsgd_int8": lambda: PopSGD(wire_dtype="int8"),
    "popsgd_bfloat16": lambda: PopSGD(local_steps=2, wire_dtype="bfloat16"),
    "popsgd_blocking": lambda: PopSGD(blocking=True),
    "popsgd_blocking_cycle": lambda: PopSGD(blocking=True, local_steps=2, topology="cycle", seed=5),
    "popsgd_blocking_bfloat16": lambda: PopSGD(blocking=True, wire_dtype="bfloat16"),
    "popsgd_blocking_int8": lambda: PopSGD(blocking=True, wire_dtype="int8"),
    "adpsgd": ADPSGD,
}
LATER = pytest.mark.exhaustive
EVERY_PAIR = pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)


def at_random_times(
    net: Any, make: Callable[[], Algorithm], seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Two phases of steps at random times, as many as each rank likes; with whole updates."""
    algorithm = make()
    x = whole_numbers(net.rank)
    algorithm.start(net, x)
    draw = random.Random(f"{seed} {net.rank}")
    updates = torch.zeros(N).double()
    for _ in range(2):
        for _ in range(draw.randrange(6)):
            net.compute(draw.random() ** 4)
            algorithm.before_update(x, x[:0])
            u = float(draw.randrange(-50, 50))
            x += u
            updates += u
            algorithm.after_update(x)
        algorithm.settle(x)
    own = x.clone()
    return own, updates, finish(algorithm, x)


@EVERY_PAIR
@pytest.mark.parametrize(
    "world_size",
    [*range(1, 7), *(pytest.param(size, marks=LATER) for size in range(7, 34))],
)
def test_the_mean_is_conserved_and_nobody_waits_for_ever(
    make: Callable[[], Algorithm], world_size: int
) -> None:
    for seed in times(1):
        world = SimulatedWorld(world_size, latency_s=random.Random(seed).random())
        ranks = world.run(at_random_times, make, seed)  # raises Deadlock, and for messages left
        expected = sum(whole_numbers(rank) for rank in range(world_size))
        expected = expected + sum(updates for _, updates, _ in ranks)
        total = sum(own for own, _, _ in ranks)
        assert torch.equal(total.round(), expected)
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-9)
        for _, _, end in ranks:
            torch.testing.assert_close(end, expected / world_size, rtol=0, atol=1e-9)


def meet(net: Any, num_steps: int) -> tuple[list[Tensor], list[int]]:
    algorithm, x = PopSGD(blocking=True, seed=3), whole_numbers(net.rank)
    algorithm.start(net, x)
    xs, clocks = [], []
    for _ in range(num_steps):
        net.compute(0.1 * (1 + net.rank))
        x += net.rank
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
        xs.append(x.clone())
        clocks.append(algorithm.clock)
    finish(algorithm, x)
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
    x = target(net.rank).repeat(1000)
    algorithm.start(net, x)
    history = []
    for step in range(6):
        before = net.counters.bytes_sent
        if net.rank == 1 and step == 4:
            x[::7] += jump
            x[1::7] -= jump  # so that the sum of all is none the wiser
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
        sent = net.counters.bytes_sent - before
        history.append((x.clone(), algorithm.exponent, sent))
    finish(algorithm, x)
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
    algorithm.start(net, x)
    algorithm.exponent = int(math.log2(s))
    algorithm.before_update(x, x[:0])
    algorithm.after_update(x)
    return x, net.counters.messages_sent


@pytest.mark.parametrize("where", [[7], [7, 7 + 256], [0, 2099], [3, 3 + 1024, 5, 5 + 1024]])
@pytest.mark.parametrize("distance", [127.0, 128.0, -128.0, 129.0, 199.0, 256.0, 2.0**70])
def test_a_byte_that_cannot_tell_the_distance_is_noticed_on_both_sides(
    distance: float, where: list[int]
) -> None:
    for s in (1.0, 2.0**-40):
        (x, num), (y, other) = SimulatedWorld(2).run(meet_apart, where, distance * s, s)
        assert x.equal(y)
        assert x[where].abs().eq(abs(distance) * s / 2).all()
        assert num == other == (3 if abs(distance) < 128 else 4)


def steps_in_time(net: Any, make: Callable[[], Algorithm], until_s: float) -> int:
    """How many steps a rank makes; rank 0 needs ten times as long for each."""
    algorithm, x = make(), target(net.rank)
    algorithm.start(net, x)
    steps = 0
    while net.now() < until_s:
        net.compute(1.0 if net.rank == 0 else 0.1)
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
        steps += 1
    finish(algorithm, x)
    return steps


@pytest.mark.parametrize("name", ["popsgd", "adpsgd"])
@pytest.mark.parametrize("world_size", [4, 7])
def test_a_slow_rank_holds_up_nobody(name: str, world_size: int) -> None:
    steps = SimulatedWorld(world_size, latency_s=0.02).run(steps_in_time, PAIRS[name], 20.0)
    assert steps[0] == pytest.approx(20, abs=1)
    assert all(n == pytest.approx(200, abs=10) for n in steps[1:])


def with_a_slow_partner(net: Any, num_versions: int) -> list[float]:
    algorithm, x = PopSGD(blocking=True), target(net.rank)
    algorithm.start(net, x)
    times = []
    for _ in range(num_versions):
        net.compute(10.0 if net.rank == 0 else 1.0)
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
        times.append(net.now())
    finish(algorithm, x)
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
    algorithm, x = ADPSGD(), whole_numbers(net.rank)
    algorithm.start(net, x)
    algorithm.before_update(x, x[:0])
    algorithm.after_update(x)
    before = x.clone()
    net.compute(1.0)  # the exchange takes place
    assert torch.equal(x, before)  # nothing touches the weights meanwhile
    algorithm.before_update(x, x[:0])
    x += 7.0  # what the optimizer does to weights that lack the correction
    algorithm.after_update(x)
    after, figures = x.clone(), algorithm.metrics()
    finish(algorithm, x)
    return before, after, figures


def test_adpsgd_loses_no_update_to_an_exchange() -> None:
    (a, x, ask), (b, y, answer) = SimulatedWorld(2, latency_s=0.1).run(exchange_in_halves)
    assert torch.equal(x, (a + b) / 2 + 7)
    assert torch.equal(y, x)
    assert ask["exchanges_per_step"] == answer["exchanges_per_step"] == 0.5


def agree(net: Any, make: Callable[[], Algorithm], num_steps: int) -> Tensor:
    algorithm, x = make(), target(net.rank)
    algorithm.start(net, x)
    for _ in range(num_steps):
        net.compute(1.0)
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
    algorithm.settle(x)
    own = x.clone()
    finish(algorithm, x)
    return own


@EVERY_PAIR
@pytest.mark.parametrize(
    "world_size", [2, 3, 4, pytest.param(8, marks=LATER), pytest.param(13, marks=LATER)]
)
def test_pairs_bring_all_ranks_together(make: Callable[[], Algorithm], world_size: int) -> None:
    begin = torch.stack([target(rank) for rank in range(world_size)])
    for steps, factor in ((40, 0.2), (160, 0.02)):
        ranks = SimulatedWorld(world_size).run(agree, make, steps)
        if make is PAIRS["popsgd_blocking_cycle"] and world_size == 13:
            factor **= 0.5
        assert torch.stack(ranks).std(0).mean() < factor * begin.std(0).mean()


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (PopSGD(local_steps=0), "local_steps must be a whole number of at least 1, got"),
        (PopSGD(topology="star"), 'must be "complete" or "cycle", got topology=\'star\''),
        (PopSGD(wire_dtype="int4"), "wire_dtype must be .*got wire_dtype='int4'"),
    ],
)
def test_popsgd_refuses_what_cannot_work(algorithm: PopSGD, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        algorithm.check(4)


# ---- a rank that dies ----


def never_ending(net: Any, make: Callable[[], Algorithm]) -> None:
    x = target(net.rank)
    algorithm = make()
    algorithm.start(net, x)
    try:
        while True:
            net.compute(0.1)
            algorithm.before_update(x, x[:0])
            algorithm.after_update(x)
    finally:
        algorithm.stop()


MAKERS: dict[str, Callable[[], Algorithm]] = {
    "sgp": SGP,
    "sgp_overlap": lambda: SGP(overlap=2),
    "popsgd": PopSGD,
    "popsgd_blocking": lambda: PopSGD(blocking=True),
    "adpsgd": ADPSGD,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_all_ranks_learn_who_was_killed(make: Callable[[], Algorithm]) -> None:
    world = SimulatedWorld(5, latency_s=0.01)
    world.kill(2, at_s=1.75)
    for rank, outcome in enumerate(world.outcomes(never_ending, make)):
        if rank != 2:
            assert isinstance(outcome, PeerLost)
            assert outcome.rank == 2


# ---- real processes and real threads ----

LARGE = 100_000


def step_for_real(net: Any, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Many quick steps, as many as each rank likes; gives sums over 100 parts of x."""
    algorithm = EVERYTHING[name]()
    x = torch.full((LARGE,), float(net.rank), dtype=torch.float64)
    begin = x.clone()
    algorithm.start(net, x)
    draw = random.Random(net.rank)
    updates = torch.zeros_like(x)
    for _ in range(2):
        for _ in range(draw.randrange(5, 40)):
            time.sleep(0.002 * draw.random())
            algorithm.before_update(x, x[:0])
            place = draw.randrange(LARGE)
            x[place:] += 1.0
            updates[place:] += 1.0
            algorithm.after_update(x)
        algorithm.settle(x)
    w = getattr(algorithm, "w", 1.0)
    own, expected = w * x, begin + updates
    finish(algorithm, x)
    return tuple(y.view(100, -1).sum(1) for y in (own, expected, x))  # type: ignore[return-value]


EVERYTHING = {**PAIRS, "sgp": SGP, "sgp_overlap": lambda: SGP(overlap=2)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("sgp", "adpsgd") else LATER) for name in EVERYTHING],
)
def test_no_update_is_lost_or_torn_between_real_threads(name: str) -> None:
    ranks = ProcessWorld().run(3, step_for_real, name)
    expected = sum(given for _, given, _ in ranks)
    torch.testing.assert_close(sum(own for own, _, _ in ranks), expected, rtol=1e-12, atol=0)
    for _, _, end in ranks:
        torch.testing.assert_close(end, expected / 3, rtol=1e-12, atol=0)


# ---- under Trainer.fit ----

FITS: dict[str, tuple[int, Callable[[], Any]]] = {
    "sgp": (3, SGPStrategy),
    "sgp_two_peers": (4, lambda: SGPStrategy(num_peers=2)),
    "sgp_overlap": (4, lambda: SGPStrategy(overlap=1)),
    "sgp_hierarchical": (4, lambda: SGPStrategy(hierarchical=True, node_size=2)),
    "sgp_one_node": (2, lambda: SGPStrategy(hierarchical=True)),
    "adpsgd": (3, ADPSGDStrategy),
    "popsgd": (3, lambda: PopSGDStrategy(wire_dtype="bfloat16")),
    "popsgd_blocking": (4, lambda: PopSGDStrategy(blocking=True, topology="cycle")),
}
DETERMINISTIC = ("sgp", "sgp_two_peers", "sgp_hierarchical", "popsgd_blocking")


class Watched(Regression):
    """A model that the ranks validate, with the push weight of every moment at which it is seen."""

    def __init__(self) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(lr=0.01)
        self.seen: list[tuple[str, float]] = []
        self.losses: list[float] = []

    def see(self, moment: str) -> None:
        figures = self.trainer.strategy.communication()
        self.seen.append((moment, figures.get("push_weight", 1.0)))

    def on_validation_epoch_start(self) -> None:
        self.see("validation")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.see("save")

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))


def fit(name: str, folder: str, epochs: int, resume: str | None) -> dict[str, Any]:
    world_size, make = FITS[name]
    model = Watched()
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    runner = trainer(
        make(), world_size, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True
    )
    runner.fit(model, loader(256, 8, shuffle=True), loader(64), ckpt_path=resume)
    return {"weights": weights(model).tolist(), "losses": model.losses, "seen": model.seen}


# Push weights under way, and pairs beside the training, stand for all in `make test`.
FAST = ("sgp_overlap", "adpsgd", "popsgd")


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=LATER) for name in FITS],
)
def test_a_fit_ends_in_consensus_and_shows_no_share_of_a_model(name: str, tmp_path: Path) -> None:
    world_size, _ = FITS[name]
    ranks = FitWorld().run(world_size, fit, name, str(tmp_path), 3, None)
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
    assert ranks[0]["losses"][-1] < 0.5 * ranks[0]["losses"][0]
    for moment in ("validation", "save"):
        total = sum(w for rank in ranks for what, w in rank["seen"][-2:] if what == moment)
        assert total == pytest.approx(world_size, abs=1e-12)


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=LATER) for name in DETERMINISTIC],
)
def test_a_resumed_fit_equals_the_uninterrupted_one_to_the_bit(name: str, tmp_path: Path) -> None:
    world_size, _ = FITS[name]
    straight = FitWorld().run(world_size, fit, name, str(tmp_path / "a"), 3, None)
    file = str(tmp_path / "a" / "epoch=0.ckpt")
    resumed = FitWorld().run(world_size, fit, name, str(tmp_path / "b"), 3, file)
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in straight]


class Dies(L.Callback):
    """Rank 1 is killed in the middle of the epoch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_and_die(name: str) -> None:
    world_size, make = FITS[name]
    runner = trainer(make(), world_size, callbacks=[Dies()], max_epochs=50)
    runner.fit(Watched(), loader(96, 4), loader(32))


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=LATER)
        for name in ("sgp", "sgp_overlap", "adpsgd", "popsgd", "popsgd_blocking")
    ],
)
def test_a_rank_killed_in_the_middle_is_named_by_all_others(name: str) -> None:
    world_size, _ = FITS[name]
    for rank, outcome in enumerate(FitWorld().outcomes(world_size, fit_and_die, name)):
        if rank != 1:
            assert outcome.error.startswith("PeerLost: rank 1 died"), outcome.error
            assert outcome.seconds < 100
