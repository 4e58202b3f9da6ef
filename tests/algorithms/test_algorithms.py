"""Every algorithm through the same properties in the simulated world.

One of `ALGORITHMS` that has no row in `TABLE` is tested with the properties that all share; a row
says what else it promises.
"""

from __future__ import annotations

import ctypes
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost
from tests.algorithms.table import LR, ROUNDED_NOW, TABLE, N, Row, start, start_at, target
from tests.support import matrices
from tests.support.rank import Rank, held_by
from tests.support.thorough import cases
from tests.support.worlds import ProcessWorld

# An odd number of ranks, what is not rounded, and one sum that is, stand for all in `make test`.
LATER = pytest.mark.exhaustive
SIZES = cases("world_size", now=[3], later=[1, 8])


def rows(
    keep: Callable[[Row], bool] = lambda row: True, rounded_later: bool = True
) -> pytest.MarkDecorator:
    """Runs a test for every row that promises what it tests."""
    kept = [
        pytest.param(
            row,
            id=name,
            marks=LATER if row.is_rounded and rounded_later and name != ROUNDED_NOW else (),
        )
        for name, row in TABLE.items()
        if keep(row)
    ]
    return pytest.mark.parametrize("row", kept)


ROWS = rows()


def train(
    net: Any, row: Row, num_steps: int, spread: float = 0.0, delays: bool = False
) -> tuple[Tensor, float]:
    """Descends on |x - target_i|^2 / 2, whose minimum over all ranks is the mean of the targets."""
    rank, goal = start(net, row, spread=spread), target(net.rank)
    for k in range(num_steps):
        seconds = 0.1 + 0.3 * ((k * 7 + net.rank * 3) % 5 == 0)
        rank.descend(rank.x - goal, LR, seconds=seconds * delays)
    return rank.finish(), net.now()


@rows(lambda row: not row.is_sparse and not row.has_outer_optimizer)
def test_one_rank_is_plain_sgd(row: Row) -> None:
    [(x, _)] = SimulatedWorld(1).run(train, row, 20)
    expected = start_at(0, 0.0)
    for _ in range(20):
        expected.sub_(expected - target(0), alpha=LR)
    assert torch.equal(x, expected)


def keep_equal(net: Any, row: Row) -> Tensor:
    rank = start(net, row)
    for k in range(9):
        g = torch.randn(N, generator=torch.Generator().manual_seed(k)).double()
        rank.descend(g, LR, seconds=0.1)
    own = rank.x.clone()
    rank.finish()
    return own


@rows(lambda row: not row.is_rounded and not row.is_delayed)
@SIZES
def test_same_start_and_same_gradients_keep_the_consensus(row: Row, world_size: int) -> None:
    [alone] = SimulatedWorld(1).run(keep_equal, row)
    for x in SimulatedWorld(world_size).run(keep_equal, row):
        torch.testing.assert_close(x, alone, rtol=1e-13, atol=1e-13)


SITUATIONS: dict[str, tuple[Callable[[random.Random, int], float], float, float]] = {
    "stragglers": (lambda chance, rank: chance.choice([0.1, 0.1, 0.5, 1.0]), 0.01, 1e5),
    "slow link": (lambda chance, rank: chance.uniform(0.09, 0.11), 0.01, 1e4),
    "slow rank": (lambda chance, rank: 0.1 if rank else 0.3, 0.01, 1e5),
    "late messages": (lambda chance, rank: chance.random() ** 4, 0.7, 1e5),
}
"""How long a step takes, a message's latency, and how many bytes a second pass; it has 8,000."""


def pause(net: Any, seconds: float) -> None:
    """Computes for so long: in the simulated world, or, much shorter, in a process of its own."""
    if hasattr(net, "compute"):
        net.compute(seconds)
    else:
        time.sleep(0.01 * seconds)


def add_to_all(net: Any, row: Row, situation: str) -> list[tuple[Tensor, Tensor, dict[str, float]]]:
    """Where all stand still: what this rank began with and added, but for what it holds back.

    With the consensus, and at the end with the weights that training leaves.
    """
    chance = random.Random(f"{situation}/{net.rank}")
    draw = torch.Generator().manual_seed(net.rank)
    rank, seen = start(net, row, spread=float(row.mixes_weights)), []
    own = rank.x.clone()
    for _ in range(3):
        # A mean of gradients is one over those who have any.
        for _ in range(chance.choice([0, *range(3, 10)]) if row.mixes_weights else 6):
            pause(net, SITUATIONS[situation][0](chance, net.rank))
            update = 1 + torch.randn(N, generator=draw).double()
            own += update
            rank.descend(-update)
        rank.settle()
        given = own + row.held_back(rank.algorithm)  # of -update
        seen.append((given, rank.algorithm.consensus(rank.x), rank.algorithm.metrics()))
    rest = rank.algorithm.held_back()
    if rest is not None:
        rank.x -= rest
    return [*seen, (given, rank.finish(), rank.algorithm.metrics())]


