"""The wait-avoiding collective over random schedules, and what WAGMA and Eager-SGD make of it."""

from __future__ import annotations

import math
import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.primitives import topology
from lightning_dsgd.primitives.wait_avoiding import Grace, WaitAvoiding
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.simulated.links import Links
from tests.support.rank import Rank
from tests.support.thorough import times

LATER = pytest.mark.exhaustive
SEEDS = pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(times(50), marks=LATER)], ids=["few", "many"]
)


class Recorder:
    """A member that contributes 1 and, twice, its newest publication; keeps all sums."""

    def __init__(
        self, net: Any, group_size: int, sync_period: int, drawn: int | None = None
    ) -> None:
        self.net, self.group_size, self.sync_period = net, group_size, sync_period
        self.drawn = drawn  # the seed of the only rank that activates a version
        self.newest = -1
        self.buffer = torch.zeros(3)
        self.executed: list[int] = []
        self.sums: dict[int, list[float]] = {}
        self.staleness: list[int] = []

    def group(self, version: int) -> list[int]:
        size = self.net.world_size
        if self.is_global(version):
            return list(range(size))
        parts = topology.groups(version, size, self.group_size)
        return next(part for part in parts if self.net.rank in part)

    def is_global(self, version: int) -> bool:
        return (version + 1) % self.sync_period == 0

    def activator(self, version: int) -> int | None:
        if self.drawn is None or self.is_global(version):
            return None
        return random.Random(f"{self.drawn}/{version}").randrange(self.net.world_size)

    def arrived(self, version: int) -> None:
        self.newest = version

    def late(self, version: int) -> None:
        self.newest = version

    def settled(self, version: int) -> None:
        assert self.executed[-1:] == [version][: version + 1]

    def contribute(self, version: int) -> Tensor:
        self.staleness.append(version - self.newest)
        self.buffer.copy_(torch.tensor([1.0, self.newest + 1.0, self.newest + 1.0]))
        return self.buffer

    def reduced(self, version: int, group_size: int) -> None:
        self.executed.append(version)
        self.sums[version] = self.buffer.tolist()


def play(
    net: Any, seed: int, group_size: int, sync_period: int, drawn: int | None
) -> dict[str, Any]:
    """Arrives at random times, a random number of times, in two phases with a settle between."""
    chance = random.Random(f"{seed}/{net.rank}")
    member = Recorder(net, group_size, sync_period, drawn)
    engine = WaitAvoiding(net, member, Grace(net, chance.choice([0.0, 0.0, 0.02])))
    version, ends = 0, []
    for _ in range(2):
        for _ in range(chance.randrange(9)):
            net.compute(chance.choice([0.0, 0.01, 0.1, 0.1, 0.5]))
            engine.arrive(version)
            version += 1
        version = engine.settle()
        ends.append(version)
        assert not engine._num_unacknowledged, "a message of this lane is still under way"
    engine.stop()
    return {**vars(member), "ends": ends}


def check_schedule(seed: int) -> None:
    chance = random.Random(seed)
    world_size = chance.choice([chance.randrange(1, 9), chance.randrange(1, 34)])
    group_size = chance.randrange(1, world_size + 1)
    sync_period = chance.choice([1, 2, 3, 5, 100])
    latency_s = chance.choice([0.0, 0.001, 0.05])
    world = SimulatedWorld(world_size, latency_s=latency_s)
    drawn = chance.choice([None, seed])
    ranks = world.run(play, seed, group_size, sync_period, drawn)
    what = f"seed={seed}: P={world_size}, S={group_size}, tau={sync_period}, latency={latency_s}, "
    what += f"drawn={drawn}"
    last = ranks[0]["ends"][-1]
    for rank in ranks:
        assert rank["executed"] == list(range(last)), what
        assert rank["ends"] == ranks[0]["ends"], what
    for version in range(last):
        is_global = (version + 1) % sync_period == 0
        whole = [list(range(world_size))]
        for part in whole if is_global else topology.groups(version, world_size, group_size):
            sums = [ranks[member]["sums"][version] for member in part]
            assert all(total == sums[0] for total in sums), what  # the same to the bit
            assert sums[0][0] == len(part), what  # each member once
            assert sums[0][1] == sums[0][2], what  # none torn


@SEEDS
def test_every_version_is_executed_once_in_order_by_every_rank(seeds: range) -> None:
    """Random schedules; a failing one names its seed, and `check_schedule(seed)` replays it."""
    for seed in seeds:
        try:
            check_schedule(seed)
        except Exception as error:
            raise AssertionError(f"replay with check_schedule({seed}): {error}") from error


