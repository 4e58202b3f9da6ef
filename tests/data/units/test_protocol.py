"""The protocol of `balanced` by itself: ranks on a virtual clock, messages that take their time.

Each training thread goes through slots and steps as a face has it; each message arrives some time
after it was sent, in its sender's order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from lightning_dsgd.data.units.dealer import Dealer
from lightning_dsgd.data.units.hand import Hand
from lightning_dsgd.data.units.protocol import (
    ANSWER,
    CLOSED,
    CONTEST,
    DEALER,
    FINISHED,
    GRANT,
    MAX_LAG,
    NONE,
    READY,
    VERDICT,
)
from tests.support.thorough import times

Time = Callable[[int, int], float]
"""How long a unit takes, as a function of the rank and the step."""


@dataclass
class World:
    """Ranks that go through steps.

    Attributes:
        entered: the ranks whose sums a unit has entered, by step and unit
        closed: the steps that each rank was told are closed, in the order in which it was
        void: how many units were computed in vain
        ends: when each rank has its last step's sum
    """

    num_ranks: int
    num_steps: int
    num_slots: int
    time: Time
    backups: bool = True
    latency: Callable[[], float] = lambda: 1e-3
    homes: Callable[[int], list[int]] | None = None
    skips: Callable[[int], int | None] = lambda step: None
    """After how many slots all ranks leave a step, as where training is stopped early."""
    now: float = 0.0
    void: int = 0
    lag: int = 0
    """By how many steps a rank was behind one that closed, at most."""
    num_messages: int = 0
    entered: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        P = self.num_ranks
        self.hands = [Hand(rank) for rank in range(P)]
        self.dealer = Dealer(P, backups=self.backups)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.arrivals: Counter[tuple[int, int, str]] = Counter()
        self.closed: list[list[int]] = [[] for _ in range(P)]
        self.sums: Counter[int] = Counter()  # how many ranks' lanes have begun each step's sum
        self.threads = [self.thread(rank) for rank in range(P)]
        self.waits: list[Callable[[], bool] | None] = [None] * P
        self.ends = [math.nan] * P
        every = [self.units(step) for step in range(self.num_steps)]
        self.num_units = [len(homes) for homes in every]
        self.dealer.know(0, every, 0.0)
        self.look: float = math.inf

    def units(self, step: int) -> list[int]:
        if self.homes is not None:
            return self.homes(step)
        return [rank for _ in range(self.num_slots) for rank in range(self.num_ranks)]

    # ---- a training thread ----

    def thread(self, rank: int) -> Iterator[Any]:
        hand = self.hands[rank]
        for step in range(self.num_steps):
            hand.begin_step(step)
            left = self.skips(step)
            for slot in range(self.num_slots if left is None else left):
                yield lambda: hand.is_answered
                if hand.begin() != NONE:
                    yield from self.compute(rank, step)
                if left is None and slot == self.num_slots - 1:
                    while True:
                        yield lambda: hand.ahead != NONE or hand.is_closed
                        if hand.begin() != NONE:
                            yield from self.compute(rank, step)
                        elif hand.is_closed:
                            break
            if left is None:
                yield partial(self.is_summed, step)
        self.ends[rank] = self.now

    def is_summed(self, step: int) -> bool:
        return self.sums[step] == self.num_ranks

    def compute(self, rank: int, step: int) -> Iterator[Any]:
        hand, unit = self.hands[rank], self.hands[rank].current
        yield self.time(rank, step)
        answers: list[bool | None] = []

        def is_said() -> bool:
            answers.append(hand.enter())
            return answers[-1] is not None

        yield is_said
        if answers[-1]:
            self.entered.setdefault((step, unit), []).append(rank)
        else:
            self.void += 1
        hand.finish(has_entered=bool(answers[-1]))

    def go_on(self, rank: int, *, has_computed: bool = False) -> None:
        """Runs a training thread until it computes, or waits for something that is not so yet."""
        while True:
            awaited = self.waits[rank]
            if awaited is not None and not awaited():
                break
            if awaited is None and not has_computed:
                return  # it computes
            has_computed = False
            try:
                asked = next(self.threads[rank])
            except StopIteration:
                self.waits[rank] = lambda: False
                break
            if callable(asked):
                self.waits[rank] = asked
            else:
                self.waits[rank] = None
                self.plan(asked, lambda: self.go_on(rank, has_computed=True))
                break
        self.send()

    # ---- time and messages ----

    def plan(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def send(self) -> None:
        for hand in self.hands:
            for words in hand.outbox:
                self.deliver(hand.rank, DEALER, words, "up")
            hand.outbox.clear()
        for receiver, words in self.dealer.outbox:
            self.deliver(DEALER, receiver, words, "down")
        self.dealer.outbox.clear()

    def deliver(self, sender: int, receiver: int, words: Any, way: str) -> None:
        self.num_messages += 1
        key = (sender, receiver, way)
        at = max(self.arrivals[key], self.now + self.latency())  # type: ignore[call-overload]
        self.arrivals[key] = at  # type: ignore[assignment]

        def arrive() -> None:
            if way == "up":
                self.dealer.hear(sender, words, self.now)
            else:
                self.hands[receiver].hear(words)
                if words[0] == CLOSED:
                    self.closed[receiver].append(words[1])
                    self.sums[words[1]] += 1
                    self.lag = max(self.lag, words[1] - min(hand.step for hand in self.hands))

        self.plan(at - self.now, arrive)

    def run(self) -> World:
        for rank in range(self.num_ranks):
            self.go_on(rank, has_computed=True)
        for turn in itertools.count():
            if not any(math.isnan(end) for end in self.ends):
                return self
            assert turn < 300_000, f"they wait for ever:\n{self.who_waits()}"
            look = self.now + self.dealer.next_look(self.now)
            assert self.events or look < math.inf, self.who_waits()
            if not self.events or look < self.events[0][0]:
                self.now = max(self.now, look)
                self.dealer.deal(self.now)
            else:
                self.now, _, event = heapq.heappop(self.events)
                event()
            self.send()
            for rank in range(self.num_ranks):
                if self.waits[rank] is not None:
                    self.go_on(rank)
        raise AssertionError("unreachable")

    def who_waits(self) -> str:
        return "\n".join(f"{hand.rank}: {vars(hand)}" for hand in self.hands)

    def check(self) -> None:
        """Each unit of each whole step has entered one rank's sum, and all ranks know when."""
        for step in range(self.num_steps):
            for unit in range(self.num_units[step]):
                ranks = self.entered.get((step, unit), [])
                assert len(ranks) == 1 or self.skips(step) is not None, (step, unit, ranks)
        for steps in self.closed:
            whole = [s for s in steps if self.skips(s) is None]
            assert whole == [s for s in range(self.num_steps) if self.skips(s) is None]


