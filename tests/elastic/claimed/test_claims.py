"""Claims of batches: every unit is trained on once, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter, deque

from lightning_dsgd.elastic.claimed.claims import NONE, Claims, Epoch
from tests.support.thorough import times


class Rank:
    """A rank that trains: it has a machine, and loads so many units ahead."""

    def __init__(self, number: int, depth: int) -> None:
        self.number, self.depth = number, depth
        self.claims = Claims(0, 1)
        self.made: list[int] = []
        self.is_training = self.was_urgent = self.is_out = False

    def act(self) -> None:
        """Does what the training thread does next, if it need not wait."""
        claims = self.claims
        if self.is_training:
            self.made.append(claims.order[claims.num_begun - 1])
            claims.end()
            self.is_training = False
        elif claims.num_begun < len(claims.order):
            self.was_urgent = False
            self.is_training = claims.begin(claims.num_begun)
        elif claims.is_asking:
            return
        elif self.was_urgent and claims.is_dry:
            self.is_out = True
        else:
            claims.ask(is_urgent=True)
            self.was_urgent = True
        if len(claims.order) - claims.num_begun < self.depth:
            claims.ask(is_urgent=False)


class Schedule:
    """A training of one epoch, in which messages and ranks move in an order drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.epoch = Epoch(3, self.draw.randrange(25), 7)
        size = self.draw.randint(1, 5)
        self.speeds = [self.draw.choice((1, 1, 4, 20)) for _ in range(size + 3)]
        self.ranks = [Rank(number, self.draw.randrange(4)) for number in range(size)]
        self.count = Counter[int]()
        self.changes = self.draw.randrange(4)
        self.next_number = size
        resumed = self.draw.sample(range(self.epoch.num_units), self.epoch.num_units // 4)
        if self.draw.random() < 0.3:
            self.count.update(resumed)
        for rank in self.ranks:
            rank.claims.resume(self.epoch, self.count)
        self.enter_view()

    def enter_view(self) -> None:
        """Drops what was under way; all members tell each other what they have."""
        self.mail: dict[tuple[int, int], deque[tuple[int, ...]]] = {}
        reports = [rank.claims.report() for rank in self.ranks]
        for place, rank in enumerate(self.ranks):
            rank.claims.change_view(place, reports)
            rank.was_urgent = False

    def lose(self, rank: Rank) -> None:
        """Loses a rank; what it has told stays, all else is dealt again."""
        self.ranks.remove(rank)
        self.enter_view()
        self.count.update(u for u in rank.made if u in self.ranks[0].claims.trained)

    def join(self) -> None:
        rank = Rank(self.next_number, self.draw.randrange(4))
        self.next_number += 1
        self.ranks.append(rank)
        self.enter_view()
        rank.claims.begin_epoch(self.epoch)

    def move(self) -> None:
        """One message arrives, or one rank does something."""
        for place, rank in enumerate(self.ranks):
            for dst, words in rank.claims.outbox:
                self.mail.setdefault((place, dst), deque()).append(words)
            rank.claims.outbox.clear()
        moves = [pair for pair, queue in self.mail.items() if queue]
        busy = [r for r in self.ranks if not r.is_out]
        if moves and (not busy or self.draw.random() < 0.6):
            src, dst = self.draw.choice(moves)
            self.ranks[dst].claims.hear(src, self.mail[src, dst].popleft())
        elif busy:
            weights = [1 / self.speeds[r.number] for r in busy]
            self.draw.choices(busy, weights)[0].act()
        if self.changes and self.draw.random() < 0.02:
            self.changes -= 1
            if len(self.ranks) > 1 and self.draw.random() < 0.7:
                self.lose(self.draw.choice(self.ranks))
            elif self.next_number < len(self.speeds):
                self.join()

    @property
    def is_over(self) -> bool:
        """Whether all are out and nothing is free; where something is, all go on."""
        if not all(rank.is_out for rank in self.ranks):
            return False
        if self.ranks[0].claims.num_free == 0:
            return True
        for rank in self.ranks:
            rank.is_out = rank.was_urgent = False
        return False


def test_every_unit_is_trained_on_once_whoever_is_lost_or_joins() -> None:
    """Ten thousand schedules with TIMES=25."""
    for seed in times(400):
        schedule = Schedule(seed)
        for _ in range(20_000):
            if schedule.is_over:
                break
            schedule.move()
        assert schedule.is_over, f"seed {seed}: somebody waits for ever"
        for rank in schedule.ranks:
            schedule.count.update(rank.made)
        assert schedule.count == Counter(range(schedule.epoch.num_units)), f"seed {seed}"


def exchange(*ranks: Claims) -> None:
    """Lets all messages arrive."""
    while any(rank.outbox for rank in ranks):
        for place, rank in enumerate(ranks):
            outbox, rank.outbox = rank.outbox, []
            for dst, words in outbox:
                ranks[dst].hear(place, words)


def test_a_rank_without_units_gets_one_that_another_has_not_begun() -> None:
    slow, fast = ranks = Claims(0, 2), Claims(1, 2)
    for rank in ranks:
        rank.begin_epoch(Epoch(0, 3))
    for _ in range(3):
        slow.ask(is_urgent=False)
        exchange(*ranks)
    assert slow.order == [0, 1, 2]
    assert slow.begin(0)
    fast.ask(is_urgent=False)
    exchange(*ranks)
    assert (fast.order, fast.is_dry) == ([], True)
    for expected in ([2], [2, 1], [2, 1]):
        fast.ask(is_urgent=True)
        exchange(*ranks)
        assert fast.order == expected
    assert fast.is_dry
    assert slow.order == [0, NONE, NONE]
    assert not slow.begin(1)
    assert not slow.begin(2)


def test_what_a_lost_dealer_has_told_is_not_trained_on_again() -> None:
    dealer, witness, third = ranks = [Claims(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.begin_epoch(Epoch(0, 9))
    for position in range(4):
        dealer.ask(is_urgent=not position)
        exchange(*ranks)
        if position < 3:
            dealer.begin(position)
    third.ask(is_urgent=True)
    exchange(*ranks)
    reports = [witness.report(), third.report()]
    for place, rank in enumerate((witness, third)):
        rank.change_view(place, reports)
    assert witness.trained == third.trained == {0, 1}  # the third unit was begun
    assert witness.num_free == 6


def test_ranks_with_another_order_of_samples_are_refused() -> None:
    ranks = Claims(0, 2), Claims(1, 2)
    ranks[0].begin_epoch(Epoch(0, 3, 11))
    ranks[1].begin_epoch(Epoch(0, 3, 12))
    ranks[1].ask(is_urgent=True)
    exchange(*ranks)
    assert ranks[1].refused == Epoch(0, 3, 11)
