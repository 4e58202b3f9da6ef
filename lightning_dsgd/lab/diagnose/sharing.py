"""What steps take where ranks share their micro-batches: the protocol of `balanced`, by events.

`data.units` knows neither clocks nor threads, so all ranks of a job are played in one loop: each
event is a message that arrives, a unit that is computed, or a sum that is there.

    rank     works before the step; takes a unit and computes it, until the step is closed; waits
             for the sum
    lanes    begin to sum a step once all of them have heard that it is closed

Legend: P ranks, S steps, k units of each rank in a step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import torch

from lightning_dsgd.data.units.dealer import Dealer
from lightning_dsgd.data.units.hand import Hand
from lightning_dsgd.data.units.protocol import CLOSED, DEALER, NONE, Words
from lightning_dsgd.lab.diagnose.times import PARTS, Times

UNIT_S: Final = 1e-3
"""What a unit takes besides its computation: 32 of them took 6 ms more than DDP's, on 2 cores."""
_COMPUTED: Final = ("loader", "copies", "forward", "backward", "processor")


@dataclass(frozen=True)
class Work:
    """Says what ranks have to do, in seconds.

    Args:
        before: what a rank does before it begins a step: [P][S]
        units: what a unit of the step takes: [P][S]
        stalls: how much longer the first unit takes that a rank computes in a step: [P][S]
        num_units: k
        sum_s: what the sum of a step takes, once all units are there
        message_s: what a message takes
        is_of_home: whether a unit takes as long as its home would, whoever computes it
        backups: whether a unit that is begun may be computed a second time
    """

    before: Sequence[Sequence[float]]
    units: Sequence[Sequence[float]]
    stalls: Sequence[Sequence[float]]
    num_units: int
    sum_s: float = 0.0
    message_s: float = 2e-4
    is_of_home: bool = False
    backups: bool = True

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.units)

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.units[0])

    @cached_property
    def homes(self) -> list[int]:
        """The homes of a step's units."""
        return [rank for rank in range(self.num_ranks) for _ in range(self.num_units)]


def work_of(
    times: Times,
    steps: slice,
    ranks: Sequence[int],
    *,
    num_units: int,
    is_of_home: bool = False,
) -> tuple[Work, float]:
    """Returns what DDP's ranks would have to do if they shared micro-batches.

    A rank computes its batches at its usual speed, the median of these steps.  By what it took
    longer in a step it stalls once in that step, as it does where it collects garbage.

    Args:
        times: the recorded times
        steps: those that are looked at
        ranks: those that are looked at
        num_units: how many units of a step each rank would have with DDP
        is_of_home: whether how long a unit takes follows from the batch, and not from the rank

    Returns:
        The work, and what a step takes besides: validations, and what ranks ask each other.
    """
    of_part = {
        name: times.by_step(part)[steps] for name, part in zip(PARTS, times.parts, strict=True)
    }
    computed = torch.stack([of_part[name][:, ranks] for name in _COMPUTED]).sum(0)
    usual = computed if is_of_home else computed.minimum(computed.median(0).values)
    questions = times.by_step(times.takes * ~times.is_sum)[steps]
    work = Work(
        before=(of_part["between"] + of_part["optimizer"])[:, ranks].T.tolist(),
        units=(usual / num_units + UNIT_S).T.tolist(),
        stalls=(computed - usual + of_part["gc"][:, ranks]).T.tolist(),
        num_units=num_units,
        sum_s=float(
            times.busy[steps].maximum(times.by_step(times.takes * times.is_sum)[steps]).mean()
        ),
        is_of_home=is_of_home,
    )
    return work, float((of_part["validation"].max(1).values + questions).mean())


def shared_s(work: Work) -> float:
    """Returns when the last rank has made its last step."""
    return _Job(work).run()


