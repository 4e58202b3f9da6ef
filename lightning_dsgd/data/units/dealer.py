"""Who is dealt which unit, and when: the dealer's end of the protocol (`protocol`)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_dsgd.data.units.protocol import (
    ANSWER,
    BEGIN,
    BEGUN,
    CLOSED,
    COMMIT,
    CONTEST,
    DROPPED,
    GRANT,
    LATER,
    MAX_LAG,
    NONE,
    READY,
    VERDICT,
    Conclusion,
    Words,
)

_ALL: Final = 1 << 40
"""More questions than a rank asks in a step."""

_SLACK: Final = 0.1
"""What share of a unit's time another rank must gain to be preferred."""
_OVERDUE: Final = 1.25
"""After how many of its usual times a unit counts as late."""
_LOOK_AGAIN: Final = 0.25
"""After what share of its time so far a late unit is looked at again."""
_SHORTEST_LOOK_S: Final = 2e-3
"""How long the dealer waits at least before it looks again."""
_SHORTEST_S: Final = 1e-9
"""The shortest time by which another is divided."""
_NUM_TIMES: Final = 7
"""Of how many units a rank's speed is the median."""


@dataclass
class _Rank:
    """What the dealer knows of a rank.

    Attributes:
        step: the last step that it was heard in
        current: the unit that it computes
        since: when it began that
        ahead: the unit that it was granted and has not begun
        num_ready: how often it was ready in this step
        num_answered: how many of these it was told that there is nothing at the moment
        is_waiting: whether it has nothing in hand, and may wait
        is_timed: whether `since` is when it has begun its unit
        times: how long its last units took
        time: the median of these; None: it has finished none
    """

    step: int = NONE
    current: int = NONE
    since: float = 0.0
    ahead: int = NONE
    num_ready: int = 0
    num_answered: int = 0
    is_waiting: bool = False
    is_timed: bool = True
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    time: float | None = None

    def took(self, seconds: float) -> None:
        """Notes how long a unit has taken this rank."""
        self.times.append(seconds)
        self.time = statistics.median(self.times)


