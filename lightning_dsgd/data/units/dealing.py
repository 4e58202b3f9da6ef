"""Units over a network: a rank's end of their dealing (`data.dealing`).

    training thread   takes a unit, computes it, has it enter the sum, takes another
    lane              hears and sends all messages; deals, on the first rank; has sums begin

Nobody holds the lock while a unit enters the sum.  What a training thread had to say when a rank
was lost is in what it reports to `losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from lightning_dsgd.data.dealing import Dealing, Words
from lightning_dsgd.data.units.dealer import Dealer
from lightning_dsgd.data.units.hand import Hand
from lightning_dsgd.data.units.protocol import (
    ANSWER,
    BEGIN,
    CLOSED,
    COMMIT,
    DEALER,
    NONE,
    READY,
    Conclusion,
)
from lightning_dsgd.transport import Transport

_TO_THE_DEALER: Final = (READY, BEGIN, COMMIT, ANSWER)


class UnitDealing(Dealing):
    """One rank's end of the dealing.

    Args:
        net: the network, with channels of its own
        backups: whether a unit that is begun may be computed a second time
        on_closed: is called in the lane for each step that closes, in the order of the steps
    """

    _name = "units"
    _awaited = "rank to deal it a micro-batch, or to say that all of the step are computed"

    def __init__(self, net: Transport, *, backups: bool, on_closed: Callable[[int], None]) -> None:
        super().__init__()
        self._backups, self._on_closed = backups, on_closed
        self._hand = Hand(net.rank)
        self._begin(net, None)

    def _begin(self, net: Transport, after: Conclusion | None) -> None:
        is_dealer = net.rank == DEALER
        self._dealer = (
            Dealer(net.world_size, backups=self._backups, after=after) if is_dealer else None
        )
        self._open(net)

    # ---- where a rank is lost: the training thread ----

    def stand_still(self) -> Hand:
        """Ends the lane, which may have failed with a rank; returns what this rank has in hand."""
        self._stop()
        return self._hand

    def go_on(self, net: Transport, after: Conclusion) -> None:
        """Goes on among the ranks that are left, which have all stood still."""
        self._hand.go_on(after)
        self._begin(net, after)
        self._wake()

    # ---- the training thread ----

    def know(self, first: int, homes: Sequence[Sequence[int]]) -> None:
        """Learns of the steps from `first` on; see `Dealer.know`."""
        if self._dealer is not None:
            with self._lock:
                self._dealer.know(first, homes, self._net.now())
            self._wake()

    def begin_step(self, step: int) -> None:
        """Goes on to a step."""
        with self._lock:
            self._hand.begin_step(step)
        self._wake()

    @property
    def has_next(self) -> bool:
        """Whether a unit is granted that this rank has not begun."""
        with self._lock:
            return self._hand.ahead != NONE and not self._hand.is_closed

    def take(self, *, waits: bool) -> int:
        """Begins a unit and returns it; NONE if there is none.

        Args:
            waits: whether to wait until there is one, or the step is closed
        """
        hand = self._hand

        def is_there() -> bool:
            is_settled = hand.ahead != NONE or hand.is_closed
            return is_settled if waits else hand.is_answered

        while True:
            self._wait(is_there)
            with self._lock:
                unit = hand.begin()
                if unit == NONE and waits and not hand.is_closed:
                    continue  # the unit was given back just now
            self._wake()
            return unit

    def finish(self, enter: Callable[[], None]) -> bool:
        """Ends the unit in hand: calls `enter` if it is to enter the sum, and returns whether."""
        hand, answers = self._hand, list[bool | None]()

        def is_said() -> bool:
            answers.append(hand.enter())
            return answers[-1] is not None

        self._wait(is_said)
        may_enter = bool(answers[-1])
        if may_enter:
            enter()
        with self._lock:
            hand.finish(has_entered=may_enter)
        self._wake()
        return may_enter

    # ---- the lane ----

    def _hear(self, sender: int, words: Words) -> None:
        if words[0] == CLOSED:
            self._on_closed(words[1])
        with self._lock:
            if words[0] in _TO_THE_DEALER:
                assert self._dealer is not None, "the first rank deals"
                self._dealer.hear(sender, words, self._net.now())
            else:
                self._hand.hear(words)

    def _pause_s(self) -> float:
        if self._dealer is None:
            return math.inf
        with self._lock:
            return self._dealer.next_look(self._net.now())

    def _look_again(self) -> None:
        if self._dealer is not None:
            with self._lock:
                self._dealer.deal(self._net.now())

    def _outgoing(self) -> list[tuple[int, Words]]:
        outgoing = [(DEALER, words) for words in self._hand.outbox]
        self._hand.outbox.clear()
        if self._dealer is not None:
            outgoing += self._dealer.outbox
            self._dealer.outbox.clear()
        return outgoing