def run_in(situation: str, row: Row, world_size: int) -> list[tuple[Tensor, Tensor, list[Any]]]:
    """The mean that no loss would lead to, what all ranks have in its place, and the metrics."""
    _, latency_s, bandwidth_bytes_s = SITUATIONS[situation]
    world = SimulatedWorld(world_size, latency_s, bandwidth_bytes_s)
    return stacked(world.run(add_to_all, row, situation))


def stacked(ranks: list[Any]) -> list[tuple[Tensor, Tensor, list[Any]]]:
    whiles = (zip(*each, strict=True) for each in zip(*ranks, strict=True))
    return [(torch.stack(own).mean(0), torch.stack(ends), list(m)) for own, ends, m in whiles]


def keeps(row: Row) -> bool:
    return row.make().traits.keeps_updates and not row.has_outer_optimizer


@rows(keeps)
@SIZES
def test_no_update_is_lost(row: Row, world_size: int) -> None:
    for situation in SITUATIONS:
        moments = run_in(situation, row, world_size)
        for mean, ends, _ in moments[-1:] if row.make().traits.holds_back else moments:
            for end in ends:
                torch.testing.assert_close(end, mean, rtol=0, atol=row.rounding, msg=situation)


@rows(lambda row: keeps(row) and row.is_rounded, rounded_later=False)
def test_no_update_is_lost_in_rounding(row: Row) -> None:
    """The same in one situation, in `make test` too."""
    moments = run_in("late messages", row, 3)
    for mean, ends, _ in moments[-1:] if row.make().traits.holds_back else moments:
        for end in ends:
            torch.testing.assert_close(end, mean, rtol=0, atol=row.rounding)


