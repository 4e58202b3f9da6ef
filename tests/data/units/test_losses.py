"""`balanced` where ranks are lost, by itself: on a virtual clock, with lanes that sum in two parts.

A rank is killed at any time.  The others notice at different times; until then their lanes go on.
Who computes comes to the change where it waits next.  Each sum is kept as the list of its units.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_dsgd.data.units.dealer import Dealer
from lightning_dsgd.data.units.losses import conclude, members_of, report_of
from lightning_dsgd.data.units.protocol import CLOSED, DEALER, NONE
from tests.data.units.test_protocol import World, played, schedule
from tests.support.thorough import times


class LossyWorld(World):
    """Ranks of which some are killed, and the others go on.

    Attributes:
        applied: the units of each step's sum, as each rank has applied it
        num_changes: how many views have followed the first one
    """

    def begin(self, chance: random.Random, kills: dict[int, float]) -> LossyWorld:
        self.chance, P = chance, self.num_ranks
        self.members = list(range(P))
        self.view = self.num_changes = 0
        self.dead: set[int] = set()
        self.broken: set[int] = set()  # have noticed that a rank is lost
        self.come: set[int] = set()  # are there to change the view
        self.entries: list[dict[int, list[int]]] = [{} for _ in range(P)]  # G_r, by step
        self.half: list[tuple[int, list[int]] | None] = [None] * P
        self.made: list[dict[int, list[int]]] = [{} for _ in range(P)]
        self.newest = [NONE] * P
        self.applied: list[list[list[int]]] = [[] for _ in range(P)]
        self.queues: list[deque[int]] = [deque() for _ in range(P)]
        self.summing: list[int] = [NONE] * P
        self.parts: dict[tuple[int, str], set[int]] = {}
        for rank, at in kills.items():
            self.plan(at, lambda rank=rank: self.kill(rank))
        return self

    # ---- a training thread ----

    def thread(self, rank: int) -> Iterator[Any]:
        hand = self.hands[rank]
        for step in range(self.num_steps):
            hand.begin_step(step)
            for _ in range(self.num_slots):
                yield lambda: hand.is_answered
                if hand.begin() != NONE:
                    yield from self.compute(rank, step)
            while step not in self.made[rank]:
                yield lambda: hand.ahead != NONE or hand.is_closed
                if hand.begin() != NONE:
                    yield from self.compute(rank, step)
                elif hand.is_closed:
                    yield lambda step=step: step in self.made[rank] or not hand.is_closed
            self.applied[rank].append(self.made[rank].pop(step))
        self.ends[rank] = self.now

    def compute(self, rank: int, step: int) -> Iterator[Any]:
        hand, unit = self.hands[rank], self.hands[rank].current
        yield from super().compute(rank, step)
        if unit in hand.entered:
            self.entries[rank].setdefault(step, []).append(unit)

    def go_on(self, rank: int, *, has_computed: bool = False) -> None:
        if rank in self.dead:
            return
        super().go_on(rank, has_computed=has_computed)
        if rank in self.broken and self.waits[rank] is not None:
            self.come.add(rank)
            self.change()

    # ---- messages ----

    def send(self) -> None:
        for rank in self.members:
            for words in self.hands[rank].outbox:
                self.pass_on(rank, self.members[DEALER], words, "up")
            self.hands[rank].outbox.clear()
        for place, words in self.dealer.outbox:
            self.pass_on(self.members[DEALER], self.members[place], words, "down")
        self.dealer.outbox.clear()

    def pass_on(self, sender: int, receiver: int, words: Any, way: str) -> None:
        if {sender, receiver} & (self.dead | self.broken):
            return
        key, view = (sender, receiver, way), self.view
        at = max(self.arrivals[key], self.now + self.latency())  # type: ignore[call-overload]
        self.arrivals[key] = at  # type: ignore[assignment]

        def arrive() -> None:
            if view != self.view or receiver in self.dead | self.broken:
                return
            if way == "up":
                self.dealer.hear(self.members.index(sender), words, self.now)
                return
            self.hands[receiver].hear(words)
            if words[0] == CLOSED:
                self.queues[receiver].append(words[1])
                self.begin_sum(receiver)

        self.plan(at - self.now, arrive)

    # ---- sums ----

    def begin_sum(self, rank: int) -> None:
        if self.summing[rank] == NONE and self.queues[rank]:
            step = self.summing[rank] = self.queues[rank].popleft()
            self.join_in(rank, step, "g")

    def join_in(self, rank: int, step: int, part: str) -> None:
        """A part is there on a rank some time after all have begun it."""
        begun = self.parts.setdefault((step, part), set())
        begun.add(rank)
        if begun != set(self.members):
            return
        total = [unit for r in self.members for unit in self.entries[r].get(step, [])]
        view = self.view
        for r in self.members:
            self.plan(self.latency(), lambda r=r: self.summed(view, r, step, part, total))

    def summed(self, view: int, rank: int, step: int, part: str, total: list[int]) -> None:
        if view != self.view or rank in self.dead | self.broken:
            return
        if part == "g":
            self.half[rank] = step, total
            self.join_in(rank, step, "flags")
            return
        self.have(rank, step)
        self.summing[rank] = NONE
        self.begin_sum(rank)

    def have(self, rank: int, step: int) -> None:
        half = self.half[rank]
        assert half is not None, (rank, step)
        assert half[0] == step, (rank, step, half)
        self.made[rank][step], self.newest[rank] = half[1], step
        self.entries[rank].pop(step, None)

    # ---- losses ----

    def kill(self, rank: int) -> None:
        if rank in self.dead or len(self.members) - len(self.dead & set(self.members)) == 1:
            return
        if not any(self.ends[r] != self.ends[r] for r in self.members):
            return
        self.dead.add(rank)
        self.ends[rank] = self.now
        for other in self.members:
            if other not in self.dead:
                self.plan(self.chance.uniform(0, 2.0), lambda r=other: self.notice(r))
        self.change()

    def notice(self, rank: int) -> None:
        if rank in self.dead or not self.dead & set(self.members):
            return
        self.broken.add(rank)
        if self.waits[rank] is not None:
            self.go_on(rank)

    def change(self) -> None:
        left = [rank for rank in self.members if rank not in self.dead]
        if not self.dead & set(self.members) or not set(left) <= self.come:
            return
        self.view += 1
        self.num_changes += 1
        self.members = left
        self.broken.clear()
        self.come.clear()
        self.parts.clear()
        reports = [
            report_of(
                self.hands[rank],
                self.newest[rank],
                holds=self.newest[rank] < self.hands[rank].step,
            )
            for rank in left
        ]
        after = conclude(reports)
        for rank in left:
            if self.newest[rank] < after.summed:
                self.have(rank, after.summed)
            self.half[rank] = None
            self.queues[rank].clear()
            self.summing[rank] = NONE
            self.hands[rank].go_on(after)
        self.dealer = Dealer(len(left), backups=self.backups, after=after)
        places = members_of(self.num_ranks, left)
        every = [[places[home] for home in self.units(step)] for step in range(self.num_steps)]
        self.dealer.know(0, every, self.now)

    def check(self) -> None:
        """Each step's sum has each of its units once, on each rank that is left."""
        for rank in self.members:
            assert len(self.applied[rank]) == self.num_steps or rank in self.dead
            for step, units in enumerate(self.applied[rank]):
                assert sorted(units) == list(range(self.num_units[step])), (rank, step, units)