class OneSlowLink(Links):
    """A second passes until rank 3 has what rank 0 sends it."""

    def _rates_of(self, message: Any) -> tuple[float, float]:
        latency_s, bandwidth_bytes_s = super()._rates_of(message)
        is_slow = (message.src, message.dst) == (0, 3)
        return 1.0 if is_slow else latency_s, bandwidth_bytes_s


class OfRank3(Recorder):
    """Whose versions only rank 3 activates."""

    def activator(self, version: int) -> int | None:
        return 3


def arrive_and_settle(net: Any) -> tuple[int, float]:
    """How much is under way once this rank has settled, and when that is."""
    engine = WaitAvoiding(net, OfRank3(net, 2, 100), Grace(net, 0.0))
    engine.arrive(0)
    engine.settle()
    found = engine._num_unacknowledged, net.now()
    engine.stop()
    return found


def test_a_rank_rests_once_its_activator_has_heard_it() -> None:
    """Rank 0 tells rank 3, which no other message of the end goes to from rank 0."""
    ranks = SimulatedWorld(4, latency_s=0.001, links=OneSlowLink).run(arrive_and_settle)
    assert [number for number, _ in ranks] == [0] * 4
    assert ranks[0][1] > 1.0


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


def test_eager_sgd_loses_no_sum_that_comes_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    [(applied, left)] = SimulatedWorld(1).run(take_sums, monkeypatch)
    assert (applied.item(), left.item()) == (1.0, 2.0)


def point(seed: int) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(seed)).double()


def train(net: Any, spec: str) -> Tensor:
    chance = random.Random(net.rank)
    rank = Rank(net, make_algorithm(spec), point(0))
    for _ in range(24):
        rank.descend(rank.x - point(net.rank), 0.1, seconds=0.1 + 0.5 * (chance.random() < 0.3))
    own = rank.x.clone()
    rank.finish()
    return own


def run(world_size: int, spec: str) -> list[Tensor]:
    return SimulatedWorld(world_size, latency_s=1e-3).run(train, spec)


def assert_equal(ours: list[Tensor], theirs: list[Tensor], atol: float = 0.0) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def group_average(net: Any, size: int, period: int, group_period: int) -> Tensor:
    """WAGMA without wait-avoidance, written down directly."""
    x = point(0)
    for step in range(24):
        x.sub_(x - point(net.rank), alpha=0.1)
        if (step + 1) % group_period:
            continue
        version = (step + 1) // group_period - 1
        parts = topology.groups(version, net.world_size, size)
        group = next(part for part in parts if net.rank in part)
        if (step + 1) % period == 0:
            group = list(range(net.world_size))
        net.all_reduce(x, group).wait()
        x /= len(group)
    return x


@pytest.mark.parametrize("world_size", [1, 6])
@pytest.mark.parametrize("group_period", [1, 3])
def test_without_wait_avoidance_it_is_the_group_average(world_size: int, group_period: int) -> None:
    size, period = min(2, world_size), 5 * group_period
    options = f"group_period={group_period}:grace_s=Infinity"
    ours = run(world_size, f"wagma:group_size={size}:sync_period={period}:{options}")
    theirs = SimulatedWorld(world_size).run(group_average, size, period, group_period)
    assert_equal(ours, theirs, atol=1e-14)


@pytest.mark.parametrize("world_size", [4, 5])
def test_a_period_of_one_is_allreduce_and_groups_of_one_are_local_sgd(world_size: int) -> None:
    """With plain SGD from equal weights, averaging models is averaging gradients."""
    ours = run(world_size, f"wagma:group_size={world_size}:sync_period=1")
    assert_equal(ours, run(world_size, "allreduce"), atol=1e-13)
    ours = run(world_size, "wagma:group_size=1:sync_period=6")
    assert_equal(ours, run(world_size, "local_sgd:sync_period=6"), atol=1e-14)


def late_by_one(net: Any, *, paper: bool) -> list[float]:
    """Two ranks; rank 0 comes late to version 0, in time to version 1."""
    algorithm = WAGMA(group_size=2, sync_period=100, grace_s=0.0, paper=paper)
    rank, seen = Rank(net, algorithm, torch.tensor([float(10 * net.rank)])), []
    for compute_s in ([1.0, 3.0], [2.0, 0.5])[net.rank == 0]:
        rank.step(1.0, seconds=compute_s)
        seen.append(float(rank.x))
    return [*seen, float(rank.finish())]


