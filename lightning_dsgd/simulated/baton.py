"""The baton: many threads, of which exactly one runs, on virtual time.

**What is guaranteed.**

1. One thread runs, `Baton.running`, from when it is given the baton until it passes it on; all
   others stand at their gates, and the thread that called `Baton.run` at the gate of the end.
2. The next to run is the thread with the smallest clock; ties go by rank, then by age.  What is
   planned for a time happens before any thread of that time runs.  So virtual time never runs
   backwards, and the order depends on nothing but the clocks.
3. Everything here and in the modules above belongs to the holder of the baton, and needs no other
   lock: what one holder has written, the next one reads.
4. No turn is lost, and none is given twice.
5. When every thread waits and nothing is planned, this is noticed at once: `_resolve_standstill`.

**Why the locks are right.**  A gate is a `threading.Lock` that is held as long as it is not its
thread's turn.  To pass the baton is

    self.running = following
    following.gate.release()
    me.gate.acquire()

- A `Lock` belongs to no thread: another one may release it than has acquired it.  So it serves as a
  signal that can be sent once and is remembered.
- It is remembered: between these last two lines the following thread may already run, come to its
  own end of the turn, and pass the baton back.  My gate is then released before I stand at it, and
  `acquire` returns at once.  With a `Condition` this signal would be lost.
- It cannot be sent twice.  Only the holder of the baton releases a gate, and after it has released
  X's, X is the holder.  X passes the baton on only after it has acquired its own gate.  So releases
  and acquires of a gate take turns; if they did not, `release` would raise.
- For a moment two threads run: one has released another's gate and has not reached its own.  It
  touches nothing in between, for the baton is no longer its own.
- Releasing and acquiring a lock order memory, which gives 3.

One event for each thread would need to be cleared, and clearing races with a signal that comes
early; one condition for all would wake 1,024 threads for each turn.

A new thread begins at its gate, and the last one to end releases the gate of the end.  A signal
(Ctrl-C) interrupts the thread that called `run`, which holds no baton: it leaves a note,
`_interrupted`, that the next hand-over reads.  That one thread sets it and another reads it without
a lock relies on the interpreter's lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any

from lightning_dsgd.transport.contract import Deadlock, LaneStopped, Timeout, TransportError

STACK_BYTES = 1 << 20
"""The stack of a thread: as little as torch needs, for 1,024 ranks and their lanes."""

LONGEST_LIST = 40
"""How many lines of a table an error shows."""


class Killed(BaseException):
    """Ends the threads of a rank that a scripted fault kills; no `except Exception` catches it."""


class Awaited:
    """Something that a thread can wait for.

    `at_s` is when it is there, infinite as long as nobody knows.
    """

    at_s = math.inf
    waiter: Thread | None = None
    needs_others = True
    """Whether the loss of a rank ends the wait."""

    def in_words(self) -> str:
        """Says in words, for errors, what is waited for."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises if a thread may wait no longer, as a rank is lost."""

    def why_never(self) -> BaseException | None:
        """Returns why it will not come, if that is known once nothing is under way any more."""
        return None


class Thread(Awaited):
    """A rank's training thread (`age` 0) or one of its lanes; awaited by whoever joins it."""

    needs_others = False

    def __init__(self, rank: int, path: str, age: int, clock: float) -> None:
        self.rank = rank
        self.name = path.strip("/")
        self.age = age
        self.clock = clock
        self.gate = threading.Lock()
        self.gate.acquire()
        self.waits_for: Awaited | None = None
        self.since = clock
        self.deadline = math.inf
        self.held_until = 0.0
        self.turn = 0
        """Counts how often the thread was put on the agenda; older entries no longer hold."""
        self.error: BaseException | None = None
        """Raised in the thread, once."""
        self.doom: BaseException | None = None
        """Raised in the thread out of this wait and all that follow."""
        self.result: Any = None
        self.failure: BaseException | None = None
        self.failure_told = False
        self.ended = False
        self.python_thread: threading.Thread

    def in_words(self) -> str:
        """Says in words what a thread waits for that joins this one."""
        return f"the end of its lane {self.name}"

    def who(self) -> str:
        """Names the thread, for a table of threads."""
        return f"rank {self.rank}" + (f", lane {self.name}," if self.age else "")

    def what_of(self) -> str:
        """Says in words what the thread does."""
        if self.waits_for is None:
            return "is running"
        return f"waits since {self.since:.9g} s for {self.waits_for.in_words()}"