def lossy(seed: int) -> LossyWorld:
    """A world by chance, some of whose ranks are killed at any time."""
    chance = random.Random(-seed)
    world = schedule(seed)
    given: dict[str, Any] = {
        name: getattr(world, name)
        for name in ("num_ranks", "num_steps", "num_slots", "time", "backups", "latency", "homes")
    }
    latency: Callable[[], float] = given["latency"]
    given["latency"] = lambda: latency() + 1e-6
    length = world.num_steps * world.num_slots * 2.0
    kills = {
        rank: chance.uniform(0.0, length)
        for rank in range(world.num_ranks)
        if chance.random() < 0.5
    }
    return LossyWorld(**given).begin(chance, kills)


@pytest.mark.parametrize("block", range(2))
def test_each_unit_enters_once_whoever_is_lost(block: int) -> None:
    worlds = played(lossy, range(100 * block, 100 * block + 100))
    assert sum(world.num_changes for world in worlds) > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", times(10))
def test_ten_thousand_schedules_with_losses(block: int) -> None:
    worlds = played(lossy, range(1000 * (block + 1), 1000 * (block + 2)))
    assert sum(world.num_changes for world in worlds) > 500


def test_a_home_without_its_rank_goes_to_newcomers_and_then_to_all_in_turn() -> None:
    assert members_of(4, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert members_of(5, [1, 3]) == [0, 0, 1, 1, 0]
    assert members_of(4, [1, 3, 4]) == [2, 0, 0, 1]
