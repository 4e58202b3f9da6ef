"""Units over a network: a lane hears all messages of `protocol`, and the training thread waits.

    training thread   takes a unit, computes it, has it enter the sum, takes another
    lane              hears all messages; deals, on the first rank; has sums begin

`_lock` guards what this rank has in hand, and on the first rank what the dealer knows.  Nobody
holds it while a unit enters the sum or a message leaves; `_leaving` keeps messages in their order.

A training thread that must wait says so, and its lane then sends it a message.  So the wait is one
like any other: it is counted, it has a limit, and a lost rank ends it.

Once a rank is lost no message leaves any more.  What a training thread had to say then is in what
it reports (`losses`), and its next wait ends.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

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
    Words,
)
from lightning_dsgd.transport import ANY, PeerLost, Timeout, Transport, TransportError

_WORDS: Final = torch.empty(0, dtype=torch.int64)
_TO_THE_DEALER: Final = (READY, BEGIN, COMMIT, ANSWER)


class Dealing:
    """One rank's end of the dealing.

    Args:
        net: the network, with channels of its own
        backups: whether a unit that is begun may be computed a second time
        on_closed: is called in the lane for each step that closes, in the order of the steps
    """

    def __init__(self, net: Transport, *, backups: bool, on_closed: Callable[[int], None]) -> None:
        self._backups, self._on_closed = backups, on_closed
        self._lock, self._leaving = threading.Lock(), threading.Lock()
        self._hand = Hand(net.rank)
        self._begin(net, None)

    def _begin(self, net: Transport, after: Conclusion | None) -> None:
        self._net = net
        is_dealer = net.rank == DEALER
        self._dealer = (
            Dealer(net.world_size, backups=self._backups, after=after) if is_dealer else None
        )
        self._awaits: Callable[[], bool] | None = None
        self._lane = net.spawn_lane(self._serve, "units")

    def close(self) -> None:
        """Ends the lane."""
        self._lane.stop()

    # ---- where a rank is lost: the training thread ----

    def stand_still(self) -> Hand:
        """Ends the lane, which may have failed with a rank; returns what this rank has in hand."""
        with contextlib.suppress(TransportError):
            self._lane.stop()
        return self._hand

    def go_on(self, net: Transport, after: Conclusion) -> None:
        """Goes on among the ranks that are left, which have all stood still."""
        self._hand.go_on(after)
        self._begin(net, after)
        self._send_if_all_are_there()

    # ---- the training thread ----

    def know(self, first: int, homes: Sequence[Sequence[int]]) -> None:
        """Learns of the steps from `first` on; see `Dealer.know`."""
        if self._dealer is not None:
            with self._lock:
                self._dealer.know(first, homes, self._net.now())
            self._send_if_all_are_there()

    def begin_step(self, step: int) -> None:
        """Goes on to a step."""
        with self._lock:
            self._hand.begin_step(step)
        self._send_if_all_are_there()

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
            self._send_if_all_are_there()
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
        self._send_if_all_are_there()
        return may_enter

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._lock:
            if is_so():
                return
            self._awaits = is_so
        self._send_if_all_are_there()
        try:
            self._net.recv(_WORDS, self._net.rank).wait()
        except Timeout as err:
            raise Timeout(
                f"rank {self._net.job_rank} has waited {self._net.timeout_s:g} s for the first "
                "rank to deal it a micro-batch, or to say that all of the step are computed"
            ) from err

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            try:
                receipt = net.recv(_WORDS, ANY)
                words = tuple(receipt.wait(timeout_s=self._pause()).tolist())
            except Timeout:
                self._look_again()
            else:
                self._hear(receipt.source, words)
            self._send(net)

    def _pause(self) -> float:
        if self._dealer is None:
            return math.inf
        with self._lock:
            return self._dealer.next_look(self._net.now())

    def _look_again(self) -> None:
        if self._dealer is not None:
            with self._lock:
                self._dealer.deal(self._net.now())

    def _hear(self, sender: int, words: Words) -> None:
        if words[0] == CLOSED:
            self._on_closed(words[1])
        with self._lock:
            if words[0] in _TO_THE_DEALER:
                assert self._dealer is not None, "the first rank deals"
                self._dealer.hear(sender, words, self._net.now())
            else:
                self._hand.hear(words)

    # ---- both ----

    def _send_if_all_are_there(self) -> None:
        with contextlib.suppress(PeerLost):
            self._send(self._lane.net)

    def _send(self, net: Transport) -> None:
        """Sends all messages that are to leave; wakes the training thread if it waits no longer."""
        with self._leaving:
            with self._lock:
                wakes = self._awaits is not None and self._awaits()
                if wakes:
                    self._awaits = None
                leaving = [(DEALER, words) for words in self._hand.outbox]
                self._hand.outbox.clear()
                if self._dealer is not None:
                    leaving += self._dealer.outbox
                    self._dealer.outbox.clear()
            for receiver, words in leaving:
                net.send(torch.tensor(words), receiver)
            if wakes:
                self._net.send(_WORDS, self._net.rank)
