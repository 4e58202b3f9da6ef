"""What one rank has in hand of a step: its end of the protocol (`protocol`), without threads."""

from __future__ import annotations

from lightning_dsgd.data.units.protocol import (
    ANSWER,
    BEGIN,
    BEGUN,
    CLOSED,
    COMMIT,
    CONTEST,
    DROPPED,
    FINISHED,
    GRANT,
    LATER,
    NONE,
    READY,
    VERDICT,
    Conclusion,
    Words,
)


class Hand:
    """What one rank has of the step that it is in.

    Attributes:
        step: the step that this rank is in
        current: the unit that it computes
        ahead: the unit that it was granted and has not begun
        entered: the units of the step that have entered this rank's sum
        closed: the last step that is closed, as this rank knows
        outbox: messages to the dealer that are to be sent

    Args:
        rank: this rank
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = self.closed = NONE
        self.current = self.ahead = NONE
        self.entered: set[int] = set()
        self.outbox: list[Words] = []
        self._num_ready = self._num_later = 0
        self._is_ahead_contested = self._is_contested = self._is_entering = False
        self._verdict: bool | None = None
        self._has_asked = False

    def begin_step(self, step: int) -> None:
        """Goes on to a step, of which this rank has nothing in hand."""
        self.step = step
        self.current = NONE
        self.entered = set()
        self._begin_to_ask()

    def go_on(self, after: Conclusion) -> None:
        """Goes on with another dealer, in the same step; what was said before is forgotten."""
        self.closed = after.summed
        if self.step == after.step:
            self.entered &= after.done
        self.outbox.clear()
        self._begin_to_ask()

    def _begin_to_ask(self) -> None:
        self.ahead = NONE
        self._num_ready = self._num_later = 0
        self._is_ahead_contested = self._is_entering = self._has_asked = False
        self._verdict = None
        self._is_contested = self.current != NONE  # begun before a loss: another may have it too
        if self.step != NONE and self.current == NONE:
            self._ready(NONE)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to do in this rank's step but the sum."""
        return self.closed >= self.step

    @property
    def is_answered(self) -> bool:
        """Whether the dealer has answered, or need not: a rank that must not wait can go on."""
        return self.is_closed or self.ahead != NONE or self._num_later >= self._num_ready

    def begin(self) -> int:
        """Begins the unit that was granted, and returns it; NONE if there is none."""
        assert self.current == NONE, "a rank finishes a unit before it begins another"
        if self.ahead == NONE or self.is_closed:
            return NONE
        self.current, self.ahead = self.ahead, NONE
        self._is_contested, self._is_ahead_contested = self._is_ahead_contested, False
        self._verdict, self._has_asked = None, False
        self.outbox.append((BEGIN, self.step, self.current))
        return self.current

    def enter(self) -> bool | None:
        """Returns whether the unit in hand may enter the sum now; None: the dealer is asked.

        Where it may, nobody contests it from now on.
        """
        if self.is_closed:
            return False
        if self._is_contested:
            if self._verdict is None and not self._has_asked:
                self._has_asked = True
                self.outbox.append((COMMIT, self.step, self.current))
            return self._verdict
        self._is_entering = True
        return True

    def finish(self, *, has_entered: bool) -> None:
        """Ends the unit in hand; it has entered the sum, or was dropped."""
        unit, self.current = self.current, NONE
        if has_entered:
            self.entered.add(unit)
        self._is_contested = self._is_entering = False
        self._ready(unit if has_entered else NONE)

    def _ready(self, done: int) -> None:
        self._num_ready += 1
        self.outbox.append((READY, self.step, done))

    def hear(self, words: Words) -> None:
        """Hears the dealer."""
        kind, step, *rest = words
        if kind == CLOSED:
            self.closed = max(self.closed, step)
        elif kind == CONTEST:
            self.outbox.append((ANSWER, step, rest[0], self._contested(step, rest[0])))
        elif step != self.step:
            return  # this rank has gone on
        elif kind == GRANT:
            self.ahead, self._is_ahead_contested = rest[0], bool(rest[1])
        elif kind == LATER:
            self._num_later = rest[0]
        elif kind == VERDICT and rest[0] == self.current:
            self._verdict = bool(rest[1])

    def _contested(self, step: int, unit: int) -> int:
        """Returns how this rank stands to a unit of its, which another is to have."""
        if step == self.step and unit == self.ahead:
            self.ahead = NONE
            return DROPPED
        if step == self.step and unit == self.current and not self._is_entering:
            self._is_contested = True
            return BEGUN
        return FINISHED