def test_a_late_rank_goes_as_far_as_what_it_contributed_went() -> None:
    """On time: sum / S; late: W' + (sum / S - what was in the sum)."""
    first, second = SimulatedWorld(2).run(partial(late_by_one, paper=False))
    # Rank 1 arrives at 1.0 s with 11 and fires; rank 0 takes part with its initial 0.
    assert second[0] == (0 + 11) / 2
    # Rank 0 arrives at 2.0 s, late, with 1: its 0 has gone to 5.5.
    assert first[0] == 1 + (5.5 - 0)
    # Version 1: rank 0 arrives at 2.5 s with 7.5 and fires; rank 1 takes part with its 5.5.
    assert first[1] == (7.5 + 5.5) / 2
    # Rank 1 arrives at 4.0 s, late, with 6.5: its 5.5 has gone to 6.5.
    assert second[1] == 6.5 + (6.5 - 5.5)
    # Two ranks, from 0 and 10 on average 5, have made two steps each.
    assert first[2] == second[2] == 5 + 2


def test_the_papers_late_rank_averages_the_sum_with_its_own_weights() -> None:
    """On time: sum / S; late: (sum + W') / (S + 1), with its stale model in the sum."""
    first, second = SimulatedWorld(2).run(partial(late_by_one, paper=True))
    total = 0 + 11  # as above
    assert second[0] == pytest.approx(total / 2)
    # Rank 0 arrives at 2.0 s, late, with 1.
    assert first[0] == pytest.approx((total + 1) / 3)
    # Version 1: rank 0 arrives at 2.5 s and fires; rank 1 takes part with its 11 from version 0.
    own = first[0] + 1
    assert first[1] == pytest.approx((own + 11) / 2)
    # Rank 1 arrives at 4.0 s, late.
    assert second[1] == pytest.approx((own + 11 + second[0] + 1) / 3)
    assert first[2] != 5 + 2  # the mean has moved


def take_steps(net: Any, seed: int, make: Any) -> tuple[Tensor, Tensor]:
    """What this rank began with and added in three phases of random lengths, and the consensus."""
    chance = random.Random(f"{seed}/{net.rank}")
    draw = torch.Generator().manual_seed(seed * 1000 + net.rank)
    x = torch.randn(5, generator=draw).double()
    own, rank = x.clone(), Rank(net, make(), x)
    speed = chance.choice([1, 1, 1, 10])
    for _ in range(3):
        for _ in range(chance.randrange(12)):
            update = torch.randn(5, generator=draw).double()
            own += update
            rank.step(update, seconds=speed * chance.choice([0.0, 0.01, 0.1, 0.1, 0.5]))
        late = torch.randn(5, generator=draw).double()  # a callback writes, and makes no step
        own += late
        x += late
        rank.settle()
    return own, rank.finish()


def check_mean(seed: int) -> None:
    chance = random.Random(seed)
    world_size = chance.choice([chance.randrange(1, 9), chance.randrange(1, 18)])
    group_size = chance.choice([None, chance.randrange(1, world_size + 1)])
    group_period = chance.choice([1, 1, 2, 3, 7])
    sync_period = group_period * chance.choice([1, 2, 3, 5, 100])
    options = {
        "group_size": group_size,
        "sync_period": sync_period,
        "group_period": group_period,
        "overlap": chance.random() < 0.6,
        "grace_s": chance.choice([0.0, 0.02, None]) if chance.random() < 0.8 else math.inf,
    }
    world = SimulatedWorld(
        world_size,
        latency_s=chance.choice([0.0, 0.001, 0.05]),
        bandwidth_bytes_s=chance.choice([math.inf, 1e3, 1e2]),
        shared_link=chance.random() < 0.2,
    )
    bound = chance.choice([None, 1, 3])
    bounded = partial(HPSGD, max_local_steps=bound)
    for make in (partial(WAGMA, **options), bounded):
        what = f"P={world_size}, {make()}"
        owns, consensus = zip(*world.run(take_steps, seed, make), strict=True)
        for x in consensus:
            assert torch.equal(x, consensus[0]), what
            torch.testing.assert_close(x, torch.stack(owns).mean(0), rtol=0, atol=1e-12, msg=what)


@SEEDS
def test_the_mean_is_the_start_and_all_updates(seeds: range) -> None:
    """Random schedules, of HPSGD too; `check_mean(seed)` replays one that fails."""
    for seed in seeds:
        try:
            check_mean(seed)
        except Exception as error:
            raise AssertionError(f"replay with check_mean({seed}): {error}") from error


