"""The order that sums get, of all ranks and of groups, over random schedules in simulation."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.native_sends import colour_of
from lightning_dsgd.transport.tickets import ALL, EXCHANGE, SUM, Form, Key, Members, Tickets
from tests.support.thorough import tries

BLOCK = 15
"""So many schedules."""
BLOCKS = tries(4, fast=1)


class InOrder:
    """A backend that, like NCCL, comes to no end unless all ranks launch sums in one order.

    A sum in a group is two batches of sends and receives, which nothing but their order tells
    apart.  The starter waits for the end of each, which NCCL's does not: so it is blocked more
    often.
    """

    def __init__(self, net: Any) -> None:
        self.launched: list[Key] = []
        self.abandoned = 0
        self.failure: Exception | None = None
        self._sums = net.sub("one-order")
        self._arguments: dict[Key, tuple[Tensor, Any]] = {}
        self.tickets = Tickets(net.sub("tickets"), self)

    def all_reduce(self, net: Any, key: Key, x: Tensor) -> Any:
        """Begins a sum; its result is a message to the thread that has called it.

        A group of two is served as a pair.
        """
        self._arguments[key] = x, net
        receipt = net.recv(x, net.rank, tag=_tag(key))
        self.tickets.ask(key, root_of(key), 0, len(x))
        return receipt

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        x, net = self._arguments.pop(key)
        members = key[0]
        assert lengths == (dict.fromkeys(members, 3) if root_of(key) == EXCHANGE else {})
        self.launched.append(key)
        if members == ALL:
            total = self._sums.all_reduce(x.clone()).wait(math.inf)
        else:
            total = torch.stack(self._batch(x, members)).sum(0)
            assert all(other.equal(total) for other in self._batch(total, members)), key
        net.send(total, net.rank, tag=_tag(key))

    def _batch(self, x: Tensor, members: Members) -> list[Tensor]:
        """Sends x to all other members; returns what each has, in the order of the group."""
        others = [rank for rank in members if rank != self._sums.rank]
        for rank in others:
            self._sums.send(x, rank)
        come = {rank: self._sums.recv(x, rank).wait(math.inf) for rank in others}
        return [come.get(rank, x) for rank in members]

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        x, net = self._arguments.pop(key)
        net.send(torch.full_like(x, math.nan), net.rank, tag=_tag(key))

    def abandon(self, failure: Exception | None = None) -> None:
        self.abandoned += 1
        self.failure = failure


def root_of(key: Key) -> int:
    return EXCHANGE if len(key[0]) == 2 else SUM


def _tag(key: Key) -> int:
    _, channel, number = key
    return 1000 * channel + number


def contribution(rank: int, key: Key) -> float:
    _, channel, number = key
    return float((rank + 1) * (1 + channel) + 1000 * number)


def draw_groups(chance: random.Random, world_size: int) -> list[Members]:
    """All ranks, and up to four groups, that overlap as they happen to; some are pairs."""
    num_groups = chance.randint(0, 4) if world_size > 1 else 0
    sizes = [chance.randint(2, world_size) for _ in range(num_groups)]
    return [ALL, *(tuple(chance.sample(range(world_size), size)) for size in sizes)]


def sum_in_threads(net: Any, seed: int, plans: list[list[list[int]]]) -> list[Key]:
    """A thread for each plan, which says how many sums of which channels it calls at a time.

    It waits for them in any order.  Each channel is of one of the groups; those that the rank is
    not in, it leaves out.
    """
    backend = InOrder(net)
    groups = draw_groups(random.Random(f"groups {seed}"), net.world_size)
    chance = random.Random(f"{seed} {net.rank}")

    def run(end: Any, plan: list[list[int]]) -> None:
        numbers = Counter[int]()
        for channels in plan:
            under_way = []
            for channel in channels:
                members = groups[channel % len(groups)]
                if members == ALL or net.rank in members:
                    end.compute(chance.choice((0.0, 0.001, 0.05)) * chance.random())
                    key = members, channel, numbers[channel]
                    numbers[channel] += 1
                    x = torch.full((3,), contribution(net.rank, key))
                    under_way.append((key, backend.all_reduce(end, key, x)))
            chance.shuffle(under_way)
            for key, work in under_way:
                total = sum(contribution(rank, key) for rank in key[0] or range(net.world_size))
                assert work.wait().eq(total).all(), key

    with contextlib.ExitStack() as ending:
        ending.callback(backend.tickets.stop)
        with contextlib.ExitStack() as joining:
            for place, plan in enumerate(plans[1:]):
                lane = net.spawn_lane(partial(run, plan=plan), f"plan-{place}")
                joining.callback(lane.join)
            run(net.sub("own"), plans[0])
        net.barrier().wait()
    assert not backend.abandoned
    return backend.launched


def draw_plans(chance: random.Random) -> list[list[list[int]]]:
    plans, channel = [], 0
    for _ in range(chance.randint(1, 4)):
        own = list(range(channel, channel + chance.randint(1, 3)))
        channel = own[-1] + 1
        plans.append([chance.choices(own, k=chance.randint(1, 4)) for _ in range(4)])
    return plans


def reordered(plans: list[list[list[int]]], chance: random.Random) -> list[list[list[int]]]:
    """The same sums, each thread's of one time in another order."""
    return [[chance.sample(channels, len(channels)) for channels in plan] for plan in plans]


