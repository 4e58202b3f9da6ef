"""Where messages and receives meet: a mailbox for each channel and tag.

A receive that was posted before its message came is filled in place, and one that is for a device
may copy a message there while it comes.  A sender is told of what
receives have taken, and of receives that wait for what it holds: see `memory`.

**Threads.**  The receiving thread posts and withdraws; the thread that moves the bytes (the mesh's,
or MPI's), and any thread that sends to its own rank, claims and delivers; whoever notices that a
rank is lost breaks off.  `Mailboxes` guards its tables, and what it changes in an `Expected` that
is in them, by one lock that is never held while anything is waited for.  `failure` and `left` are
written under that lock and read without it: each is one reference, or a set that only grows, which
relies on the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch
from torch import Tensor

from lightning_dsgd.devices import PASSED, Mark
from lightning_dsgd.transport import memory
from lightning_dsgd.transport.contract import ANY, PeerLost
from lightning_dsgd.transport.messages import ASKED, TAKEN

Key = tuple[int, int]
"""The channel and the tag of a mailbox."""


class Once:
    """What happens once, and one thread waits for; to say so costs less than a `threading.Event`.

    Any thread may say so, also again.  What is put into the queue is read after the flag is set.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._said: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Returns whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Says that it has happened."""
        self._is_set = True
        self._said.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has happened; returns whether it has."""
        if not self._is_set:
            with contextlib.suppress(Empty):
                self._said.get(timeout=timeout_s)
        return self._is_set


class Expected:
    """A receive, as the mailboxes know it.

    Its receiver reads what has come after `arrived` is set, and not before.

    Args:
        src: the rank whose message it takes, or ANY
        key: its mailbox
        into: memory that the message may be read straight into
        follows: whether its receiver uses a message while that comes
    """

    def __init__(self, src: int, key: Key, into: Tensor | None, *, follows: bool = False) -> None:
        self.source = src
        self.wanted = src
        self.key = key
        self.into = into
        self.claimed = False
        """Whether its message is being read right now."""
        self.has_asked = False
        """Whether a sender that holds a message for it has been asked for that."""
        self.arrived = Once()
        self.follows = follows
        self.begun = Once() if follows else self.arrived
        self.num_come = 0
        """How many bytes of the payload are here, where it is followed."""
        self.kind = -1
        self.payload: Tensor | None = None
        self.mark = PASSED
        """A mark behind what has made the payload, where the payload is on a device."""
        self.end = 0.0
        """When its message came."""
        self.failure: BaseException | None = None

    def fill(self, source: int, kind: int, payload: Tensor, mark: Mark) -> None:
        """Gives the receive its message."""
        self.source, self.kind, self.payload, self.mark = source, kind, payload, mark
        self.end = time.monotonic()
        self.num_come = payload.nbytes
        self._end()

    def follow(self, source: int, kind: int, payload: Tensor) -> None:
        """Gives the receive its message, of which nothing has come yet."""
        self.source, self.kind, self.payload = source, kind, payload
        self.begun.set()

    def missing(self, left: set[int]) -> int | None:
        """Returns a rank that the receive needs and that has left, if there is one."""
        return self.wanted if self.wanted in left else None

    def break_off(self, failure: BaseException) -> None:
        """Ends the receive: its message will not come, or is not waited for any more."""
        self.failure = failure
        self._end()

    def _end(self) -> None:
        self.arrived.set()
        if self.follows:
            self.begun.set()

    def raise_failure(self, waited_for: str) -> NoReturn:
        """Raises the failure with which the receive was broken off."""
        failure = self.failure
        assert failure is not None
        if isinstance(failure, PeerLost):
            raise PeerLost(failure.rank, failure.reason, waited_for)
        raise failure