class Dealer:
    """Deals the units of one step after the other.

    Attributes:
        step: the step that is dealt
        outbox: messages to be sent, each with its receiver

    Args:
        world_size: how many ranks there are
        backups: whether a unit that is begun may be computed a second time
        after: where the ranks go on, if they have dealt before
    """

    def __init__(self, world_size: int, *, backups: bool, after: Conclusion | None = None) -> None:
        self._after = after or Conclusion()
        self.step = max(NONE, self._after.step - 1)  # none of which is dealt any more
        self.outbox: list[tuple[int, Words]] = []
        self._backups = backups
        self._ranks = [_Rank() for _ in range(world_size)]
        for rank, step in zip(self._ranks, self._after.steps, strict=False):
            rank.step = step
        self._homes: dict[int, Sequence[int]] = {}  # of each step that is known, by unit
        self._early: list[tuple[int, Words, float]] = []
        self._known_to = self._first = NONE  # the steps that were made known last
        self._is_closed = True
        self._free: list[deque[int]] = []  # by home
        self._num_free = self._num_units = 0
        self._owners: dict[int, list[int]] = {}  # who has a unit in hand, or in sight
        self._done: set[int] = set()
        self._committed: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # units that are being contested, and for which rank
        self._usual: float | None = None  # the median of the ranks' times

    # ---- what is dealt ----

    def know(self, first: int, homes: Sequence[Sequence[int]], now: float) -> None:
        """Learns of the steps from `first` on: the homes of the units of each."""
        self._homes = dict(enumerate(homes, first))
        self._first, self._known_to = first, first + len(homes) - 1
        early, self._early = self._early, []
        for sender, words, _ in early:
            self.hear(sender, words, now)

    def _begin_step(self, step: int, now: float) -> None:
        homes = self._homes[step]
        self.step, self._is_closed = step, False
        self._free = [deque() for _ in self._ranks]
        for unit, home in enumerate(homes):
            self._free[home].append(unit)
        self._num_free = self._num_units = len(homes)
        self._owners, self._done, self._committed, self._asked = {}, set(), {}, {}
        for each in self._ranks:
            each.current = each.ahead = NONE
            each.num_ready = each.num_answered = 0
            each.is_waiting = False
        if step == self._after.step:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Takes out of the step what is done, and what ranks have in hand."""
        after = self._after
        self._done |= after.done
        self._committed |= dict.fromkeys(after.done, NONE)  # nobody may enter it any more
        for number, unit in after.held.items():
            rank = self._ranks[number]
            rank.current, rank.since, rank.is_timed = unit, now, False
            self._owners.setdefault(unit, []).append(number)
        taken = self._done | self._owners.keys()
        self._free = [deque(unit for unit in free if unit not in taken) for free in self._free]
        self._num_free = sum(map(len, self._free))

    # ---- messages ----

    def hear(self, sender: int, words: Words, now: float) -> None:
        """Hears a rank, and deals."""
        kind, step, *rest = words
        if step > self._known_to:
            self._early.append((sender, words, now))
            return
        rank = self._ranks[sender]
        rank.step = max(rank.step, step)
        if step > self.step:
            self._begin_step(step, now)
        if step < self.step or self._is_closed:
            if kind == READY:  # of a step that others have left, or that is closed
                self.outbox.append((sender, (LATER, step, _ALL)))
            self._close()  # a rank that was too far behind may have come on
            return
        if kind == READY:
            self._hear_ready(sender, rest[0], now)
        elif kind == BEGIN:
            rank.current, rank.since, rank.is_waiting = rest[0], now, False
            rank.is_timed = True
            if rank.ahead == rest[0]:
                rank.ahead = NONE
        elif kind == COMMIT:
            self._hear_commit(sender, rest[0])
        elif kind == ANSWER:
            self._hear_answer(sender, rest[0], rest[1], now)
        self.deal(now)

    def _hear_ready(self, sender: int, done: int, now: float) -> None:
        rank = self._ranks[sender]
        if rank.current != NONE:
            if done == rank.current and rank.is_timed:
                rank.took(now - rank.since)
                self._usual = statistics.median(r.time for r in self._ranks if r.time is not None)
            self._disown(sender, rank.current)
        rank.current, rank.since = NONE, now  # if it has one ahead, it is about to begin that
        rank.num_ready += 1
        rank.is_waiting = rank.ahead == NONE
        if done != NONE:
            self._done.add(done)

    def _hear_commit(self, sender: int, unit: int) -> None:
        winner = self._committed.setdefault(unit, sender)
        self.outbox.append((sender, (VERDICT, self.step, unit, int(winner == sender))))

    def _hear_answer(self, sender: int, unit: int, state: int, now: float) -> None:
        waiting = self._asked.pop(unit, NONE)
        if state == DROPPED:
            rank = self._ranks[sender]
            if rank.ahead == unit:
                rank.ahead = NONE
                rank.is_waiting = rank.current == NONE
            self._disown(sender, unit)
            self._free[self._homes[self.step][unit]].append(unit)
            self._num_free += 1
        elif state == BEGUN and waiting != NONE and unit not in self._committed:
            other = self._ranks[waiting]
            if other.is_waiting and other.ahead == NONE:
                self._grant(waiting, unit, now, is_contested=True)

    def _disown(self, rank: int, unit: int) -> None:
        owners = self._owners.get(unit, [])
        if rank in owners:
            owners.remove(rank)

    # ---- dealing ----

    def deal(self, now: float) -> None:
        """Grants what can be granted now, and closes the step if all is finished."""
        if self._is_closed or self.step == NONE:
            return
        for number, rank in enumerate(self._ranks):
            is_asking = rank.ahead == NONE and (rank.current != NONE or rank.is_waiting)
            if self._num_free and is_asking and self._is_best(number, now):
                self._grant(number, self._take_free(number), now, is_contested=False)
        if not self._num_free:
            for number, rank in enumerate(self._ranks):
                if rank.is_waiting and rank.ahead == NONE:
                    self._contest(number, now)
        self._close()
        if not self._is_closed:
            self._put_off()

    def _put_off(self) -> None:
        """Tells ranks that have asked since that there is nothing for them at the moment."""
        for number, rank in enumerate(self._ranks):
            if rank.is_waiting and rank.num_answered < rank.num_ready:
                rank.num_answered = rank.num_ready
                self.outbox.append((number, (LATER, self.step, rank.num_ready)))

    def next_look(self, now: float) -> float:
        """Returns how long the dealer may wait for messages; inf: until one comes."""
        if self._is_closed or self.step == NONE:
            return math.inf
        if not any(rank.is_waiting and rank.ahead == NONE for rank in self._ranks):
            return math.inf
        looks = [
            self._next_look_at(rank.since, usual, now)
            for rank in self._ranks
            if (rank.current, rank.ahead) != (NONE, NONE)
            if (usual := self._time_of(rank)) is not None
        ]
        return min(looks, default=math.inf)

    @staticmethod
    def _next_look_at(since: float, usual: float, now: float) -> float:
        """Returns in how many seconds a unit has become late, or later by a good deal."""
        is_late_in = since + _OVERDUE * usual - now
        return max(_SHORTEST_LOOK_S, is_late_in if is_late_in > 0 else _LOOK_AGAIN * (now - since))

    def _close(self) -> None:
        if self._is_closed or self.step == NONE or len(self._done) < self._num_units:
            return
        furthest_behind = min(max(rank.step, self._first) for rank in self._ranks)
        if self.step - furthest_behind > MAX_LAG:
            return
        self._is_closed = True
        for number in range(len(self._ranks)):
            self.outbox.append((number, (CLOSED, self.step)))

    def _grant(self, number: int, unit: int, now: float, *, is_contested: bool) -> None:
        rank = self._ranks[number]
        rank.ahead, rank.is_waiting = unit, False
        if rank.current == NONE:
            rank.since = now  # it is about to begin
        self._owners.setdefault(unit, []).append(number)
        self.outbox.append((number, (GRANT, self.step, unit, int(is_contested))))

    def _take_free(self, number: int) -> int:
        """Takes a free unit: the rank's own first, else the last one of whoever has the most."""
        self._num_free -= 1
        if self._free[number]:
            return self._free[number].popleft()
        return max(self._free, key=len).pop()

    def _is_best(self, number: int, now: float) -> bool:
        """Returns whether a rank finishes one more unit before the others could finish all free."""
        rank = self._ranks[number]
        own_time = self._time_of(rank)
        if own_time is None:
            return True
        end = self._free_at(rank, now) + own_time
        capacity = 0
        for other in self._ranks:
            time = self._time_of(other)
            if other is rank or other.step != self.step or time is None:
                continue
            if other.current == NONE and other.ahead == NONE and not other.is_waiting:
                continue
            left = end - self._free_at(other, now) - _SLACK * time
            capacity += max(0, math.floor(left / max(time, _SHORTEST_S)))
            if capacity >= self._num_free:
                return False
        return True

    def _time_of(self, rank: _Rank) -> float | None:
        """Returns how long a unit takes a rank; None: no rank has finished one."""
        return self._usual if rank.time is None else rank.time

    def _free_at(self, rank: _Rank, now: float) -> float:
        """Returns when a rank is expected to have finished all that it has."""
        usual = self._time_of(rank) or 0.0
        if rank.current == NONE and rank.ahead == NONE:
            return now
        elapsed = now - rank.since
        at = max(now, rank.since + usual) if elapsed <= _OVERDUE * usual else now + elapsed
        return at + usual if NONE not in (rank.current, rank.ahead) else at

    def _contest(self, number: int, now: float) -> None:
        """Has a rank that has nothing in hand take a unit over, if it would finish first."""
        time = self._time_of(self._ranks[number])
        if time is None or number in self._asked.values():
            return
        latest, unit, holder = now + (1 + _SLACK) * time, NONE, NONE
        for other, rank in enumerate(self._ranks):
            usual = self._time_of(rank)
            if usual is None:
                continue
            end = self._free_at(rank, now)
            for held in (rank.ahead, rank.current):
                if held == NONE:
                    continue
                if end > latest and self._may_contest(held, is_begun=held == rank.current):
                    latest, unit, holder = end, held, other
                end -= usual
        if unit != NONE:
            self._asked[unit] = number
            self.outbox.append((holder, (CONTEST, self.step, unit)))

    def _may_contest(self, unit: int, *, is_begun: bool) -> bool:
        is_settled = unit in self._asked or unit in self._committed
        is_alone = len(self._owners.get(unit, ())) == 1
        return is_alone and not is_settled and (self._backups or not is_begun)