def sum_reordered(net: Any, seed: int) -> list[Key]:
    plans = draw_plans(random.Random(seed))
    return sum_in_threads(net, seed, reordered(plans, random.Random(f"{seed}, {net.rank}")))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_schedule_ends_with_the_right_sums_in_one_order(block: int) -> None:
    for seed in range(BLOCK * block, BLOCK * block + BLOCK):
        world_size = 1 + seed % 9
        world = SimulatedWorld(world_size, latency_s=0.002 * (seed % 3), timeout_s=100.0)
        launched = world.run(sum_reordered, seed)
        for one, other in combinations(launched, 2):
            assert in_common(one, other) == in_common(other, one), seed
            assert len(set(one)) == len(one)


def in_common(one: list[Key], other: list[Key]) -> list[Key]:
    return [key for key in one if key in set(other)]


def sum_until_lost(net: Any, seed: int) -> tuple[str, float]:
    try:
        sum_reordered(net, seed)
    except PeerLost as lost:
        return f"rank {lost.rank}", net.now()
    return "through", net.now()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_rank_killed_at_any_moment_is_named_by_all_others(block: int) -> None:
    num_struck = 0
    for seed in range(BLOCK * block, BLOCK * block + BLOCK):
        chance = random.Random(seed)
        world_size = 2 + seed % 8
        lost, at_s = chance.randrange(world_size), 0.3 * chance.random()
        world = SimulatedWorld(world_size, latency_s=0.002, timeout_s=100.0, strict=False)
        world.kill(lost, at_s)
        outcomes = world.outcomes(sum_until_lost, seed)
        for rank, outcome in enumerate(outcomes):
            if rank != lost:
                assert not isinstance(outcome, BaseException), (seed, outcome)
                what, ended_s = outcome
                assert what in (f"rank {lost}", "through"), (seed, what)
                assert what == "through" or ended_s < at_s + 0.5, (seed, ended_s)
                num_struck += what != "through"
    assert num_struck > BLOCK


# ---- without threads: ten thousand schedules ----
SCHEDULES = 250
BLOCKS_OF_SCHEDULES = tries(40, fast=1)
Call = tuple[Key, int]
"""A sum, or one of the two batched calls of a sum in a group."""


