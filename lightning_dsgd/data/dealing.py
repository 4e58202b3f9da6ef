"""A lane that hears what is dealt, and a training thread that waits for it: claims and units.

    training thread   says what it does, and waits for what it is dealt
    lane              hears and sends all messages; deals, on the first rank

`_lock` guards what both know.  Nobody holds it while a message leaves.  A message that leaves takes
longer than all else that is said here, and the lane has the time: it sends while the training
thread computes.  The training thread wakes it, by a message without words.

A training thread that must wait says so, and its lane then sends it a message.  So the wait is one
like any other: it is counted, it has a limit, and a lost rank ends it.

Once a rank is lost no message leaves any more.  What a training thread had to say then is in what
it reports, and its next wait ends.

`Ranks` and `Session` are what claims and units ask of the ranks that train.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, Protocol, TypeVar

import torch

from lightning_dsgd.transport import ANY, PeerLost, Timeout, Transport, TransportError

Words = tuple[int, ...]
"""A message."""

_WORDS: Final = torch.empty(0, dtype=torch.int64)

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that train: they end with a lost one, or go on without it."""

    def together(self, call: Callable[[], T], adopt: Callable[[], None] | None = None) -> T:
        """Returns what `call` returns, which all ranks call; see `session.ranks`."""

    def step(self, call: Callable[[], None], *, again: bool) -> None:
        """Makes a step of this rank alone, which is made again after a loss, or ends with it."""


class Session(Protocol):
    """One rank's part in a training."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that train with this one, on whose loss `Ranks` decides."""

    @property
    def meetings(self) -> Transport:
        """The network on which all ranks meet."""


def step_of(ranks: Ranks, call: Callable[[], T]) -> T:
    """Returns what a step of this rank returns, which is made again after a loss."""
    made: list[T] = []
    ranks.step(lambda: made.append(call()), again=True)
    return made[-1]


class Dealing(ABC):
    """One rank's end of the dealing."""

    _name: ClassVar[str]
    """What the lane is called."""
    _awaited: ClassVar[str]
    """What a training thread waits for, to be said where it waits in vain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def _open(self, net: Transport) -> None:
        """Starts the lane; a subclass calls it once its own attributes are there."""
        self._net = net
        self._awaits: Callable[[], bool] | None = None
        self._is_woken = False
        self._lane = net.spawn_lane(self._serve, self._name)

    def close(self) -> None:
        """Ends the lane; what was said before still leaves."""
        self._lane.stop()
        with contextlib.suppress(PeerLost):
            self._send(self._lane.net)

    def _stop(self) -> None:
        """Ends the lane, which may have failed with a rank."""
        with contextlib.suppress(TransportError):
            self._lane.stop()

    # ---- what is dealt ----

    @abstractmethod
    def _hear(self, sender: int, words: Words) -> None:
        """Hears a message in the lane, and takes the lock for what both know."""

    @abstractmethod
    def _outgoing(self) -> list[tuple[int, Words]]:
        """Returns the messages that are to leave, each with its receiver; called under the lock."""

    def _pause_s(self) -> float:
        """Returns how long the lane may wait for a message before it looks again."""
        return math.inf

    def _look_again(self) -> None:
        """Deals anew, as no message has come for so long."""
        raise AssertionError("a lane that may wait for ever looks at nothing again")

    # ---- the training thread ----

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Waits until this is so; it is asked under the lock."""
        with self._lock:
            if is_so():
                return
            self._awaits = is_so
        self._wake()
        try:
            self._net.recv(_WORDS, self._net.rank).wait()
        except Timeout as err:
            raise Timeout(
                f"rank {self._net.job_rank} has waited {self._net.timeout_s:g} s for the first "
                f"{self._awaited}"
            ) from err

    def _wake(self) -> None:
        """Has the lane send what was said, unless it is about to look."""
        with self._lock:
            is_woken, self._is_woken = self._is_woken, True
        if not is_woken:
            with contextlib.suppress(PeerLost):
                self._lane.net.send(_WORDS, self._net.rank)

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            try:
                receipt = net.recv(_WORDS, ANY)
                words = tuple(receipt.wait(timeout_s=self._pause_s()).tolist())
            except Timeout:
                self._look_again()
            else:
                if words:
                    self._hear(receipt.source, words)
            self._send(net)

    def _send(self, net: Transport) -> None:
        """Sends all messages that are to leave; wakes the training thread if it waits no longer."""
        with self._lock:
            self._is_woken = False
            is_answered = self._awaits is not None and self._awaits()
            if is_answered:
                self._awaits = None
            outgoing = self._outgoing()
        for receiver, words in outgoing:
            net.send(torch.tensor(words), receiver)
        if is_answered:
            self._net.send(_WORDS, self._net.rank)
