"""The agreement on views in random schedules: losses, cuts, false suspicion, slow ranks, joins."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from lightning_dsgd.elastic.ballots import (
    ACCEPT,
    ACCEPTED,
    COMMIT,
    PREPARE,
    PROMISE,
    REFUSE,
    WANT,
    Ballot,
    Message,
    Ranks,
)
from lightning_dsgd.elastic.membership import Membership
from tests.support.thorough import times

PATIENCE_S = 1.0
WITHIN_S = 120.0
"""No schedule may take longer to come to rest; its last event is before 20 s."""
KINDS = (WANT, PREPARE, PROMISE, ACCEPT, ACCEPTED, COMMIT)


class World:
    """Ranks that agree over links that keep the order of messages, each with its own delay."""

    def __init__(
        self,
        seed: int,
        num_ranks: int,
        min_ranks: int | None = None,
        *,
        holds: bool = False,
        group_size: int = 1,
    ) -> None:
        self.holds = holds
        self.group_size = group_size
        self.chance = random.Random(seed)
        self.min_ranks = min_ranks
        self.now = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.busy_until: dict[int, float] = {}
        self.last_arrival: dict[tuple[int, int], float] = {}
        self.died: set[int] = set()
        self.sides: list[tuple[float, float, set[int]]] = []
        self.views = {0: tuple(range(num_ranks))}
        self.seen: dict[int, int] = {}
        self.agreed_at = 0.0
        self.ticks_at: dict[int, float] = {}
        self.sent: Callable[[int, Message], None] = lambda sender, message: None
        self.num_heard_late = 0
        self.leavers: set[int] = set()
        self.accepted: dict[tuple[int, Ballot, Ranks], set[int]] = {}
        """Of each view that was proposed in a ballot: who has accepted it."""
        ranks = tuple(range(num_ranks))
        self.all_ranks = list(ranks)
        groups = [ranks[i : i + group_size] for i in range(0, num_ranks, group_size)]
        options = {"holds_joins": holds, "groups": groups if group_size > 1 else ()}
        self.ranks = {r: Membership(r, ranks, PATIENCE_S, min_ranks, **options) for r in ranks}
        self.latency_s = 0.01

    # ---- what happens ----

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (at_s, next(self.numbers), action))

    def kill(self, rank: int) -> None:
        """What it has sent still arrives; each of the others notices after a while."""
        if rank in self.died or rank not in self.ranks:
            return
        self.died.add(rank)
        self.tell_of_end(rank)

    def tell_of_end(self, rank: int, *, in_order: bool = False) -> None:
        """Of a process, which the others notice; behind its messages, if it has ended by itself."""
        for other in self.all_ranks:
            at_s = self.now + self.chance.uniform(0, 0.5)
            if in_order:
                at_s = max(at_s, self.last_arrival.get((rank, other), 0.0))
            self.at(at_s, lambda o=other: self.notice(o, rank))

    def notice(self, rank: int, lost: int) -> None:
        died = not self.is_cut(rank, lost)  # else it is silence
        self.do(rank, lambda m: m.suspect(self.now, lost, died=died))

    def is_cut(self, rank: int, other: int) -> bool:
        return any(
            begin <= self.now < end and (rank in side) != (other in side)
            for begin, end, side in self.sides
        )

    def suspect(self, rank: int, other: int) -> None:
        self.do(rank, lambda m: m.suspect(self.now, other, died=False))

    def cut(self, side: set[int], seconds: float) -> None:
        """Nothing passes for so long; each end gives the other up in between, or later."""
        self.sides.append((self.now, self.now + seconds, side))
        for rank in self.all_ranks:
            for other in self.all_ranks:
                if (rank in side) != (other in side):
                    after_s = self.chance.uniform(1.0, 3.0)
                    self.at(self.now + after_s, lambda r=rank, o=other: self.suspect(r, o))

    def join(self, rank: int) -> None:
        contacts = list(self.all_ranks)
        self.all_ranks.append(rank)
        options = {"is_newcomer": True, "holds_joins": self.holds}
        known = rank, contacts, PATIENCE_S, self.min_ranks, self.now
        self.ranks[rank] = Membership(*known, **options)
        for dead in self.died | {r for r, m in self.ranks.items() if m.ended}:
            self.at(self.now + self.chance.uniform(0, 0.5), lambda d=dead: self.notice(rank, d))
        self.do(rank, lambda m: m.tick(self.now))
        if self.holds:
            at_s = self.now + self.chance.uniform(0.0, 3.0)
            self.at(at_s, lambda: self.admit(rank))

    def admit(self, newcomer: int) -> None:
        """All who know of it let it in, about at the same time; until it is a member."""
        if newcomer in self.has_ended() or self.ranks[newcomer].number >= 0:
            return
        self.at(self.now + 3.0, lambda: self.admit(newcomer))
        for other in self.all_ranks:
            if newcomer in self.ranks[other].believes.waiting:
                after_s = self.chance.uniform(0.0, 0.2)
                self.at(
                    self.now + after_s,
                    lambda o=other: self.do(o, lambda m: m.admit(self.now, newcomer)),
                )

    def come(self, count: int) -> None:
        """So many newcomers, each with a number that no rank has had."""
        for _ in range(count):
            self.join(len(self.all_ranks))

    def replace(self, rank: int, after_s: float) -> None:
        """It dies, and is started again."""
        self.kill(rank)
        self.at(self.now + after_s, lambda: self.come(1))

    def leave(self, rank: int) -> None:
        self.leavers.add(rank)
        self.do(rank, lambda m: m.leave(self.now))

    def be_slow(self, rank: int, seconds: float) -> None:
        self.busy_until[rank] = max(self.busy_until.get(rank, 0.0), self.now + seconds)

    # ---- how it goes on ----

    def do(self, rank: int, action: Callable[[Membership], None]) -> None:
        if rank in self.died or rank not in self.ranks or self.ranks[rank].ended:
            return
        if self.busy_until.get(rank, 0.0) > self.now:
            self.at(self.busy_until[rank], lambda: self.do(rank, action))
            return
        membership = self.ranks[rank]
        action(membership)
        for _, message in membership.outbox:
            self.count_vote(rank, message)
        self.look(rank, membership)
        outbox, membership.outbox = membership.outbox, []
        for dst, message in outbox:
            self.send(rank, dst, message)
        if membership.ended:
            self.tell_of_end(rank, in_order=True)
            return
        next_at = max(membership.next_at, self.now + 1e-6)  # or it is late, as it was slow
        if next_at < self.ticks_at.get(rank, float("inf")):
            self.ticks_at[rank] = next_at
            self.at(next_at, lambda: self.tick(rank))

    def tick(self, rank: int) -> None:
        if self.ticks_at.get(rank) == self.now:
            del self.ticks_at[rank]
        self.do(rank, lambda m: m.tick(self.now))

    def send(self, src: int, dst: int, message: Message) -> None:
        self.sent(src, message)
        if self.is_cut(src, dst) or src in self.died:
            return
        arrival = self.now + self.chance.expovariate(1 / self.latency_s)
        arrival = max(arrival, self.last_arrival.get((src, dst), 0.0))
        self.last_arrival[src, dst] = arrival
        self.at(arrival, lambda: self.do(dst, lambda m: self.hear(m, src, message)))

    def hear(self, membership: Membership, src: int, message: Message) -> None:
        """What is said of a view that has ended changes nothing of a later one."""
        before = membership.number, membership.members, membership.is_changing
        membership.hear(self.now, src, message)
        is_of_agreement = message.kind in (*KINDS[:-1], REFUSE)
        if is_of_agreement and 0 <= message.number <= before[0]:
            self.num_heard_late += 1
            assert (membership.number, membership.members, membership.is_changing) == before

    def look(self, rank: int, membership: Membership) -> None:
        """All members of a view agree on it, and its numbers only grow."""
        if membership.ended or membership.number < 0:
            return
        number, members = membership.number, membership.members
        assert rank in members
        assert number >= self.seen.get(rank, 0)
        if number > self.seen.get(rank, 0):
            self.agreed_at = self.now
        self.seen[rank] = number
        assert self.views.setdefault(number, members) == members
        if number - 1 in self.views:
            self.check_step(number)

    def count_vote(self, rank: int, message: Message) -> None:
        """Who proposes a view has accepted it; who accepts one says in which ballot."""
        if message.kind == ACCEPT:
            key = message.number, message.ballot, message.members
            self.accepted.setdefault(key, {rank})
        elif message.kind == ACCEPTED:
            for (number, ballot, _), votes in self.accepted.items():
                if (number, ballot) == (message.number, message.ballot):
                    votes.add(rank)

    def check_step(self, number: int) -> None:
        """Nobody has gone on without more than half of the others, or told them so.

        Where ranks are in groups, some vote for a view without themselves.
        """
        before, members = self.views[number - 1], self.views[number]
        if len(before) > 2:
            ballots = [v for (n, _, m), v in self.accepted.items() if (n, m) == (number, members)]
            assert any(2 * len(v & {*before}) > len(before) for v in ballots), (before, ballots)
        if self.min_ranks is not None:
            assert len(members) >= self.min_ranks, (before, members)
        if self.group_size > 1:
            groups = {rank // self.group_size for rank in members}
            assert len(members) == len(groups) * self.group_size, members
            return
        stayed = set(members) & set(before)
        lost = set(before) - stayed - self.leavers
        is_alone = len(before) == 2 and lost <= self.has_ended()
        assert 2 * len(lost) < len(before) or is_alone, (before, members)

    def has_ended(self) -> set[int]:
        return self.died | {r for r, m in self.ranks.items() if m.ended}

    def run(self) -> None:
        while self.agenda:
            self.now, _, action = heapq.heappop(self.agenda)
            assert self.now < WITHIN_S, self.describe()
            action()
        self.check_end()

    def check_end(self) -> None:
        """Who is in a view is in it with all its members, and they are all there is."""
        alive = {r: m for r, m in self.ranks.items() if r not in self.died and not m.ended}
        assert not any(m.is_changing for m in alive.values()), self.describe()
        assert len({m.number for m in alive.values()}) <= 1, self.describe()
        for m in alive.values():
            assert set(m.members) == alive.keys(), self.describe()
        if self.min_ranks is not None and alive:
            assert len(alive) >= self.min_ranks, self.describe()

    def describe(self) -> str:
        return "\n".join(
            f"rank {r}: {'dead' if r in self.died else m.ended or 'alive'}, view {m.number} "
            f"{m.members}{', changing' * m.is_changing}"
            for r, m in self.ranks.items()
        )


EVENTS = (
    *("kill", "kill", "replace", "suspect", "cut"),
    *("be_slow", "be_slow", "come", "come", "leave"),
)
GROUP_EVENTS = ("kill", "kill", "kill", "suspect", "cut", "be_slow")


def schedule(seed: int, *, in_groups: bool) -> World:
    """A random one."""
    chance = random.Random(f"{seed}, in_groups={in_groups}")
    if in_groups:
        size = chance.choice([2, 2, 3, 4])
        num_ranks, most = size * chance.choice([2, 2, 3, 4, 5]), 5
        world = World(seed, num_ranks, chance.choice([None, None, 1, size]), group_size=size)
    else:
        num_ranks, most = chance.choice([2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 12, 16]), 7
        world = World(seed, num_ranks, chance.choice([None, None, 1, 2]), holds=seed % 2 == 1)
    world.latency_s = chance.choice([0.001, 0.05, 0.3])
    at_s = 0.0
    for _ in range(chance.randrange(1, most)):
        at_s += chance.choice([0.0, 0.0, 0.01, 0.1, 0.5, 2.0, 3.0])
        rank, other = chance.sample(range(num_ranks), 2)
        side = set(chance.sample(range(num_ranks + 3), chance.randrange(1, num_ranks + 1)))
        arguments = {
            "kill": (rank,),
            "suspect": (rank, other),
            "cut": (side, chance.choice([0.5, 3.0, 1000.0])),
            "be_slow": (rank, chance.choice([0.3, 1.5, 4.0])),
            "come": (chance.choice([1, 1, 2]),),
            "replace": (rank, chance.choice([0.0, 0.05, 1.0, 3.0])),
            "leave": (rank,),
        }
        event = chance.choice(GROUP_EVENTS if in_groups else EVENTS)
        world.at(at_s, partial(getattr(world, event), *arguments[event]))
    if not in_groups and chance.random() < 0.5:
        strike_within(world, chance)
    return world


def strike_within(world: World, chance: random.Random) -> None:
    """As one of the first messages of a kind is sent, ranks come, and its sender may die."""
    kind, left = chance.choice(KINDS), [chance.randrange(8)]
    num_newcomers, dies = chance.choice([0, 1, 2]), chance.random() < 0.5

    def strike(sender: int, message: Message) -> None:
        if message.kind == kind:
            left[0] -= 1
            if left[0] == -1:
                world.at(world.now, lambda: world.come(num_newcomers))
                if dies:
                    world.kill(sender)

    world.sent = strike


def run_schedule(seed: int, *, in_groups: bool = False) -> World:
    world = schedule(seed, in_groups=in_groups)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}: {error}\n{world.describe()}") from error
    return world


def test_all_agree_in_some_hundred_schedules():
    num_grown, num_heard_late = 0, 0
    for seed in range(400):
        world = run_schedule(seed)
        num_first = len(world.views[0])
        num_grown += any(max(view) >= num_first for view in world.views.values())
        num_heard_late += world.num_heard_late
    assert num_grown > 100  # schedules in which a newcomer became a member
    assert num_heard_late > 100  # messages of an agreement that was over


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_all_agree_in_thousands_of_schedules():
    """A hundred thousand of each kind with TIMES=20."""
    for seed in times(5_000):
        run_schedule(10_000 + seed)
        run_schedule(10_000 + seed, in_groups=True)


def alive(world: World) -> list[int]:
    return [r for r, m in world.ranks.items() if r not in world.died and not m.ended]


@pytest.mark.parametrize("num_ranks", [3, 4, 5, 8, 16])
def test_all_survivors_of_a_loss_go_on(num_ranks):
    for seed in range(20):
        for lost in {0, 1, num_ranks - 1}:
            world = World(seed, num_ranks)
            world.at(1.0, lambda w=world, r=lost: w.kill(r))
            world.run()
            assert alive(world) == [r for r in range(num_ranks) if r != lost]
            assert world.agreed_at < 1.0 + 4 * PATIENCE_S


def die_within(world: World, kind: str, after: int, spared: set[int]) -> None:
    """Who sends a message of this kind dies at its first, or after some, if none has before."""
    left = [after]

    def die(sender: int, message: Message) -> None:
        if message.kind == kind and not world.died - spared:
            left[0] -= 1
            if left[0] < 0:
                world.kill(sender)

    world.sent = die


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [5, 7])
def test_who_is_lost_in_the_midst_of_an_agreement_does_not_stop_it(kind, num_ranks):
    for seed in range(30):
        world = World(seed, num_ranks)
        die_within(world, kind, seed % num_ranks, {num_ranks - 1})
        world.at(1.0, lambda w=world: w.kill(num_ranks - 1))
        world.run()
        assert len(alive(world)) == num_ranks - len(world.died) >= num_ranks - 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holds", [False, True])
def test_two_come_at_once_while_the_proposer_of_their_view_dies(kind, holds):
    for seed in range(20):
        world = World(seed, 5, holds=holds)
        die_within(world, kind, seed % 4, set())
        world.at(1.0, lambda w=world: w.come(2))
        world.run()
        assert alive(world) == [r for r in range(7) if r not in world.died]
        assert len(world.died) == 1


MORE = "^must go on with more than half"
SCENARIOS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], list[int], dict[int, str]]] = {
    "half of the ranks": (
        *({"num_ranks": 4}, [(1.0, "cut", {0, 2}, 1000.0)]),
        *([], dict.fromkeys(range(4), MORE)),
    ),
    "one of two": ({"num_ranks": 2}, [(1.0, "kill", 0)], [], {}),
    "one of two that may be alone": ({"num_ranks": 2, "min_ranks": 1}, [(1.0, "kill", 0)], [1], {}),
    "two whose link is cut": (
        *({"num_ranks": 2, "min_ranks": 1}, [(1.0, "cut", {0}, 1000.0)], [], {}),
    ),
    "newcomers that outnumber the first": (
        {"num_ranks": 2, "min_ranks": 1},
        [*((float(rank), "join", rank) for rank in range(2, 7)), (20.0, "kill", 0)],
        *([1, 2, 3, 4, 5, 6], {}),
    ),
    "the last group": (
        {"num_ranks": 4, "min_ranks": 1, "group_size": 2},
        [(1.0, "kill", 3), (5.0, "kill", 0)],
        *([], {1: "replicas that have lost none of their ranks, got none$"}),
    ),
    "too few whole groups": (
        {"num_ranks": 6, "min_ranks": 4, "group_size": 2},
        [(1.0, "kill", 5), (5.0, "kill", 0)],
        *([], {2: "min_ranks=4, in replicas that have lost none"}),
    ),
    "a rank whom others have lost, and its group": (
        *({"num_ranks": 6, "group_size": 2}, [(1.0, "suspect", 1, 5)], [0, 1, 2, 3]),
        {4: "^cannot go on without rank 5, which held shards", 5: "^is not in view 1, taken for"},
    ),
}
"""What happens to a world, who goes on, and why others have ended; `stories` tell of more."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_who_goes_on_and_why_others_have_ended(name):
    options, events, left, ended = SCENARIOS[name]
    for seed in range(20):
        world = World(seed, **options)
        for at_s, what, *args in events:
            world.at(at_s, partial(getattr(world, what), *args))
        world.run()
        assert alive(world) == left
        for rank, why in ended.items():
            assert re.search(why, world.ranks[rank].ended), world.describe()