def schedule(seed: int) -> World:
    """A world by chance: who is slow, who is late when, who stalls, how messages travel."""
    chance = random.Random(seed)
    num_ranks, num_slots = chance.choice([1, 2, 3, 4, 5, 8]), chance.choice([1, 2, 3, 4, 8])
    num_steps = chance.randint(2, 12)
    slow = [chance.choice([1.0, 1.0, 1.0, 2.0, 5.0]) for _ in range(num_ranks)]
    noise, stalls = chance.choice([0.0, 0.05, 1.0]), chance.choice([0.0, 0.02, 0.2])
    longest = chance.choice([3.0, 30.0])
    latency = chance.choice([0.0, 1e-3, 0.1, 3.0])
    num_parts = chance.choice([1, 1, 2, 4])
    uneven = chance.random() < 0.3

    def time(rank: int, step: int) -> float:
        stalled = chance.uniform(1.0, longest) if chance.random() < stalls else 0.0
        return slow[rank] * (1 + noise * chance.random()) + stalled

    def homes(step: int) -> list[int]:
        if not uneven:
            return [r for _ in range(num_slots * num_parts) for r in range(num_ranks)]
        rng = random.Random(seed * 1000 + step)
        return [r for r in range(num_ranks) for _ in range(rng.randint(0, num_slots))] or [0]

    left = {step: chance.randint(1, num_slots) for step in range(num_steps - 1)}
    leaves = chance.choice([0.0, 0.0, 0.3])
    early = {step: n for step, n in left.items() if chance.random() < leaves and n < num_slots}
    return World(
        num_ranks,
        num_steps,
        num_slots,
        time,
        backups=chance.random() < 0.7,
        latency=lambda: latency * chance.random(),
        homes=homes,
        skips=early.get,
    )


