"""How all ranks do something after the same batch: stop, end training, or save.

    a rank finds that it is time    request to rank 0, which serves one request after the other
    rank 0                          hold to every rank
    every rank                      reply: how many batches it has begun; begins no other meanwhile
    rank 0                          at = the largest reply + 1, to every rank; done, to who asked
    every rank                      goes on; when it has done `at` batches:
                                      STOP  a signal: it begins no other batch, and raises
                                      END   the time is up: training ends as it does by itself
                                      SAVE  the time to save has come: it saves, and goes on
                                      MEET  newcomers wait: members let them in, and go on

No rank waits for ever.  Lanes answer, so an agreement waits for messages, and never for a training
thread, which may itself wait for another rank's.  The loss of a rank ends an agreement.  A rank
that has done fewer than `at` batches goes on, and no rank needs one that has done `at` batches
until all have done as many.  A later agreement has an `at` that is no smaller, and agreements come
in the same order on all ranks.

A rank that is out of data may never do `at` batches: it waits for the others where its epoch or its
training ends.  So a rank that has done `at` batches meets the ranks that wait there, and those that
have done `at` batches too.  If all ranks meet, they do what was agreed.  If not, with STOP all
ranks stop where they are; with SAVE the ranks that train go on without a checkpoint; with END the
ranks go on to the end of the epoch that the furthest of them is in, so that all ranks train,
evaluate and save in equally many epochs.  In all of these cases a rank that has not come forgets
the agreement, and a rank that still needs the others asks them anew.

Where ranks claim their batches, `at` is each rank's own: one more than it has begun when it is
told.  So a fast rank does not wait there until a slow one has done as many.

What a rank knows of a stop (`Stopping`), which never goes back within a view:

    NOT_ASKED   no rank was told to stop, as far as this rank knows
    ASKED       rank 0 asks all how far they are
    DECIDED     this rank begins `stop_at` batches, and stops for the signal `signum` of the rank
                `origin`; the first decision holds
    MISSED      others have stopped so, and a lost rank has kept this one from it: it stops where it
                is, for nobody waits for its batches

Where ranks may be lost, each view has an agreement of its own (`in_view`).  Its members tell each
other what was decided before.  If one of them knows where all stop, the stop is DECIDED, or MISSED,
on all, whatever was asked anew meanwhile; else the ranks that were told to stop ask anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final

import torch

from lightning_dsgd.agreement import everyones
from lightning_dsgd.transport import ANY, Lane, Timeout, Transport, TransportError

STOP: Final = 1
END: Final = 2
SAVE: Final = 3
MEET: Final = 4

END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a training; SLURM's signal wants it saved and requeued."""

_CHECK_PERIOD_S = 0.2
_REQUEST, _HOLD, _REPLY, _AT, _DONE = range(5)

Wish = tuple[int, int, int, int]
"""What is to be done; a detail (STOP: the signal, SAVE: whose callback); who asked; its number."""
_DECIDED: Final[Wish] = (0, 0, 0, 0)
"""Stands for a wish that is open until every rank has been told."""


class Stopping(Enum):
    """Says what a rank knows of a stop; the head of the file tells what follows what."""

    NOT_ASKED = auto()
    ASKED = auto()
    DECIDED = auto()
    MISSED = auto()