_Entry = tuple[float, int, int, int, Any]
"""An entry of an agenda: when, then what decides between equals.  For a thread: its rank, age and
turn, and itself.  For anything else: -1, a running number, 0, and a function.  So a message
precedes the thread that looks for it."""


class Baton:
    """The threads, who runs, and what will happen when.

    Args:
        num_ranks: P
    """

    running: Thread
    """The holder of the baton."""

    def __init__(self, num_ranks: int) -> None:
        self.time = 0.0
        self.threads: list[list[Thread]] = [[] for _ in range(num_ranks)]
        """For each rank: the training thread, then its lanes, by age."""
        self._numbers = count()
        self._agenda: list[_Entry] = []
        self._idle_agenda: list[_Entry] = []
        """What does not keep the world going: faults and default timeouts."""
        self._finished = threading.Lock()  # the gate of the end
        self._finished.acquire()
        self._interrupted = False

    # ---- by the thread that calls `run` ----

    def run(self, start_all: Callable[[], None]) -> None:
        """Runs the threads that `start_all` starts, and those they start, until all end."""
        begun = False
        try:
            start_all()
            begun = True
            self._hand_over()
            # A signal that comes just before the thread sleeps does not wake it.
            while not self._finished.acquire(timeout=0.5):
                pass
        except BaseException:  # Ctrl-C, a test's timeout, or no more threads to be had
            self._interrupted = True
            if not begun:
                self._hand_over()
            # Bounded: the thread that runs may stand in a wait that is not the transport's.
            if self._finished.acquire(timeout=5.0):
                self._join_threads()
            raise
        self._join_threads()

    def _join_threads(self) -> None:
        for thread in self.all_threads():
            thread.python_thread.join()

    # ---- by the holder of the baton ----

    def start(
        self, rank: int, path: str, body: Callable[[Thread], None], at_s: float = 0.0
    ) -> Thread:
        """Starts a thread that runs `body`, which must not raise, once it has the baton.

        A rank's first thread begins at `at_s`; its others begin at the time of their start.
        """
        siblings = self.threads[rank]
        thread = Thread(rank, path, len(siblings), self.running.clock if siblings else at_s)
        thread.python_thread = threading.Thread(
            target=self._run_thread, args=(thread, body), name=f"rank-{rank}{path}", daemon=True
        )
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread.python_thread.start()
        finally:
            threading.stack_size(previous)
        siblings.append(thread)
        self._schedule(thread, thread.clock)
        return thread

    def end(self, thread: Thread) -> None:
        """Notes that a thread is about to return from its body: wakes whoever waits for that."""
        thread.ended = True
        thread.turn += 1
        self.ready(thread, thread.clock)

    def all_threads(self) -> Iterator[Thread]:
        """Returns the threads of all ranks."""
        return (thread for threads in self.threads for thread in threads)

    def sleep(self, seconds: float) -> None:
        """Moves the running thread's clock on by so many seconds."""
        me = self.running
        self._schedule(me, me.clock + seconds)
        self._pass_baton(me)

    def wait(self, what: Awaited, timeout_s: float | None, default_s: float) -> None:
        """Blocks the running thread until `what` is there.

        Args:
            what: to wait for
            timeout_s: for how long at most; a time-out keeps the world going
            default_s: the same where `timeout_s` is None, but does not keep the world going
        """
        me = self.running
        agenda = self._idle_agenda if timeout_s is None else self._agenda
        limit = default_s if timeout_s is None else timeout_s
        me.since, me.deadline = me.clock, me.clock + limit
        if what.waiter is not None:
            raise TransportError(
                f"two threads of rank {me.rank} wait for the same thing: {what.in_words()}"
            )
        what.waiter, me.waits_for = me, what
        try:
            while True:
                if me.doom is not None:
                    raise me.doom
                if what.at_s <= me.clock:
                    return
                what.check()
                if me.clock >= me.deadline:
                    raise Timeout(f"rank {me.rank} has waited {limit:g} s for {what.in_words()}")
                if what.at_s < math.inf and what.at_s <= me.deadline:
                    self._schedule(me, what.at_s)
                else:
                    me.turn += 1
                    if me.deadline < math.inf:
                        heappush(agenda, (me.deadline, me.rank, me.age, me.turn, me))
                self._pass_baton(me)
        finally:
            what.waiter, me.waits_for = None, None

    def ready(self, what: Awaited, at_s: float) -> None:
        """Notes when `what` is there, and wakes its waiter then."""
        what.at_s = at_s
        waiter = what.waiter
        if waiter is not None and at_s <= waiter.deadline:
            self._schedule(waiter, max(waiter.clock, at_s))

    def plan(self, at_s: float, action: Callable[[], None]) -> None:
        """Calls `action` at that time, and keeps the world going until then."""
        self._put(self._agenda, at_s, action)

    def plan_idle(self, at_s: float, action: Callable[[], None]) -> None:
        """Calls `action` at that time, if the world goes on until then."""
        self._put(self._idle_agenda, at_s, action)

    def stop(self, lane: Thread) -> None:
        """Makes the lane's next wait, or the one that it is in, raise `LaneStopped`."""
        if not lane.ended and lane.doom is None:
            lane.doom = LaneStopped(f"lane {lane.name} of rank {lane.rank}")
            if lane.waits_for is not None and lane is not self.running:
                self.rouse(lane)

    def doom(self, threads: list[Thread], reason: str) -> None:
        """Ends these threads, wherever they are."""
        for thread in threads:
            if not thread.ended:
                thread.doom = Killed(reason)
                self._schedule(thread, self.time)

    def delay(self, rank: int, seconds: float) -> None:
        """Moves the clocks of the rank's threads on by so many seconds."""
        for thread in self.threads[rank]:
            thread.clock = max(thread.clock, self.time) + seconds
            thread.held_until = max(thread.held_until, self.time) + seconds

    def rouse(self, thread: Thread) -> None:
        """Takes a thread out of its wait, even if what it waits for is about to come."""
        self._schedule(thread, max(self.time, thread.held_until))

    # ---- the hand-over ----

    def _put(self, agenda: list[_Entry], at_s: float, action: Callable[[], None]) -> None:
        heappush(agenda, (at_s, -1, next(self._numbers), 0, action))

    def _schedule(self, thread: Thread, at_s: float) -> None:
        thread.turn += 1
        thread.clock = at_s
        heappush(self._agenda, (at_s, thread.rank, thread.age, thread.turn, thread))

    def _run_thread(self, thread: Thread, body: Callable[[Thread], None]) -> None:
        thread.gate.acquire()
        body(thread)
        self._hand_over()

    def _pass_baton(self, me: Thread) -> None:
        """Lets other threads run until it is this thread's turn again."""
        following = self._next()
        assert following is not None, "this thread is on the agenda, or waits"
        if following is not me:
            self.running = following
            following.gate.release()
            me.gate.acquire()
        if me.doom is not None:
            raise me.doom
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def _hand_over(self) -> None:
        """Passes the baton on, for a thread that will not run again."""
        following = self._next()
        if following is None:
            self._finished.release()
        else:
            self.running = following
            following.gate.release()

    def _next(self) -> Thread | None:
        """Returns whose turn it is, after all that happens before; None when all have ended."""
        agenda, idle_agenda = self._agenda, self._idle_agenda
        while True:
            if self._interrupted:
                self._interrupted = False
                self.doom(list(self.all_threads()), "the run was interrupted")
            while agenda and agenda[0][1] >= 0 and agenda[0][4].turn != agenda[0][3]:
                heappop(agenda)
            if not agenda:
                if self._resolve_standstill():
                    continue
                return None
            first = idle_agenda if idle_agenda and idle_agenda[0] < agenda[0] else agenda
            at_s, rank, age, turn, what = heappop(first)
            if rank < 0:
                self.time = at_s
                what()
            elif what.turn == turn:
                if what.clock <= at_s:
                    self.time = what.clock = at_s
                    thread: Thread = what
                    return thread
                heappush(agenda, (what.clock, rank, age, turn, what))  # delayed meanwhile

    def _resolve_standstill(self) -> bool:
        """Raises what must be raised in threads that all wait while nothing is under way."""
        blocked = [thread for thread in self.all_threads() if thread.waits_for is not None]
        for thread in blocked:
            error = thread.waits_for.why_never() if thread.waits_for is not None else None
            if error is not None:
                thread.error = error
                self.rouse(thread)
        if self._agenda:
            return True
        table = shortened([f"{thread.who()} {thread.what_of()}" for thread in blocked])
        for thread in blocked:
            thread.error = Deadlock(f"every rank waits for another:\n{table}")
            self.rouse(thread)
        return bool(blocked)


def shortened(lines: list[str]) -> str:
    """Returns a table that is not longer than an error should be."""
    rest = [f"... and {len(lines) - LONGEST_LIST} more"] if len(lines) > LONGEST_LIST else []
    return "\n".join(f"  {line}" for line in lines[:LONGEST_LIST] + rest)