def evaluate_long(net: Any, make: Any) -> list[float]:
    """How long steps take: rank 1 is late by a second in the first and after an evaluation."""
    rank, took = Rank(net, make(), torch.zeros(3)), []
    for k in range(4):
        if k in (0, 2):
            net.compute(600.0)
            rank.settle()
        begin = net.now()
        rank.descend(torch.zeros(3), seconds=1.0 + (k in (0, 3) and net.rank == 1))
        took.append(net.now() - begin)
    rank.finish()
    return took


@pytest.mark.parametrize("make", [WAGMA, lambda: EagerSGD(quorum="solo")])
def test_the_grace_is_an_eighth_of_a_step_and_not_of_an_evaluation(make: Any) -> None:
    took = SimulatedWorld(2).run(evaluate_long, make)[0]
    assert (took[0], took[3]) == (pytest.approx(1.125), pytest.approx(1.125))


def resume_late(net: Any) -> dict[str, float]:
    """Rank 1 is late after a resume, so the lane contributes what was published there."""
    rank = Rank(net, WAGMA(group_size=2, grace_s=0.0), torch.zeros(3))
    for _ in range(20):
        rank.step(seconds=0.1)
    rank.settle()
    rank.resume(WAGMA(group_size=2, grace_s=0.0))
    for _ in range(3):
        rank.step(seconds=0.1 + 0.9 * net.rank)
    figures = rank.algorithm.metrics()
    rank.finish()
    return figures


def test_what_a_resume_publishes_is_as_old_as_the_last_step_before() -> None:
    for figures in SimulatedWorld(2).run(resume_late):
        assert figures["staleness_max"] <= 3


def delayed(net: Any, overlap: bool) -> tuple[float, float]:
    chance = random.Random(net.rank)
    rank = Rank(net, WAGMA(sync_period=10, overlap=overlap), torch.zeros(3).double())
    for _ in range(40):
        rank.step(seconds=0.1 + 0.4 * (chance.random() < 0.25))
    waited, end = net.counters.wait_s, net.now()
    rank.finish()
    return waited, end


def test_with_overlap_only_ranks_that_are_a_period_ahead_wait() -> None:
    blocking, overlapping = (
        SimulatedWorld(8, latency_s=1e-3).run(delayed, overlap) for overlap in (False, True)
    )
    assert sum(waited for waited, _ in overlapping) < 0.5 * sum(waited for waited, _ in blocking)
    slowest_waited, end = max(overlapping, key=lambda rank: rank[1])
    assert slowest_waited == 0.0
    assert end <= max(end for _, end in blocking)


def staleness(net: Any, seed: int, overlap: bool) -> int:
    chance = random.Random(f"{seed}/{net.rank}")
    algorithm = WAGMA(group_size=2, sync_period=3, overlap=overlap)
    rank = Rank(net, algorithm, torch.zeros(2).double())
    for _ in range(15):
        rank.step(seconds=chance.choice([0.01, 0.1, 0.1, 2.0]))
    rank.finish()
    return max(algorithm.staleness)


@pytest.mark.parametrize("overlap", [False, True])
def test_staleness_stays_below_the_period(overlap: bool) -> None:
    runs = [SimulatedWorld(7, latency_s=0.05).run(staleness, seed, overlap) for seed in range(8)]
    assert max(map(max, runs)) == 3 - 1


def jitter(net: Any, quorum: str, grace_s: float | None) -> dict[str, float]:
    """All ranks take 0.1 s for a step, and up to 3% more."""
    chance = random.Random(net.rank)
    rank = Rank(net, EagerSGD(quorum=quorum, grace_s=grace_s), torch.zeros(2).double())
    for _ in range(40):
        rank.descend(torch.ones(2).double(), seconds=0.1 * chance.uniform(1.0, 1.03))
    figures = {**rank.algorithm.metrics(), "seconds": net.now()}
    rank.finish()
    return figures


def test_solo_fires_with_the_first_and_a_grace_makes_gradients_count_that_come_later() -> None:
    def play(quorum: str, grace_s: float | None) -> tuple[float, float]:
        ranks = SimulatedWorld(8, latency_s=1e-5).run(jitter, quorum, grace_s)
        return sum(r["late_share"] for r in ranks) / 8, max(r["seconds"] for r in ranks)

    (late, seconds), (late_with_grace, seconds_with_grace) = (
        play("majority", grace_s) for grace_s in (0.0, None)
    )
    assert play("solo", 0.0)[0] > late > 0.35  # with the first rank; with one that is drawn
    assert late_with_grace <= 1 / 40  # the first round: no step has been measured yet
    assert seconds_with_grace < 1.03 * seconds