def test_a_view_holds_whole_groups_only():
    worlds = [run_schedule(seed, in_groups=True) for seed in range(200)]
    assert sum(len(world.views) > 1 for world in worlds) > 80  # have lost a group


@pytest.mark.parametrize(("num_groups", "size"), [(2, 2), (3, 2), (2, 8), (4, 3)])
def test_one_dead_rank_takes_its_group_out_of_the_view_at_once(num_groups, size):
    num_ranks = num_groups * size
    for seed in range(20):
        for lost in (0, 1, num_ranks - 1):
            world = World(seed, num_ranks, group_size=size)
            world.at(1.0, lambda w=world, r=lost: w.kill(r))
            world.run()
            group = range(lost // size * size, (lost // size + 1) * size)
            left = [r for r in range(num_ranks) if r not in group]
            assert alive(world) == left
            assert world.views == {0: tuple(range(num_ranks)), 1: tuple(left)}
            for rank in set(group) - {lost}:
                assert world.ranks[rank].ended == (
                    f"cannot go on without rank {lost}, which held shards of its replica"
                )
                assert world.ranks[rank].believes.missing == lost


def test_a_rank_names_who_has_not_answered_it_where_it_leads():
    for seed in range(20):
        world = World(seed, 6, group_size=2)
        world.at(1.0, lambda w=world: w.be_slow(1, 30.0))
        world.at(1.5, lambda w=world: w.suspect(0, 5))
        world.run()
        assert world.ranks[0].believes.missing == 1


def test_a_newcomer_that_nobody_admits_ends_and_disturbs_nobody():
    world = World(0, 3, holds=True)
    world.admit = lambda newcomer: None
    world.at(1.0, lambda: world.join(3))
    world.run()
    assert alive(world) == [0, 1, 2]
    assert list(world.views) == [0]
    assert world.ranks[3].ended == "could not join within 20 s: nobody has let it in"