def touch(net: Any, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Somebody else writes the weights where all stand still: before and after some steps."""
    rank, written = start(net, row), []
    for k in range(3):
        for _ in range(2 * (k == 1)):
            rank.descend(torch.zeros_like(rank.x))
        rank.settle()
        rank.x.copy_(target(10 * k + net.rank))
        written.append(rank.x.clone())
        rank.settle()
        written.append(rank.algorithm.consensus(rank.x))
    rank.algorithm.finish(rank.x)
    return (*written[-2:], rank.x, written[1])


@ROWS
@SIZES
def test_who_writes_weights_between_steps_leaves_all_alike(row: Row, world_size: int) -> None:
    results = SimulatedWorld(world_size, latency_s=0.01).run(touch, row)
    owns, *alike = zip(*results, strict=True)
    for tensors in alike:
        assert all(torch.equal(x, tensors[0]) for x in tensors)
    if row.mixes_weights and not row.has_push_weights and not row.has_outer_optimizer:
        _, ends, _ = alike
        torch.testing.assert_close(ends[0], torch.stack(owns).mean(0), rtol=0, atol=row.rounding)


@ROWS
def test_all_ranks_find_the_same_minimum_of_a_quadratic(row: Row) -> None:
    optimum = torch.stack([target(rank) for rank in range(3)]).mean(0)
    spread = 1.0 if row.mixes_weights else 0.0
    world = SimulatedWorld(3, latency_s=0.01)
    num_steps = 80 if row.accuracy == 1.0 else 200
    xs = [x for x, _ in world.run(train, row, num_steps, spread, True)]
    torch.testing.assert_close(xs[0], optimum, rtol=0, atol=row.accuracy)
    assert all(torch.equal(x, xs[0]) for x in xs)


def resume(net: Any, row: Row, stop_at: int, is_resumed: bool) -> list[Tensor]:
    """All stand still in between; then training goes on, or starts anew from what was saved."""
    rank, goal = start(net, row, spread=0.5 if row.mixes_weights else 0.0), target(net.rank)
    seen = []
    for k in range(15):
        if k == stop_at + net.rank % 2 * (not row.make().traits.lockstep):
            rank.settle()
            if is_resumed:
                rank.resume(row.make())
        rank.descend(rank.x - goal, LR, seconds=0.1 * (1 + (k * 3 + net.rank) % 4))
        seen.append(rank.x.clone())
    return [*seen, rank.settle(), rank.finish()]


# What PopSGD's lane does when depends on how long the start takes.
@rows(lambda row: row.is_synchronous or not row.spec.startswith("popsgd"), rounded_later=False)
@cases("stop_at", now=[6], later=[8])
def test_save_and_resume_equals_straight_through(row: Row, stop_at: int) -> None:
    """Also where a sum is under way."""
    straight, resumed = (
        SimulatedWorld(4, 0.2, 1e5).run(resume, row, stop_at, is_resumed)
        for is_resumed in (False, True)
    )
    for xs, ys in zip(straight, resumed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def count(net: Any, row: Row) -> tuple[int, int]:
    """The bytes that a rank has sent in the second of two periods, and what it holds."""
    rank, sent = start(net, row), []
    for _ in range(2):
        net.compute(1.0)
        sent.append(net.counters.bytes_sent)
        for _ in range(row.period):
            rank.descend(torch.ones(N).double(), LR, seconds=1.0)
    net.compute(1.0)
    sent.append(net.counters.bytes_sent)
    own = (getattr(rank.algorithm, name, None) for name in ("outer", "mine"))
    copies = held_by(rank.algorithm, *own, x=rank.x)
    rank.finish()
    return sent[2] - sent[1], copies


@rows(lambda row: row.bytes_per_step is not None, rounded_later=False)
@SIZES
def test_a_step_takes_the_bytes_and_memory_that_are_promised(row: Row, world_size: int) -> None:
    sent, copies = zip(*SimulatedWorld(world_size).run(count, row), strict=True)
    assert row.bytes_per_step is not None
    expected = row.bytes_per_step(world_size, N * 8)
    assert sum(sent) / world_size / row.period == pytest.approx(expected, rel=row.slack)
    assert row.copies is None or world_size == 1 or set(copies) == {row.copies}


AGREED = ("step", "version", "round")
"""What a state calls the number of what all ranks have made together."""


def unevenly(net: Any, row: Row, counts: list[int]) -> tuple[Tensor, list[dict[str, int]]]:
    rank, goal, agreed = start(net, row), target(net.rank), []
    for _ in range(3):
        for _ in range(counts[net.rank]):
            rank.descend(rank.x - goal, LR, seconds=0.1)
        rank.settle()
        rank.algorithm.consensus(rank.x)
        state = rank.algorithm.state_dict()
        # After local steps, sparse ones count rounds together, and each its own steps.
        names = AGREED[1:] if row.is_sparse and not rank.algorithm.traits.uses_gradient else AGREED
        agreed.append({name: state[name] for name in names if name in state})
    return rank.finish(), agreed


@ROWS
@cases("counts", now=[[0, 5, 5]], later=[[9, 1, 1, 1, 4]])
def test_ranks_may_have_different_numbers_of_batches(row: Row, counts: list[int]) -> None:
    """All go on from the same step, too."""
    ends, agreed = zip(*SimulatedWorld(len(counts)).run(unevenly, row, counts), strict=True)
    assert all(torch.equal(x, ends[0]) for x in ends)
    assert torch.isfinite(ends[0]).all()
    assert all(each == agreed[0] for each in agreed)


def never_ending(net: Any, row: Row) -> None:
    rank = start(net, row)
    try:
        while True:
            rank.descend(torch.zeros(N).double(), seconds=0.1)
    finally:
        rank.algorithm.stop()


@rows(lambda row: row.spec != "no_sync")
def test_all_ranks_learn_who_was_killed(row: Row) -> None:
    world = SimulatedWorld(5, latency_s=0.01, bandwidth_bytes_s=1e6)
    world.kill(2, at_s=1.75)
    for rank, outcome in enumerate(world.outcomes(never_ending, row)):
        if rank != 2:
            assert isinstance(outcome, PeerLost), outcome
            assert outcome.rank == 2


def steps_in_time(net: Any, row: Row) -> tuple[int, float]:
    """How many steps a rank makes in 20 s; rank 0 needs ten times as long for each."""
    rank, num_steps = start(net, row), 0
    while net.now() < 20.0:
        rank.descend(torch.zeros(N).double(), seconds=0.1 if net.rank else 1.0)
        num_steps += 1
    waited = net.counters.wait_s
    rank.finish()
    return num_steps, waited


@pytest.mark.parametrize("name", ["hpsgd", "popsgd", "adpsgd"])
def test_a_slow_rank_holds_up_nobody(name: str) -> None:
    world = SimulatedWorld(3, latency_s=0.02, bandwidth_bytes_s=1e6)
    (slow, _), *others = world.run(steps_in_time, TABLE[name])
    assert slow == pytest.approx(20, abs=1)
    assert all(num == pytest.approx(200, abs=10) for num, _ in others)
    assert name != "hpsgd" or all(waited == 0 for _, waited in others)


# ---- what only one of them promises ----
def dpsgd_trajectory(net: Any, num_steps: int) -> list[Tensor]:
    rank, goal = start(net, TABLE["dpsgd"], spread=1.0), target(net.rank)
    xs = [rank.x.clone()]
    for _ in range(num_steps):
        rank.descend((rank.x - goal) * (1 + net.rank), LR)
        xs.append(rank.x.clone())
    rank.finish()
    return xs


@SIZES
def test_dpsgd_is_the_matrix_recursion(world_size: int) -> None:
    """X <- W X - lr G, in float64, to 1e-12; W is symmetric and doubly stochastic."""
    ranks = SimulatedWorld(world_size).run(dpsgd_trajectory, 25)
    w = torch.tensor(matrices.ring_matrix(world_size), dtype=torch.float64)
    assert torch.equal(w, w.T)
    torch.testing.assert_close(w.sum(0), torch.ones(world_size).double())
    goals = torch.stack([target(rank) for rank in range(world_size)])
    scale = torch.arange(1, world_size + 1).double()[:, None]
    x = torch.stack([xs[0] for xs in ranks])
    for k in range(1, 26):
        x = w @ x - LR * (x - goals) * scale
        torch.testing.assert_close(torch.stack([xs[k] for xs in ranks]), x, rtol=0, atol=1e-12)


def delay_by_a_step(net: Any) -> list[Tensor]:
    rank, goal = Rank(net, AllReduce(delay=1), start_at(0, 0.0)), target(net.rank)
    xs = [rank.x.clone()]
    for _ in range(6):
        rank.descend(rank.x - goal, LR)
        xs.append(rank.x.clone())
    rank.finish()
    return xs


def test_a_delayed_gradient_is_that_at_the_weights_of_the_step_before() -> None:
    xs, _ = SimulatedWorld(2).run(delay_by_a_step)
    goal = torch.stack([target(rank) for rank in range(2)]).mean(0)
    for k in range(1, 6):
        expected = xs[k] - LR * (xs[k - 1] - goal)
        torch.testing.assert_close(xs[k + 1], expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"need gradients that are never scaled, got overlap=True"):
        AllReduce(overlap=True).check(2, Conditions(skips_overflow=True))


# ---- over real processes ----
def add_for_real(net: Any, name: str) -> Any:
    return add_to_all(net, TABLE[name], "stragglers")


ASYNCHRONOUS = [name for name, row in TABLE.items() if keeps(row) and not row.is_synchronous]
REAL_NOW = ("wagma_overlap",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in REAL_NOW else LATER) for n in ASYNCHRONOUS]
)
def test_no_update_is_lost_or_torn_between_real_threads(name: str) -> None:
    for mean, ends, _ in stacked(ProcessWorld().run(3, add_for_real, name)):
        for end in ends:
            torch.testing.assert_close(end, mean, rtol=0, atol=1e-12)


def grow(net: Any, name: str, num_steps: int) -> float:
    """By how many MB this process has grown from a fifth of its steps to the last.

    The least of five sizes counts there, as something may be under way.
    """
    rank = Rank(net.sub(name), ALGORITHMS[name](), torch.zeros(100_000))
    early, late = range(num_steps // 5, num_steps // 5 + 5), range(num_steps - 5, num_steps)
    sizes: dict[int, float] = {}
    for k in range(num_steps):
        rank.descend(torch.ones(100_000), 1e-3)
        if k in early or k in late:
            rank.settle()
            ctypes.CDLL(None).malloc_trim(0)  # what is free counts as the process's until then
            pages = Path("/proc/self/statm").read_text().split()[1]
            sizes[k] = int(pages) * resource.getpagesize() / 1e6
    rank.finish()
    return min(sizes[k] for k in late) - min(sizes[k] for k in early)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALGORITHMS)
def test_memory_is_flat_over_thousands_of_steps(name: str) -> None:
    """A copy of the weights is 0.4 MB: one that is kept every thirty steps would show.

    What is under way at the moment is up to 6 MB on a busy machine, however many steps there are.
    """
    assert max(ProcessWorld(timeout_s=60.0).run(2, grow, name, 1000)) < 9.0