class Mailboxes:
    """Messages that nobody has asked for yet, and receives whose message has not come yet.

    Args:
        say: tells a rank a kind of news of a channel and tag; returns False if it cannot yet
    """

    def __init__(self, say: Callable[[int, int, Key], bool] = lambda *_: True) -> None:
        self._lock = threading.Lock()
        self._say = say
        self._held: dict[Key, list[int]] = {}
        self._taken: Counter[int] = Counter()
        self.num_breaks = 0
        """How often waits were broken off, or have begun to work again."""
        self.is_old: Callable[[int], bool] = lambda _: False
        """Whether a channel is one of before."""
        self._arrived: dict[Key, deque[tuple[int, int, Tensor, Mark, bool]]] = {}
        self._posted: dict[Key, list[Expected]] = {}
        self.left: set[int] = set()
        """The ranks that have said farewell, behind all their messages."""
        self.failure: PeerLost | None = None
        """The first loss of a rank."""

    def collect(self, expected: Expected) -> None:
        """Fills the receive with a message that is here, or posts it for one that is to come."""
        with self._lock:
            queue = self._arrived.get(expected.key, ())
            for place, (source, kind, payload, mark, is_counted) in enumerate(queue):
                if expected.wanted in (ANY, source):
                    del queue[place]  # type: ignore[union-attr]
                    if not queue:
                        del self._arrived[expected.key]
                    expected.fill(source, kind, payload, mark)
                    if not is_counted:
                        self._count_taken(source, payload.nbytes)
                    return
            self._posted.setdefault(expected.key, []).append(expected)
            expected.has_asked = False
            held = self._held.pop(expected.key, [])
            asked = next((rank for rank in held if self._asks(expected, rank)), None)
            if asked is not None:
                held.remove(asked)
            if held:
                self._held[expected.key] = held
            self._break_off_if_hopeless(expected)

    def hear_held(self, source: int, key: Key) -> None:
        """Hears that a rank holds a message; asks for it if a receive waits for it."""
        with self._lock:
            self._count_taken(source, 0)  # over MPI, these news have made the first connection
            if not any(self._asks(expected, source) for expected in self._posted.get(key, ())):
                self._held.setdefault(key, []).append(source)

    def _asks(self, expected: Expected, source: int) -> bool:
        """Asks a rank for what it holds, if the receive is for that; returns whether it is."""
        is_open = not (expected.claimed or expected.has_asked or expected.failure)
        if not is_open or expected.wanted not in (ANY, source):
            return False
        expected.has_asked = self._say(source, ASKED, expected.key)
        return expected.has_asked

    def _count_taken(self, source: int, nbytes: int) -> None:
        self._taken[source] += nbytes
        taken = self._taken[source]
        if taken >= memory.CREDIT_BYTES and self._say(source, TAKEN, (0, taken)):
            del self._taken[source]

    def claim(self, source: int, key: Key, dtype: torch.dtype, nbytes: int) -> Expected | None:
        """Returns the receive that waits for this message, if it can use it before its end."""
        with self._lock:
            for expected in self._posted.get(key, ()):
                is_open = not expected.claimed and expected.failure is None
                if expected.wanted in (ANY, source) and is_open:
                    into = expected.into
                    fits = into is not None and (into.dtype, into.nbytes) == (dtype, nbytes)
                    if not (fits or expected.follows):
                        break
                    expected.claimed = True
                    expected.wanted = source
                    return expected
        return None

    def deliver(
        self, source: int, key: Key, kind: int, payload: Tensor, mark: Mark = PASSED
    ) -> None:
        """Gives a message to the first receive that waits for it, or keeps it.

        Args:
            source: the rank that has sent it
            key: its mailbox
            kind: its kind
            payload: what it holds
            mark: a mark behind what has made the payload
        """
        with self._lock:
            posted = self._posted.get(key, [])
            for place, expected in enumerate(posted):
                if expected.wanted in (ANY, source) and expected.failure is None:
                    del posted[place]
                    if not posted:
                        del self._posted[key]
                    expected.fill(source, kind, payload, mark)
                    self._count_taken(source, expected.num_come)
                    return
            is_counted = self.is_old(key[0])  # no receive will take it
            if is_counted:
                self._count_taken(source, payload.nbytes)
            message = source, kind, payload, mark, is_counted
            self._arrived.setdefault(key, deque()).append(message)

    def withdraw(self, expected: Expected) -> bool:
        """Takes a receive back; False if its message has come or is being read into it."""
        with self._lock:
            posted = self._posted.get(expected.key, [])
            if expected.claimed or expected not in posted:
                return False
            posted.remove(expected)
            if not posted:
                del self._posted[expected.key]
            return True

    def break_off(self, failure: PeerLost | None = None, left: int | None = None) -> None:
        """Ends receives that have become hopeless: all, or those that need a rank that left."""
        with self._lock:
            if failure is not None:
                self.failure = failure
                self.num_breaks += 1
            if left is not None:
                self.left.add(left)
            for posted in self._posted.values():
                for expected in posted:
                    self._break_off_if_hopeless(expected)

    def forget_broken(self) -> None:
        """Forgets the receives that were broken off, so that no message fills them."""
        with self._lock:
            for key, posted in list(self._posted.items()):
                posted[:] = [expected for expected in posted if expected.failure is None]
                if not posted:
                    del self._posted[key]

    def go_on(self, is_old: Callable[[int], bool]) -> None:
        """Makes waits work again; drops messages and receives of old channels."""
        with self._lock:
            self.failure, self.is_old = None, is_old
            self.num_breaks += 1
            for key in [key for key in self._arrived if is_old(key[0])]:
                for source, _, payload, _, is_counted in self._arrived.pop(key):
                    if not is_counted:
                        self._count_taken(source, payload.nbytes)
            for table in (self._posted, self._held):
                for key in [key for key in table if is_old(key[0])]:
                    del table[key]

    def _break_off_if_hopeless(self, expected: Expected) -> None:
        missing = expected.missing(self.left)
        if self.failure is not None:
            expected.break_off(self.failure)
        elif missing is not None:
            expected.break_off(PeerLost(missing, "has left (its training is over)"))
