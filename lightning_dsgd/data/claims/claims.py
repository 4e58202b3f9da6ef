"""Claimed batches: ranks claim what they train on from the epoch, so no share is fixed beforehand.

An epoch is a list of batches in an order that all ranks know: its sampler's.  A portion is a batch,
or the batches of one optimizer step.  Rank r trains on a portion once the dealer has granted it:

    rank       begins a portion, and asks ahead for another one                     ASK
    dealer     grants the first portion that is free; or says that there is none    GRANT
    rank       tells the dealer and the second member what it has trained on        TELL
    rank       has none and is told there is none: asks again, as it must wait      ASK, urgent
    dealer     asks the rank that holds the most portions that it has not begun     RECALL
    that rank  gives its last one back, or says that it has begun them all          BACK
    dealer     grants that one; or says that there is none: the rank has none left

**Who deals.**  The first member of the view.  A lane answers, and never a training thread, so a
claim waits for messages only.  A loader with workers claims as far ahead as it loads.

**No portion is trained on twice.**  A portion is free, or one rank has it: the dealer takes it from
the free ones when it grants it, and a rank that gives it back has not begun it and never will.  A
portion that was granted to a rank that waited is never given back, so it does not wander.

**No portion is left out.**  A rank that is told that there is none has come to the end of its
epoch.  The epoch ends once all ranks are there, and no portion is free.

**Who is told what was trained on.**  Once a rank has trained on a portion it tells the dealer, and
the second member, before it loads its next batch.  A portion counts as trained on from then on.

**Where the view changes** each member tells all others what it knows to be trained on, and what it
holds.  All else is free again, and the first member deals it.  So

- what a lost rank held or had begun goes to the others, in the same epoch;
- what a lost rank had trained on and told stays trained on, though its weights may be lost with it:
  what others had averaged of them by then is what stays of any lost rank;
- what it had trained on and told nobody, as it was lost just then, is trained on again;
- the same goes for the dealer, as the second member knows what it has trained on.  If both are lost
  together, the others train again on what lost ranks had told these two;
- messages that were under way are dropped with the old view.  A portion that was in one is free;
- what a rank that leaves on purpose knows to be trained on it tells all members before;
- a newcomer holds nothing, and claims.

**Nobody waits for ever.**  The dealer answers each claim once, either at once or after one answer
each from the ranks that hold something; lanes give these at once.  A rank that was recalled in vain
is not asked again before it has claimed more.  A lost rank ends each wait; so does a time limit.

**In a checkpoint** are the epoch and the portions that were trained on, of all ranks.  What is held
and not begun is free again after a resume, with any number of ranks.  Nobody claims before all have
resumed: a dealer that has not would begin the epoch anew.

This module is a machine without threads, clocks and input: see `dealing` for these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

NONE: Final = -1
"""Stands for a portion where there is none."""
DEALER: Final = 0
_WITNESS: Final = 1
"""The member that is told, beside the dealer, what was trained on."""
_ASK, _GRANT, _RECALL, _BACK, _REFUSE, _TELL = range(6)

Words = tuple[int, ...]
"""A message."""


class Epoch(NamedTuple):
    """An epoch as all ranks must see it alike.

    Attributes:
        number: its number; a later epoch has a larger one
        num_portions: how many portions it has
        checksum: of the order of its samples
    """

    number: int = NONE
    num_portions: int = 0
    checksum: int = 0


class Report(NamedTuple):
    """What a member tells the others where the view changes."""

    epoch: Epoch
    trained: list[int]
    begun: list[int]
    ahead: list[int]
    """Portions that it has claimed and not begun."""


class Claims:
    """One member's end of the claims of an epoch: see the head of the file.

    Attributes:
        epoch: the epoch that is dealt
        order: the portions that this rank has claimed, in that order; NONE: given back since
        num_begun: how many of `order` lie behind this rank, given back ones included
        trained: the portions that were trained on, as far as this rank knows
        is_asking: whether a claim of this rank has no answer yet
        is_dry: whether the last answer was that there is none
        refused: the dealer's epoch, where it is another than this rank's
        outbox: messages to be sent, each with its receiver

    Args:
        rank: this rank
        world_size: how many members there are
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.outbox: list[tuple[int, Words]] = []
        self._enter(Epoch())

    def _enter(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.refused: Epoch | None = None
        self.order: list[int] = []
        self.num_begun = 0
        self.trained: set[int] = set()
        self.is_asking = self.is_dry = False
        self._num_bound = 0  # of `order`: all up to here stay this rank's
        self._current = NONE
        self._desk = _Desk(epoch.num_portions, ())

    # ---- of the rank that trains ----

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begins an epoch, or goes on with it where others have begun it, or a resume has."""
        if epoch.number != self.epoch.number:
            self._enter(epoch)
        elif epoch != self.epoch:
            self.refused = self.epoch

    def resume(self, epoch: Epoch, trained: Iterable[int]) -> None:
        """Begins in the midst of an epoch; all ranks call it with the same."""
        self._enter(epoch)
        self.trained = set(trained)
        self._desk = _Desk(epoch.num_portions, self.trained)

    def ask(self, *, is_urgent: bool) -> None:
        """Claims one more portion; does nothing while an answer is awaited.

        Args:
            is_urgent: whether this rank has nothing else to do; else it takes no for an answer
        """
        if self.is_asking or (self.is_dry and not is_urgent):
            return
        self.is_asking = True
        words = (_ASK, *self.epoch, int(is_urgent), len(self._ahead()))
        self.outbox.append((DEALER, words))

    def begin(self, position: int) -> bool:
        """Begins the portion at a position of `order`, unless it was given back meanwhile."""
        if position >= self.num_begun:
            self.end()
            self.num_begun = position + 1
            self._current = self.order[position]
        return self.order[position] != NONE

    def end(self) -> None:
        """Ends the portion that this rank has begun: it was trained on, as others are to know."""
        if self._current != NONE:
            self.trained.add(self._current)
            words = (_TELL, *self.epoch, self._current)
            others = {DEALER, _WITNESS} - {self.rank}
            self.outbox += [(rank, words) for rank in sorted(others) if rank < self.world_size]
            self._current = NONE

    def _ahead(self) -> list[int]:
        """Returns the positions that can be given back."""
        first = max(self.num_begun, self._num_bound)
        return [at for at in range(first, len(self.order)) if self.order[at] != NONE]

    # ---- messages ----

    def hear(self, sender: int, words: Words) -> None:
        """Hears a message of another member, or of this one."""
        kind, *rest = words
        if kind == _ASK:
            self._hear_ask(sender, Epoch(*rest[:3]), bool(rest[3]), rest[4])
        elif kind == _TELL:
            self._hear_of(Epoch(*rest[:3]))
            if rest[0] == self.epoch.number:
                self.trained.add(rest[3])
        elif kind == _REFUSE:
            self.refused, self.is_asking = Epoch(*rest), False
        elif rest[0] != self.epoch.number:  # it was stopped early, and this rank has gone on
            if kind == _RECALL:
                self.outbox.append((sender, (_BACK, rest[0], NONE)))
        elif kind == _GRANT:
            self._take(*rest[1:])
        elif kind == _RECALL:
            ahead = self._ahead()[-1:]
            portions = [self.order[at] for at in ahead] or [NONE]
            for at in ahead:
                self.order[at] = NONE
            self.outbox.append((sender, (_BACK, self.epoch.number, *portions)))
        else:
            self._desk.take_back(sender, rest[1])
            self._deal()

    def _hear_of(self, epoch: Epoch) -> None:
        if epoch.number > self.epoch.number:
            self._enter(epoch)

    def _hear_ask(self, sender: int, epoch: Epoch, is_urgent: bool, num_ahead: int) -> None:
        self._hear_of(epoch)
        if epoch != self.epoch:
            self.outbox.append((sender, (_REFUSE, *self.epoch)))
            return
        self._desk.ask(sender, is_urgent=is_urgent, num_ahead=num_ahead)
        self._deal()

    def _deal(self) -> None:
        for receiver, portion, is_bound in self._desk.deal():
            self.outbox.append((receiver, (_GRANT, self.epoch.number, portion, int(is_bound))))
        victim = self._desk.recall()
        if victim != NONE:
            self.outbox.append((victim, (_RECALL, self.epoch.number)))

    def _take(self, portion: int, is_bound: int) -> None:
        self.is_asking = False
        self.is_dry = portion == NONE
        if portion != NONE:
            self.order.append(portion)
            if is_bound:
                self._num_bound = len(self.order)

    # ---- where the view changes, and a checkpoint ----

    @property
    def num_free(self) -> int:
        """How many portions nobody has, as the dealer knows; 0 on the others."""
        return self._desk.num_free if self.rank == DEALER else 0

    def report(self) -> Report:
        """Returns what this member tells the others."""
        ahead = [each for each in self.order[self.num_begun :] if each != NONE]
        begun = [self._current] if self._current != NONE else []
        return Report(self.epoch, sorted(self.trained), begun, ahead)

    def learn(self, reports: Sequence[Report]) -> None:
        """Takes over what others know to be trained on, before some of them leave."""
        for report in reports:
            if report.epoch == self.epoch:
                self.trained.update(report.trained)

    def change_view(self, rank: int, reports: Sequence[Report]) -> None:
        """Goes on among other members, which all have reported, in the order of their ranks."""
        self.rank, self.world_size = rank, len(reports)
        self.outbox = []
        epoch = max(report.epoch for report in reports)
        if epoch.number != self.epoch.number:
            self._enter(epoch)
        there = {r: each for r, each in enumerate(reports) if each.epoch == epoch}
        self.trained = {portion for each in there.values() for portion in each.trained}
        self.is_asking = self.is_dry = False
        held = {portion for each in there.values() for portion in (*each.begun, *each.ahead)}
        self._desk = _Desk(epoch.num_portions, self.trained | held)
        self._desk.ahead.update({r: len(each.ahead) for r, each in there.items()})


class _Desk:
    """What the dealer deals from.

    Args:
        num_portions: how many portions the epoch has
        taken: the portions that somebody has, or has trained on

    Attributes:
        ahead: how many portions each rank has claimed and not begun, or fewer
    """

    def __init__(self, num_portions: int, taken: Iterable[int]) -> None:
        taken = set(taken)
        self._num_portions = num_portions
        self._next = max(taken, default=NONE) + 1
        self._returned = deque(portion for portion in range(self._next) if portion not in taken)
        self.ahead: Counter[int] = Counter()
        self._asks: deque[tuple[int, bool]] = deque()
        self._recalled = NONE

    @property
    def num_free(self) -> int:
        """How many portions nobody has."""
        return len(self._returned) + self._num_portions - self._next

    def ask(self, sender: int, *, is_urgent: bool, num_ahead: int) -> None:
        """Notes a claim, to be dealt."""
        self.ahead[sender] = num_ahead
        self._asks.append((sender, is_urgent))

    def deal(self) -> list[tuple[int, int, bool]]:
        """Returns the answers that can be given: to whom, which portion, whether it stays there."""
        answers, waiting = [], deque[tuple[int, bool]]()
        for sender, is_urgent in self._asks:
            portion = self._take_free()
            if portion == NONE and is_urgent and self._may_recall():
                waiting.append((sender, is_urgent))
                continue
            if portion != NONE and not is_urgent:
                self.ahead[sender] += 1
            answers.append((sender, portion, is_urgent))
        self._asks = waiting
        return answers

    def recall(self) -> int:
        """Returns whom to ask to give a portion back; NONE: nobody, now."""
        if not self._asks or self._recalled != NONE:
            return NONE
        self._recalled = max(self.ahead, key=lambda rank: (self.ahead[rank], -rank))
        return self._recalled

    def take_back(self, sender: int, portion: int) -> None:
        """Takes what a rank that was asked gives back."""
        self._recalled = NONE
        self.ahead[sender] = 0 if portion == NONE else max(0, self.ahead[sender] - 1)
        if portion != NONE:
            self._returned.append(portion)

    def _may_recall(self) -> bool:
        return self._recalled != NONE or any(self.ahead.values())

    def _take_free(self) -> int:
        if self._returned:
            return self._returned.popleft()
        if self._next < self._num_portions:
            self._next += 1
            return self._next - 1
        return NONE