def test_a_unit_that_enters_its_sum_is_contested_by_nobody() -> None:
    """A lane hears the dealer while the training thread adds the unit to the sum."""
    hand = Hand(1)
    hand.begin_step(0)
    hand.hear((GRANT, 0, 5, 0))
    hand.begin()
    assert hand.enter()
    hand.hear((CONTEST, 0, 5))
    assert hand.outbox[-1] == (ANSWER, 0, 5, FINISHED)


def test_a_unit_that_is_dropped_is_not_told_as_finished() -> None:
    """The rank that has the dealer's yes may not have heard it, and would hear CLOSED first."""
    hand = Hand(1)
    hand.begin_step(0)
    hand.hear((GRANT, 0, 5, 1))
    hand.begin()
    assert hand.enter() is None
    hand.hear((VERDICT, 0, 5, 0))
    assert hand.enter() is False
    hand.finish(has_entered=False)
    assert hand.outbox[-1] == (READY, 0, NONE)


Played = TypeVar("Played", bound=World)


def played(make: Callable[[int], Played], seeds: Iterable[int]) -> Iterator[Played]:
    """Plays and checks the world of each seed; an error names the seed."""
    for seed in seeds:
        try:
            world = make(seed)
            world.run()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        yield world


@pytest.mark.parametrize("block", range(2))
def test_each_unit_enters_once_and_nobody_waits_for_ever(block: int) -> None:
    assert len([*played(schedule, range(100 * block, 100 * block + 100))]) == 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", times(2))
def test_two_thousand_schedules(block: int) -> None:
    """Those with losses, in `test_losses`, are ten thousand."""
    assert len([*played(schedule, range(1000 * (block + 1), 1000 * (block + 2)))]) == 1000


def mean_step(time: Time, num_ranks: int = 4, num_slots: int = 4, **options: Any) -> float:
    world = World(num_ranks, 40, num_slots, time, latency=lambda: 1e-4, **options).run()
    world.check()
    return max(world.ends) / 40


def test_equal_ranks_lose_nothing() -> None:
    assert mean_step(lambda rank, step: 0.25) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("num_ranks", "num_slots", "most"), [(4, 4, 1.26), (8, 8, 1.14)])
def test_a_slow_rank_gets_no_unit_that_others_finish_first(
    num_ranks: int, num_slots: int, most: float
) -> None:
    """With 7.5 ranks' speed and units of an eighth, a step of 1 takes 9 / 8; DDP's takes 2."""
    slow = mean_step(lambda rank, step: (2 if rank == 1 else 1) / num_slots, num_ranks, num_slots)
    assert slow < most


def test_nobody_waits_for_a_stall_with_backups() -> None:
    """Rank 1 stalls for ten steps in step 5: the others compute its units, and are held up once."""
    began: list[float] = []

    def time(rank: int, step: int) -> float:
        if rank == 1 and step == 5 and not began:
            began.append(step)
            return 10.0
        return 0.25

    without = mean_step(time, backups=False)
    began.clear()
    with_backups = mean_step(time)
    # 40 steps; four of them by three ranks, and then they wait for it, as MAX_LAG says.
    assert without * 40 > 49
    assert with_backups * 40 < without * 40 - 0.8 * MAX_LAG


def test_a_rank_is_helped_with_its_first_unit() -> None:
    """Nobody knows how long one takes rank 2, so it counts as long as the others' units take."""
    stalled = deque([30.0])
    world = World(4, 3, 4, lambda rank, step: stalled.pop() if rank == 2 and stalled else 0.25)
    world.run().check()
    assert sorted(world.ends)[2] < 5
    assert world.ends[2] > 30


def test_a_rank_behind_keeps_no_more_sums_than_it_may() -> None:
    stalled: deque[float] = deque([100.0])
    world = World(
        4, 30, 2, lambda rank, step: stalled.pop() if rank == 2 and step == 9 and stalled else 0.5
    ).run()
    world.check()
    # Rank 2 has begun step 9 and no later one while the others' steps close.
    assert world.lag == MAX_LAG
    assert max(world.ends) == pytest.approx(100.0 + 30, abs=25)