class AgreedBatch:
    """Takes this rank's part in the agreements.

    Attributes:
        stopping: what this rank knows of a stop
        signum: the signal that all stop for, once it is decided
        origin: the rank that got the signal
        stop_at: how many batches every rank begins, once it is decided to stop
        num_begun: how many this rank has begun
        requested: the signal that this rank got itself, or 0
        leaves: whether this rank was told to leave, which the others may go on without

    Args:
        net: the network, with channels of its own
        serves: whether other ranks are there; without them, nothing is asked or answered
        is_of_each: whether all do it after a batch of their own, not after the same
    """

    def __init__(self, net: Transport, *, serves: bool = True, is_of_each: bool = False) -> None:
        self.is_of_each = is_of_each
        self.signum = self.num_begun = self.requested = 0
        self.origin = self.stop_at = -1
        self.stopping = Stopping.NOT_ASKED
        self.leaves = self._is_to_meet = self._holding = False
        self._net = net
        self._changed = threading.Condition()
        self._due: list[tuple[int, int, int]] = []  # at, what to do after it
        self._open: Wish | None = None  # on rank 0, with the replies to it, and those that wait
        self._replies: dict[int, int] = {}
        self._waiting: list[Wish] = []
        self._numbers = itertools.count()  # of what this rank asks for
        self._unanswered: set[int] = set()
        self._lane: Lane | None = net.spawn_lane(self._serve, "stop") if serves else None
        self._channel: Transport = net if self._lane is None else self._lane.net

    def request(self, signum: int) -> None:
        """Asks all ranks to stop; safe in a signal handler."""
        self.requested = signum
        self.ask(STOP, signum)

    def ask(self, what: int, detail: int = 0) -> None:
        """Asks all ranks to do something after the same batch."""
        number = next(self._numbers)
        self._unanswered.add(number)
        # A handler may have interrupted the very code that sending needs: hence the thread.
        threading.Thread(target=self._ask, args=(what, detail, number), daemon=True).start()

    def begin_batch(self) -> bool:
        """Begins the next batch, and counts it; returns False if all ranks stop before it."""
        with self._changed:
            self._wait_until(lambda: not self._holding)
            if self._stops_now:
                return False
            self.num_begun += 1
            return True

    def ask_to_meet(self) -> None:
        """Asks all ranks, once until all have met, to meet before the same batch."""
        if not self._is_to_meet:
            self._is_to_meet = True
            self.ask(MEET)

    def take_meeting(self) -> bool:
        """Takes a meeting before the batch that comes, once; returns False if there is none."""
        with self._changed:
            meets = any(what == MEET and at <= self.num_begun for at, what, *_ in self._due)
            if meets:
                self.forget([MEET])
            return meets

    def take_due(self) -> list[tuple[int, int]]:
        """Takes what all do, besides stopping, after the batch that this rank has done."""
        with self._changed:
            due = [each for each in self._due if each[0] <= self.num_begun and each[1] != MEET]
            self._due = [later for later in self._due if later not in due]
        return [(what, detail) for _, what, detail in due]

    def forget(self, missed: Sequence[int]) -> None:
        """Forgets what others have come for without this rank, once it was told of that.

        They go on, and ask anew.  Else this rank would come later, alone, and wait for an epoch, or
        for ever if it holds a replica with others.  Of each kind that is the oldest: all come for
        one wish after the other, and each is told to all.
        """
        with self._changed:
            for what in missed:
                self._wait_until(partial(self._is_due, what))
                self._due.remove(next(each for each in self._due if each[1] == what))
            self._is_to_meet = self._is_to_meet and MEET not in missed

    def _is_due(self, what: int) -> bool:
        return any(each[1] == what for each in self._due)

    def await_stop(self) -> None:
        """Waits until it is decided where to stop; some rank knows already that all will stop."""
        with self._changed:
            self._wait_until(lambda: self._is_decided)

    @property
    def _stops_now(self) -> bool:
        """Whether this rank begins no other batch."""
        if self.stopping is Stopping.DECIDED:
            return self.stop_at <= self.num_begun
        return self.stopping is Stopping.MISSED

    @property
    def _is_decided(self) -> bool:
        return self.stopping in (Stopping.DECIDED, Stopping.MISSED)

    def stop_here(self, signum: int, origin: int) -> None:
        """Notes that all ranks, which are before the same batch, stop there."""
        with self._changed:
            self._decide(signum, origin, self.num_begun)

    def _decide(self, signum: int, origin: int, stop_at: int) -> None:
        """Takes over where all stop; called under the lock."""
        self.signum, self.origin, self.stop_at = signum, origin, stop_at
        self.stopping = Stopping.DECIDED

    # ---- in another view ----

    def in_view(self, net: Transport, *, has_stopped: bool) -> AgreedBatch:
        """Ends this agreement; returns the one among the members of a view, which all call it.

        A signal handler may ask this one meanwhile: `catch_up` comes next.

        Args:
            net: the network of the view, with channels of its own
            has_stopped: whether this rank has stopped where all do
        """
        with contextlib.suppress(TransportError):  # of which the lane has failed
            self.close()
        new = AgreedBatch(net, is_of_each=self.is_of_each)
        new.num_begun = self.num_begun
        mine = [self.stop_at, int(self.signum), self.origin]
        is_missed = has_stopped or self.stopping is Stopping.MISSED
        texts = everyones(net.sub("decided"), json.dumps([mine, is_missed]))
        told = [json.loads(text) for text in texts]
        stop_at, signum, origin = max(decided for decided, _ in told)
        if stop_at >= 0:
            # Also over what was asked anew meanwhile: a member may have heard of that already, and
            # another not.
            with new._changed:
                new._decide(signum, origin, new.num_begun if new.is_of_each else stop_at)
                if any(missed for _, missed in told):
                    new.stopping = Stopping.MISSED
        return new

    def catch_up(self, old: AgreedBatch) -> None:
        """Takes over what this rank was told itself: to leave, or to stop, which it asks anew."""
        self.leaves |= old.leaves
        if old.requested and not self.requested:
            self.requested = old.requested
            if not self._is_decided:
                self.ask(STOP, old.requested)

    # ---- closing, waiting, asking ----

    def finish(self) -> None:
        """Waits until all questions are answered; then all ranks may meet, and leave.

        A rank without its answer does not come to that meeting, so lanes answer as long as they
        are asked.
        """
        with self._changed:
            self._wait_until(lambda: not (self._unanswered or self._open or self._waiting))

    def close(self) -> None:
        """Ends the lane."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.stop()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = self._net.now() + self._net.timeout_s
        while not is_so():
            self._changed.wait(_CHECK_PERIOD_S)
            self._net.check()
            if self._net.now() > deadline:
                raise Timeout(
                    f"rank {self._net.rank} has waited {self._net.timeout_s:g} s for rank 0 to say "
                    "after which batch all ranks stop, end, save or meet"
                )

    def _ask(self, what: int, detail: int, number: int) -> None:
        with contextlib.suppress(TransportError):  # a rank is lost: all stop because of that
            if self._net.rank == 0:
                self._begin((what, detail, 0, number))
            else:
                self._send(0, _REQUEST, what, detail, self._net.rank, number)

    # ---- on rank 0 ----

    def _begin(self, wish: Wish) -> None:
        with self._changed:
            under_way = [self._open, *self._waiting] if self._open is not None else []
            is_asked_twice = any(wish[:2] == other[:2] for other in under_way)
            if not under_way:
                self._open = wish
                self._hold(wish[0])
                self._replies = {0: self.num_begun}
            elif not is_asked_twice:
                self._waiting.append(wish)
        if is_asked_twice:
            self._answer(wish)  # what is done for another rank is done for this one too
        elif not under_way:
            self._send_all(_HOLD, wish[0])
            self._decide_if_complete()

    def _decide_if_complete(self) -> None:
        with self._changed:
            if self._open is None or len(self._replies) < self._net.world_size:
                return  # or another thread of this rank has decided it
            wish, at = self._open, max(self._replies.values()) + 1
            self._open, self._replies = _DECIDED, {}  # the same may be asked for anew
        self._take(*wish[:3], at)  # first: others may come for it at once
        self._send_all(_AT, *wish[:3], at)
        self._answer(wish)
        with self._changed:
            following = self._waiting.pop(0) if self._waiting else None
            self._open = None  # the next may begin: after the last word on this one
            self._changed.notify_all()
        if following is not None:
            self._begin(following)

    def _answer(self, wish: Wish) -> None:
        *_, origin, number = wish
        if origin == 0:
            self._take_answer(number)
        else:
            self._send(origin, _DONE, 0, 0, 0, number)

    # ---- on every rank ----

    def _serve(self, net: Transport) -> None:
        self._channel = net  # here too: the first message may come before there is a lane
        while True:
            receipt = net.recv(torch.empty(0, dtype=torch.int64), ANY)
            message, what, detail, origin, number = receipt.wait(timeout_s=math.inf).tolist()
            if message == _REQUEST:
                self._begin((what, detail, origin, number))
            elif message == _HOLD:
                with self._changed:
                    self._hold(what)
                    begun = self.num_begun
                self._send(0, _REPLY, 0, 0, net.rank, begun)
            elif message == _REPLY:
                with self._changed:
                    self._replies[origin] = number
                self._decide_if_complete()
            elif message == _AT:
                self._take(what, detail, origin, number)
            else:
                self._take_answer(number)

    def _hold(self, what: int) -> None:
        self._holding = True
        if what == STOP and self.stopping is Stopping.NOT_ASKED:
            self.stopping = Stopping.ASKED

    def _take(self, what: int, detail: int, origin: int, at: int) -> None:
        with self._changed:
            if self.is_of_each:
                at = self.num_begun + 1
            if what != STOP:
                self._due.append((at, what, detail))
            elif not self._is_decided:
                self._decide(detail, origin, at)
            self._holding = False
            self._changed.notify_all()

    def _take_answer(self, number: int) -> None:
        with self._changed:
            self._unanswered.discard(number)
            self._changed.notify_all()

    def _send_all(self, *words: int) -> None:
        for rank in range(1, self._net.world_size):
            self._send(rank, *words)

    def _send(self, rank: int, *words: int) -> None:
        padded = [*words, 0, 0, 0, 0][:5]
        self._channel.send(torch.tensor(padded), rank)
