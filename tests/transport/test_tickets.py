"""The order that sums get, of all ranks and of groups, over random schedules in simulation."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.tickets import (
    ALL,
    EXCHANGE,
    SUM,
    Form,
    Key,
    Tickets,
    pair_number,
)
from tests.support.thorough import tries

BLOCK = 15
"""So many schedules."""
BLOCKS = tries(4, fast=1)


class InOrder:
    """A backend that, like NCCL, comes to no end unless all ranks launch sums in one order.

    The starter waits for the end of each, which NCCL's does not: so it is blocked more often.
    """

    def __init__(self, net: Any) -> None:
        self.launched: list[Key] = []
        self.abandoned = 0
        self.failure: Exception | None = None
        self._sums = net.sub("one-order")
        self._arguments: dict[Key, tuple[Tensor, Any, Key]] = {}
        self.tickets = Tickets(net.sub("tickets"), self)
        self.groups: list[Sequence[int]] = [range(net.world_size)]

    def form(self, groups: Sequence[Sequence[int]]) -> None:
        for members in groups:
            assert self.tickets.form(members) == len(self.groups)
            self.groups.append(members)
        self._sums.sub("formed").barrier().wait()

    def all_reduce(self, net: Any, key: Key, x: Tensor) -> Any:
        """Begins a sum; its result is a message to the thread that has called it.

        A group of two that has been formed is served as a pair.
        """
        members, ticket = self.groups[key[0]], key
        if key[0] != ALL and len(members) == 2:
            ticket = (pair_number(*members, net.world_size), *key[1:])
        self._arguments[ticket] = x, net, key
        receipt = net.recv(x, net.rank, tag=_tag(key))
        self.tickets.ask(ticket, SUM if ticket == key else EXCHANGE, 0, len(x))
        return receipt

    def launch(self, ticket: Key, lengths: Mapping[int, int]) -> None:
        x, net, key = self._arguments.pop(ticket)
        assert lengths == (dict.fromkeys(self.groups[key[0]], 3) if ticket != key else {})
        self.launched.append(ticket)
        total = self._sums.all_reduce(x.clone(), self.groups[key[0]]).wait(math.inf)
        net.send(total, net.rank, tag=_tag(key))

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        x, net, _ = self._arguments.pop(key)
        net.send(torch.full_like(x, math.nan), net.rank, tag=_tag(key))

    def abandon(self, failure: Exception | None = None) -> None:
        self.abandoned += 1
        self.failure = failure


def _tag(key: Key) -> int:
    _, channel, number = key
    return 1000 * channel + number


def contribution(rank: int, key: Key) -> float:
    _, channel, number = key
    return float((rank + 1) * (1 + channel) + 1000 * number)


def draw_groups(chance: random.Random, world_size: int) -> list[list[int]]:
    """Up to four, that overlap as they happen to; some are pairs."""
    num_groups = chance.randint(0, 4) if world_size > 1 else 0
    sizes = [chance.randint(2, world_size) for _ in range(num_groups)]
    return [sorted(chance.sample(range(world_size), size)) for size in sizes]


def sum_in_threads(net: Any, seed: int, plans: list[list[list[int]]]) -> list[Key]:
    """A thread for each plan, which says how many sums of which channels it calls at a time.

    It waits for them in any order.  Each channel is of one of the groups; those that the rank is
    not in, it leaves out.
    """
    backend = InOrder(net)
    backend.form(draw_groups(random.Random(f"groups {seed}"), net.world_size))
    chance = random.Random(f"{seed} {net.rank}")

    def run(end: Any, plan: list[list[int]]) -> None:
        numbers = Counter[int]()
        for channels in plan:
            under_way = []
            for channel in channels:
                group = channel % len(backend.groups)
                if net.rank in backend.groups[group]:
                    end.compute(chance.choice((0.0, 0.001, 0.05)) * chance.random())
                    key = group, channel, numbers[channel]
                    numbers[channel] += 1
                    x = torch.full((3,), contribution(net.rank, key))
                    under_way.append((key, backend.all_reduce(end, key, x)))
            chance.shuffle(under_way)
            for key, work in under_way:
                total = sum(contribution(rank, key) for rank in backend.groups[key[0]])
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