class Schedule:
    """All ranks in one thread: what may happen next happens in an order that a seed draws.

    A rank has two communicators.  Each makes one call after another, and ends none before all
    members of the call have come to it.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.messages: dict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
        world_size = 2 + seed % 8
        groups, plans = draw_groups(self.chance, world_size), draw_plans(self.chance)
        self.ranks = [
            ScheduledRank(self, rank, world_size, groups, reordered(plans, self.chance))
            for rank in range(world_size)
        ]

    def run(self) -> None:
        while events := self.events():
            self.chance.choice(events)()

    def events(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for (source, rank), queue in self.messages.items():
            if queue:
                found.append(partial(self.deliver, source, rank))
        for rank in self.ranks:
            found += [partial(rank.call, thread) for thread in rank.threads if thread.may_call()]
            for colour, calls in enumerate(rank.calls):
                if calls:
                    key, _ = call = calls[0]
                    members = [self.ranks[i] for i in key[0] or range(len(self.ranks))]
                    if rank is members[0] and all(
                        call in other.calls[colour][:1] for other in members
                    ):
                        found.append(partial(self.end, call, colour, members))
        return found

    def deliver(self, source: int, rank: int) -> None:
        words = self.messages[source, rank].popleft()
        self.ranks[rank].tickets.take(self.ranks[rank], words, source)  # type: ignore[arg-type]

    def end(self, call: Call, colour: int, members: list[ScheduledRank]) -> None:
        for rank in members:
            assert rank.calls[colour].pop(0) == call
            rank.ended(call)


class ScheduledThread:
    """A thread of a rank: calls all sums of a time, and goes on once it has them."""

    def __init__(self, plan: list[list[Key]]) -> None:
        self.times, self.awaited = deque(map(deque, plan)), set[Key]()

    def may_call(self) -> bool:
        while self.times and not self.times[0] and not self.awaited:
            self.times.popleft()
        return bool(self.times and self.times[0])


class ScheduledRank:
    """A rank: its threads, its starter, the starter's endpoint, and its communicators."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        world_size: int,
        groups: list[Members],
        plans: list[list[list[int]]],
    ) -> None:
        self.rank, self.world_size, self.net = rank, world_size, self
        self.schedule = schedule
        self.calls: tuple[list[Call], list[Call]] = [], []
        self.launched: list[Key] = []
        self.asked: set[Key] = set()
        self.threads = []
        for plan in plans:
            numbers, keys = Counter[int](), []
            for channels in plan:
                time = []
                for channel in channels:
                    members = groups[channel % len(groups)]
                    if members == ALL or rank in members:
                        time.append((members, channel, numbers[channel]))
                        numbers[channel] += 1
                keys.append(time)
            self.threads.append(ScheduledThread(keys))
        self.tickets = Tickets(self, self)  # type: ignore[arg-type]

    def call(self, thread: ScheduledThread) -> None:
        key = thread.times[0].popleft()
        thread.awaited.add(key)
        self.asked.add(key)
        self.tickets.ask(key, root_of(key), 0, 3)

    def ended(self, call: Call) -> None:
        key, number = call
        if number == _num_calls(key) - 1:
            [thread] = [thread for thread in self.threads if key in thread.awaited]
            thread.awaited.remove(key)

    # ---- the starter's endpoint, and its lane ----

    def spawn_lane(self, serve: Any, name: str) -> ScheduledRank:
        return self

    def send(self, x: Tensor, dst: int) -> None:
        self.schedule.messages[self.rank, dst].append(x.tolist())

    def tell(self, x: Tensor) -> None:
        self.send(x, self.rank)

    # ---- the backend ----

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        self.asked.remove(key)  # else its thread has not called it
        self.launched.append(key)
        self.calls[self.colour(key)].extend((key, number) for number in range(_num_calls(key)))

    def colour(self, key: Key) -> int:
        return colour_of(key[0], self.world_size, is_push=False) if len(key[0]) == 2 else 0

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        raise AssertionError(key)

    def abandon(self, failure: Exception | None = None) -> None:
        raise AssertionError(failure)


def _num_calls(key: Key) -> int:
    return 2 if len(key[0]) > 2 else 1


@pytest.mark.parametrize("block", BLOCKS_OF_SCHEDULES)
def test_nobody_waits_for_ever_in_any_schedule(block: int) -> None:
    for seed in range(SCHEDULES * block, SCHEDULES * (block + 1)):
        schedule = Schedule(seed)
        schedule.run()
        for rank in schedule.ranks:
            assert rank.calls == ([], []), (seed, rank.rank)
            for thread in rank.threads:
                assert not thread.times, (seed, rank.rank, thread.awaited)
        for one, other in combinations(schedule.ranks, 2):
            common = in_common(one.launched, other.launched)
            assert common == in_common(other.launched, one.launched), seed