class _Rank:
    """A rank's training thread: see the head of the file.

    Args:
        number: the rank
        job: the job that plays it
    """

    def __init__(self, number: int, job: _Job) -> None:
        self.hand = Hand(number)
        self._number, self._job = number, job
        self._step = NONE
        self._goes_on: Callable[[], bool] | None = None
        self._has_stalled = False

    def wake(self) -> None:
        """Goes on, if what the thread waits for has come."""
        while self._goes_on is not None and self._goes_on():
            pass
        self._job.send_of(self)

    def next_step(self) -> None:
        """Does what comes before the next step, and then begins the step."""
        self._step += 1
        self._goes_on = None
        if self._step < self._job.work.num_steps:
            self._job.after(self._job.work.before[self._number][self._step], self._begin_step)

    def _begin_step(self) -> None:
        self.hand.begin_step(self._step)
        self._has_stalled = False
        self._goes_on = self._takes
        self.wake()

    def _takes(self) -> bool:
        """Begins a unit or, once the step is closed, waits for the sum; tells whether it could."""
        unit = self.hand.begin()
        if unit != NONE:
            self._goes_on = None
            self._job.after(self._seconds(unit), self._has_computed)
            return True
        if self.hand.is_closed:
            self._goes_on = self._has_sum
            return True
        return False

    def _seconds(self, unit: int) -> float:
        work = self._job.work
        rank = work.homes[unit] if work.is_of_home else self._number
        stall_s = 0.0 if self._has_stalled else work.stalls[self._number][self._step]
        self._has_stalled = True
        return work.units[rank][self._step] + stall_s

    def _has_computed(self) -> None:
        self._goes_on = self._enters
        self.wake()

    def _enters(self) -> bool:
        """Ends the unit in hand, once it is said whether it enters the sum."""
        may_enter = self.hand.enter()
        if may_enter is None:
            return False
        self.hand.finish(has_entered=may_enter)
        self._goes_on = self._takes
        return True

    def _has_sum(self) -> bool:
        if not self._job.has_sum(self._step):
            return False
        self.next_step()
        return True


class _Job:
    """All ranks, the dealer, and what is under way between them."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._dealer = Dealer(work.num_ranks, backups=work.backups)
        self._num_looks = 0
        self._heard: Counter[int] = Counter()  # how many ranks know that a step is closed
        self._sums_s: list[float] = []  # when the sum of each step is there
        self._ranks = [_Rank(number, self) for number in range(work.num_ranks)]

    def run(self) -> float:
        """Plays all steps; returns when the last rank has made its last one."""
        self._dealer.know(0, [self.work.homes] * self.work.num_steps, self.now_s)
        for rank in self._ranks:
            rank.next_step()
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        return self.now_s

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Has something happen in so many seconds."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happens))

    def has_sum(self, step: int) -> bool:
        """Returns whether the sum of a step is there."""
        return step < len(self._sums_s) and self._sums_s[step] <= self.now_s

    # ---- messages ----

    def send_of(self, rank: _Rank) -> None:
        """Sends what a rank has to say."""
        said, rank.hand.outbox = rank.hand.outbox, []
        for words in said:
            self.after(self._latency_s(rank.hand.rank), partial(self._hear, rank, words))

    def _latency_s(self, rank: int) -> float:
        return 0.0 if rank == DEALER else self.work.message_s

    def _hear(self, sender: _Rank, words: Words) -> None:
        self._dealer.hear(sender.hand.rank, words, self.now_s)
        self._dealer_has_dealt()

    def _dealer_has_dealt(self) -> None:
        said, self._dealer.outbox = self._dealer.outbox, []
        for number, words in said:
            self.after(self._latency_s(number), partial(self._tell, number, words))
        self._num_looks += 1
        pause_s = self._dealer.next_look(self.now_s)
        if pause_s < math.inf:
            self.after(pause_s, partial(self._look_again, self._num_looks))

    def _look_again(self, look: int) -> None:
        """Has the dealer deal, if it has heard nothing since it said when it would look again."""
        if look == self._num_looks:
            self._dealer.deal(self.now_s)
            self._dealer_has_dealt()

    def _tell(self, number: int, words: Words) -> None:
        rank = self._ranks[number]
        rank.hand.hear(words)
        if words[0] == CLOSED:
            self._is_closed_for_one_more(words[1])
        rank.wake()

    # ---- sums ----

    def _is_closed_for_one_more(self, step: int) -> None:
        self._heard[step] += 1
        if self._heard[step] == self.work.num_ranks:
            before_s = self._sums_s[-1] if self._sums_s else 0.0
            self._sums_s.append(max(self.now_s, before_s) + self.work.sum_s)
            self.after(self._sums_s[-1] - self.now_s, self._sum_is_there)

    def _sum_is_there(self) -> None:
        for rank in self._ranks:
            rank.wake()
