"""The wait-avoiding collective over random schedules, and what WAGMA and Eager-SGD make of it."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.transport.simulated import SimulatedWorld
from lightning_dsgd.wait_avoiding import WaitAvoiding

NUM_BLOCKS = int(os.environ.get("DSGD_SCHEDULE_BLOCKS", "1"))
"""Of 50 schedules each; 40 blocks are thousands of them, and take some minutes."""


class Recorder:
    """A member that contributes 1 and, twice, its newest publication; keeps all sums."""

    def __init__(self, net: Any, group_size: int, sync_period: int) -> None:
        self.net, self.group_size, self.sync_period = net, group_size, sync_period
        self.newest = -1
        self.buffer = torch.zeros(3)
        self.executed: list[int] = []
        self.sums: dict[int, list[float]] = {}
        self.staleness: list[int] = []
        self.in_time = 0

    def group(self, version: int) -> list[int]:
        size = self.net.world_size
        if self.is_global(version):
            return list(range(size))
        parts = topology.groups(version, size, self.group_size)
        return next(part for part in parts if self.net.rank in part)

    def is_global(self, version: int) -> bool:
        return (version + 1) % self.sync_period == 0

    def activator(self, version: int) -> int | None:
        return None

    def arrived(self, version: int) -> None:
        self.newest = version

    def late(self, version: int) -> None:
        self.newest = version

    def is_stale(self, version: int) -> bool:
        return False

    def renew(self) -> None:
        pass

    def contribute(self, version: int) -> Tensor:
        self.staleness.append(version - self.newest)
        self.in_time += self.newest == version
        self.buffer.copy_(torch.tensor([1.0, self.newest + 1.0, self.newest + 1.0]))
        return self.buffer

    def reduced(self, version: int, group_size: int) -> None:
        self.executed.append(version)
        self.sums[version] = self.buffer.tolist()


def play(net: Any, seed: int, group_size: int, sync_period: int) -> dict[str, Any]:
    """Arrives at random times, a random number of times, in two phases with a settle between."""
    chance = random.Random(f"{seed}/{net.rank}")
    member = Recorder(net, group_size, sync_period)
    engine = WaitAvoiding(net, member, grace_s=chance.choice([0.0, 0.0, 0.02]))
    version, ends = 0, []
    for _ in range(2):
        for _ in range(chance.randrange(9)):
            net.compute(chance.choice([0.0, 0.01, 0.1, 0.1, 0.5]))
            engine.arrive(version)
            version += 1
        version = engine.settle()
        ends.append(version)
    engine.stop()
    return {
        "executed": member.executed,
        "sums": member.sums,
        "staleness": member.staleness,
        "ends": ends,
    }


def check_schedule(seed: int) -> Counter[str]:
    chance = random.Random(seed)
    world_size = chance.choice([chance.randrange(1, 9), chance.randrange(1, 34)])
    group_size = chance.randrange(1, world_size + 1)
    sync_period = chance.choice([1, 2, 3, 5, 100])
    latency_s = chance.choice([0.0, 0.001, 0.05])
    world = SimulatedWorld(world_size, latency_s=latency_s)
    ranks = world.run(play, seed, group_size, sync_period)
    what = f"seed={seed}: P={world_size}, S={group_size}, tau={sync_period}, latency={latency_s}"
    last = ranks[0]["ends"][-1]
    for rank in ranks:
        assert rank["executed"] == list(range(last)), what
        assert rank["ends"] == ranks[0]["ends"], what
    for version in range(last):
        is_global = (version + 1) % sync_period == 0
        parts = (
            [list(range(world_size))]
            if is_global
            else topology.groups(version, world_size, group_size)
        )
        for part in parts:
            sums = [ranks[member]["sums"][version] for member in part]
            assert all(total == sums[0] for total in sums), what  # the same to the bit
            assert sums[0][0] == len(part), what  # each member once
            assert sums[0][1] == sums[0][2], what  # none torn
    worst = max((max(rank["staleness"], default=0) for rank in ranks), default=0)
    return Counter(versions=last * world_size, worst=worst)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_every_version_is_executed_once_in_order_by_every_rank(block: int) -> None:
    """Random schedules; a failing one names its seed, and `check_schedule(seed)` replays it."""
    for seed in range(50 * block, 50 * block + 50):
        try:
            check_schedule(seed)
        except Exception as error:
            raise AssertionError(f"replay with check_schedule({seed}): {error}") from error


def steady(net: Any, sync_period: int) -> list[int]:
    """All ranks have as many steps, at random speeds."""
    chance = random.Random(net.rank)
    member = Recorder(net, 2, sync_period)
    engine = WaitAvoiding(net, member)
    for version in range(4 * sync_period):
        net.compute(chance.choice([0.1, 0.1, 0.9]))
        engine.arrive(version)
    assert engine.settle() == 4 * sync_period
    engine.stop()
    return member.staleness


@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize("sync_period", [1, 4, 10])
def test_staleness_stays_below_the_period(world_size: int, sync_period: int) -> None:
    for staleness in SimulatedWorld(world_size, latency_s=1e-3).run(steady, sync_period):
        assert min(staleness) >= 0
        assert max(staleness) < sync_period or sync_period == 1
        assert staleness[sync_period - 1 :: sync_period] == [0] * 4


def take_sums(net: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """What a step applied and what is left, where the next sum comes while it takes the first."""
    algorithm = EagerSGD()
    algorithm.start(net, torch.zeros(1))
    monkeypatch.setattr(algorithm.engine, "arrive", lambda version: None)
    algorithm.unapplied.fill_(1.0)
    algorithm.total.fill_(2.0)
    lane = threading.Thread(target=algorithm.reduced, args=(1, 1))
    divide = torch.div

    def divide_slowly(*args: Any, **kwargs: Any) -> Tensor:
        lane.start()
        lane.join(0.2)  # either it is through, or it waits until this step has taken its sums
        return divide(*args, **kwargs)

    monkeypatch.setattr(torch, "div", divide_slowly)
    g = torch.zeros(1)
    algorithm.before_update(torch.zeros(1), g)
    lane.join()
    algorithm.stop()
    return g, algorithm.unapplied


def test_eager_sgd_loses_no_sum_that_comes_while_a_step_takes_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [(applied, left)] = SimulatedWorld(1).run(take_sums, monkeypatch)
    assert (applied.item(), left.item()) == (1.0, 2.0)


def train(net: Any, algorithm: Any, num_steps: int, *, delays: bool = True) -> Tensor:
    chance = random.Random(net.rank)
    x = torch.randn(7, generator=torch.Generator().manual_seed(0)).double()
    algorithm.start(net, x)
    goal = torch.randn(7, generator=torch.Generator().manual_seed(net.rank)).double()
    for _ in range(num_steps):
        net.compute(0.1 + (0.5 if delays and chance.random() < 0.3 else 0.0))
        g = x - goal
        algorithm.before_update(x, g)
        x.sub_(g, alpha=0.1)
        algorithm.after_update(x)
    own = x.clone()
    algorithm.settle(x)
    algorithm.finish(x)
    return own


def run(world_size: int, make: Any, num_steps: int = 24) -> list[Tensor]:
    return SimulatedWorld(world_size, latency_s=1e-3).run(_train_made, make, num_steps)


def _train_made(net: Any, make: Any, num_steps: int) -> Tensor:
    return train(net, make(), num_steps)


def assert_equal(ours: list[Tensor], theirs: list[Tensor], atol: float = 0.0) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def group_average(net: Any, size: int, period: int, num_steps: int, dynamic: bool) -> Tensor:
    """WAGMA without wait-avoidance, written down directly."""
    x = torch.randn(7, generator=torch.Generator().manual_seed(0)).double()
    goal = torch.randn(7, generator=torch.Generator().manual_seed(net.rank)).double()
    for step in range(num_steps):
        x.sub_(x - goal, alpha=0.1)
        parts = topology.groups(step if dynamic else 0, net.world_size, size)
        group = next(part for part in parts if net.rank in part)
        if (step + 1) % period == 0:
            group = list(range(net.world_size))
        net.all_reduce(x, group).wait()
        x /= len(group)
    return x


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("dynamic", [True, False])
def test_without_wait_avoidance_it_is_the_group_average(world_size: int, dynamic: bool) -> None:
    ours = run(
        world_size,
        lambda: WAGMA(
            group_size=min(2, world_size),
            sync_period=5,
            wait_avoiding=False,
            dynamic_groups=dynamic,
        ),
    )
    size = min(2, world_size)
    theirs = SimulatedWorld(world_size).run(group_average, size, 5, 24, dynamic)
    assert_equal(ours, theirs, atol=1e-14)


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_a_period_of_one_is_allreduce_model_averaging(world_size: int) -> None:
    """With plain SGD from equal weights, averaging models is averaging gradients."""
    ours = run(world_size, lambda: WAGMA(group_size=world_size, sync_period=1))
    assert_equal(ours, run(world_size, AllReduce), atol=1e-13)


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_groups_of_one_are_local_sgd(world_size: int) -> None:
    ours = run(world_size, lambda: WAGMA(group_size=1, sync_period=6))
    assert_equal(ours, run(world_size, lambda: LocalSGD(sync_period=6)), atol=1e-14)


def late_by_one(net: Any) -> list[float]:
    """Two ranks; rank 1 comes late to version 0, in time to version 1."""
    x = torch.tensor([float(10 * net.rank)])
    algorithm = WAGMA(group_size=2, sync_period=100, grace_s=0.0)
    algorithm.start(net, x)
    seen = []
    for compute_s in ([1.0, 3.0], [2.0, 0.5])[net.rank == 0]:
        net.compute(compute_s)
        x += 1
        algorithm.after_update(x)
        seen.append(float(x))
    algorithm.settle(x)
    algorithm.stop()
    return seen


def test_a_late_rank_averages_the_sum_with_its_own_weights() -> None:
    """On time: sum / S; late: (sum + W') / (S + 1), with its stale model in the sum."""
    first, second = SimulatedWorld(2).run(late_by_one)
    # Version 0 fires at 2.0 s?  Rank 1 arrives at 1.0 s with 11, rank 0 takes part with its initial
    # 0.
    total = 0 + 11
    assert second[0] == pytest.approx(total / 2)
    # Rank 0 arrives at 2.0 s, late, with 1.
    assert first[0] == pytest.approx((total + 1) / 3)
    # Version 1: rank 0 arrives at 2.5 s and fires; rank 1 takes part with its 11 from version 0.
    own = first[0] + 1
    assert first[1] == pytest.approx((own + 11) / 2)
    # Rank 1 arrives at 4.0 s, late.
    assert second[1] == pytest.approx((own + 11 + second[0] + 1) / 3)


def delayed(net: Any, overlap: bool) -> tuple[float, float]:
    chance = random.Random(net.rank)
    x = torch.zeros(3).double()
    algorithm = WAGMA(sync_period=10, overlap=overlap)
    algorithm.start(net, x)
    for _ in range(40):
        net.compute(0.1 + 0.4 * (chance.random() < 0.25))
        algorithm.after_update(x)
    waited, end = net.counters.wait_s, net.now()
    algorithm.settle(x)
    algorithm.finish(x)
    return waited, end


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_with_overlap_only_ranks_that_are_a_period_ahead_wait(world_size: int) -> None:
    blocking = SimulatedWorld(world_size, latency_s=1e-3).run(delayed, False)
    overlapping = SimulatedWorld(world_size, latency_s=1e-3).run(delayed, True)
    assert sum(waited for waited, _ in overlapping) < 0.5 * sum(waited for waited, _ in blocking)
    slowest_waited, end = max(overlapping, key=lambda rank: rank[1])
    assert slowest_waited == 0.0
    assert end <= max(end for _, end in blocking)


def staleness_with_overlap(net: Any, seed: int, sync_period: int, group_size: int) -> int:
    chance = random.Random(f"{seed}/{net.rank}")
    x = torch.zeros(2).double()
    algorithm = WAGMA(group_size=group_size, sync_period=sync_period, overlap=True)
    algorithm.start(net, x)
    for _ in range(5 * sync_period):
        net.compute(chance.choice([0.01, 0.1, 0.1, 2.0]))
        algorithm.after_update(x)
    algorithm.settle(x)
    algorithm.stop()
    return max(algorithm.staleness)


@pytest.mark.parametrize("sync_period", [1, 3, 10])
def test_with_overlap_staleness_stays_below_two_periods(sync_period: int) -> None:
    worst = [
        max(SimulatedWorld(size, latency_s=0.05).run(staleness_with_overlap, seed, sync_period, 2))
        for seed in range(8)
        for size in (2, 4, 7)
    ]
    assert max(worst) < 2 * sync_period
    assert sync_period == 1 or max(worst) >= sync_period  # the bound of the blocking form is passed


def solo_sum(net: Any, quorum: str, num_steps: int) -> tuple[Tensor, Tensor, float]:
    """Integers as gradients: what was applied and what is pending can be counted exactly."""
    chance = random.Random(net.rank)
    x = torch.zeros(2).double()
    algorithm = EagerSGD(quorum=quorum)
    algorithm.start(net, x)
    for k in range(num_steps):
        net.compute(chance.choice([0.1, 0.1, 0.7]))
        g = torch.tensor([float((k + 1) * net.world_size), float(net.world_size)]).double()
        algorithm.before_update(x, g)
        x += g
        algorithm.after_update(x)
    algorithm.settle(x)
    algorithm.stop()
    return x + algorithm.unapplied / net.world_size, algorithm.pending, algorithm.num_late


@pytest.mark.parametrize("quorum", ["solo", "majority"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_no_gradient_is_lost_and_none_is_counted_twice(quorum: str, world_size: int) -> None:
    steps = 20
    ranks = SimulatedWorld(world_size, latency_s=1e-3).run(solo_sum, quorum, steps)
    produced = torch.tensor([steps * (steps + 1) / 2, float(steps)]).double() * world_size
    pending = sum(pending for _, pending, _ in ranks)
    for applied, _, _ in ranks:
        assert torch.equal(applied, ranks[0][0])
        assert torch.equal(applied * world_size + pending, produced * world_size)


def test_solo_fires_with_the_first_and_majority_with_a_drawn_rank() -> None:
    late = {
        quorum: sum(n for _, _, n in SimulatedWorld(8).run(solo_sum, quorum, 40))
        for quorum in ("solo", "majority")
    }
    assert late["solo"] > late["majority"] > 0
