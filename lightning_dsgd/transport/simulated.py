"""P ranks in one process on a virtual clock: every run is equal to the bit, and no wait is real.

    world = SimulatedWorld(world_size=8, latency_s=1e-5, bandwidth_bytes_s=1e9)
    results = world.run(fn, *args)        # fn(net, *args) on every rank

Ranks and lanes are threads with a clock each, and only the holder of the baton runs.  Whoever
computes, waits or polls passes the baton to the thread with the smallest clock (ties: by rank,
then by age), so that virtual time never runs backwards and nothing depends on the machine.  A
thread that waits for another by other means than the transport (a lock, an event) keeps the baton,
and the world stands still.

What a message of b bytes costs, with s its sender, d its receiver:

    start   = max(clock of s, egress_free[s])            egress_free[s]  <- start + b / bandwidth
    arrival = max(start + latency, ingress_free[d])      ingress_free[d] <- arrival
              + b / bandwidth

so that each rank sends one message at a time and receives one at a time, both at once (a
full-duplex link), in the order in which messages reach it.  With `shared_link` all ranks have one
link between them, which carries one message at a time.  Sending takes none of the sender's time:
its Work is done at once, and the tensor is copied even where the caller would leave it alone.

Faults (`kill`, `delay`, `drop`) strike at a virtual time that is set before the run.  They and
default timeouts do not keep the world going: when every thread waits and nothing is under way,
`Deadlock` is raised at once, with a table of who waits for what.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.transport import (
    ANY,
    Counters,
    Deadlock,
    Lane,
    LaneStopped,
    PeerLost,
    Receipt,
    Timeout,
    TransportError,
    Work,
)
from lightning_dsgd.transport.endpoint import Done, Endpoint, check_message, describe

R = TypeVar("R")

POLL_S = 1e-6
"""What a look at an unfinished receive costs, so that loops that poll move on in virtual time."""

STACK_BYTES = 1 << 20
"""Of each thread: as little as torch needs, for 1,024 ranks and their lanes."""

LONGEST_LIST = 40
"""How many lines of a table an error shows."""


class RankFailed(RuntimeError):
    """A rank of a simulated world failed; its own exception is the cause of this one."""


class Killed(BaseException):
    """Ends the threads of a rank that a scripted fault kills; no `except Exception` catches it."""


class SimulatedWorld:
    """P ranks on a virtual clock.

    Args:
        world_size: P
        latency_s: from the end of a message's departure to its arrival
        bandwidth_bytes_s: of each link, in each direction
        shared_link: all ranks share one link, in place of one each
        timeout_s: how long a wait may take, in virtual time
        size_scale: multiplies the bytes of each message, in its cost and where bytes are counted,
            so that small tensors can stand for large ones
        message_bytes: gives the bytes of each message in place of that, where some messages stand
            for larger ones and others do not
        detect_s: how long after a rank's end the others know of it
        heartbeat_timeout_s: how long after a rank's last sign of life the others give it up
        strict: a run that leaves messages that nobody received has failed
    """

    undelivered: list[str]
    """The messages of the last run that nobody received, in words."""

    def __init__(
        self,
        world_size: int,
        latency_s: float = 0.0,
        bandwidth_bytes_s: float = math.inf,
        shared_link: bool = False,
        timeout_s: float = 1800.0,
        size_scale: float = 1.0,
        message_bytes: Callable[[Tensor], float] | None = None,
        detect_s: float = 0.01,
        heartbeat_timeout_s: float = 20.0,
        strict: bool = True,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if latency_s < 0 or bandwidth_bytes_s <= 0 or size_scale <= 0:
            raise ValueError(
                f"latency_s must not be negative, bandwidth_bytes_s and size_scale must be "
                f"positive, got latency_s={latency_s}, bandwidth_bytes_s={bandwidth_bytes_s} and "
                f"size_scale={size_scale}"
            )
        self.world_size = world_size
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.shared_link = shared_link
        self.timeout_s = timeout_s
        self.message_bytes = message_bytes or (lambda x: x.nbytes * size_scale)
        self.detect_s = detect_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.strict = strict
        self.undelivered = []
        self._faults: list[tuple[float, Callable[[_Simulation], None]]] = []

    def kill(self, rank: int, at_s: float) -> None:
        """All of the rank's threads end; the others know `detect_s` later."""
        self._script(rank, at_s, lambda simulation: simulation.kill(rank))

    def delay(self, rank: int, at_s: float, seconds: float) -> None:
        """The rank's clocks jump by so much."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards, got seconds={seconds}")
        self._script(rank, at_s, lambda simulation: simulation.delay(rank, seconds))

    def drop(self, rank: int, at_s: float) -> None:
        """What is on its way to and from the rank vanishes, now and later.

        After `heartbeat_timeout_s` the others have lost it, and it has lost the others.
        """
        self._script(rank, at_s, lambda simulation: simulation.drop(rank))

    def run(self, fn: Callable[..., R], *args: Any) -> list[R]:
        """What `fn(net, *args)` returned on each rank; every run starts at 0 s, its faults ahead.

        Raises:
            RankFailed: from the first failure that is not the loss of another rank
            TransportError: for messages that nobody received, if `strict`
        """
        simulation = _Simulation(self)
        outcomes = self._outcomes(simulation, fn, args)
        failed = [rank for rank, o in enumerate(outcomes) if isinstance(o, BaseException)]
        if failed:
            rank, at_s, error = min(
                simulation.failures, key=lambda failure: isinstance(failure[2], PeerLost)
            )
            others = f" (and {len(failed) - 1} more of {self.world_size})" if failed[1:] else ""
            raise RankFailed(
                f"rank {rank} failed at {at_s:.9g} s{others}: {type(error).__name__}: {error}"
            ) from error
        if self.strict and self.undelivered:
            raise TransportError(
                f"messages that nobody received, {len(self.undelivered)} in all:\n"
                + _shortened(self.undelivered)
            )
        return outcomes

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Like `run`, but gives the exception of each rank that failed in place of its result."""
        return self._outcomes(_Simulation(self), fn, args)

    def _outcomes(
        self, simulation: _Simulation, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        # Ranks take turns, so a pool of workers for each thread would be idle but for its own rank,
        # and how sums are split would depend on the machine.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return simulation.run(self._faults, fn, args)
        finally:
            torch.set_num_threads(num_threads)
            self.undelivered = simulation.undelivered()

    def _script(self, rank: int, at_s: float, fault: Callable[[_Simulation], None]) -> None:
        if not 0 <= rank < self.world_size or at_s < 0:
            raise ValueError(
                f"a fault strikes a rank of 0 to {self.world_size - 1} at 0 s or later, "
                f"got rank={rank} and at_s={at_s}"
            )
        self._faults.append((at_s, fault))


class SimulatedTransport(Endpoint):
    """One rank's end of a simulated network."""

    def __init__(
        self, simulation: _Simulation, rank: int, counters: Counters, path: str = ""
    ) -> None:
        world = simulation.world
        super().__init__(rank, world.world_size, world.timeout_s, counters, path)
        self._simulation = simulation

    def compute(self, seconds: float) -> None:
        """Takes so much of this thread's time."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards, got seconds={seconds}")
        self._simulation.sleep(seconds)

    def now(self) -> float:
        return self._simulation.running.clock

    def check(self) -> None:
        self._simulation.check(self.rank, "a check between two steps")

    def sub(self, name: str) -> SimulatedTransport:
        return SimulatedTransport(self._simulation, self.rank, self.counters, f"{self.path}/{name}")

    def _post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        self._simulation.send(self, x, dst, channel, tag, kind)
        return Done(None)

    def _collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> Receipt:
        return _Receipt(self, self._simulation, like, src, channel, tag, kind, into)

    def _start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        net = SimulatedTransport(self._simulation, self.rank, self.counters, name)
        return _Lane(net, self, self._simulation, self._simulation.launch(net, fn))


class _Awaited:
    """What a thread can wait for.

    `at_s` is when it is there, infinite as long as nobody knows.
    """

    at_s = math.inf
    waiter: _Thread | None = None
    needs_others = True

    def in_words(self) -> str:
        raise NotImplementedError


class _Thread(_Awaited):
    """A rank's training thread (`age` 0) or one of its lanes; awaited by whoever joins it."""

    needs_others = False

    def __init__(self, net: SimulatedTransport, age: int, clock: float) -> None:
        self.net = net
        self.rank = net.rank
        self.age = age
        self.clock = clock
        self.gate = threading.Lock()
        self.gate.acquire()
        self.waits_for: _Awaited | None = None
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
        return f"the end of its lane {self.name}"

    @property
    def name(self) -> str:
        return self.net.path.strip("/")


@dataclass(eq=False)
class _Message:
    number: int
    payload: Tensor
    src: int
    dst: int
    channel: int
    tag: int
    kind: int
    path: str
    start_s: float
    transfer_s: float = 0.0
    at_s: float = math.inf


class _Receipt(_Awaited):
    """A receive under way, bound to its message as soon as that reaches this rank."""

    source: int

    def __init__(
        self,
        net: SimulatedTransport,
        simulation: _Simulation,
        like: Tensor,
        src: int,
        channel: int,
        tag: int,
        kind: int,
        into: Tensor | None,
    ) -> None:
        self.src = src
        self.box = net.rank, channel, tag
        self.number = 0
        self.message: _Message | None = None
        self._net = net
        self._simulation = simulation
        self._like = like
        self._tag = tag
        self._kind = kind
        self._into = into
        self._begin = simulation.running.clock
        self._result: Tensor | None = None
        self._error: TransportError | None = None
        self._expected = False
        self._expect()

    def in_words(self) -> str:
        return describe(self._net.path, self.src, self._tag, self._kind)

    def done(self) -> bool:
        if self._result is not None or self._error is not None:
            return True
        self._expect()
        self._simulation.sleep(POLL_S)
        return self.at_s <= self._simulation.running.clock or self._simulation.has_lost

    def wait(self, timeout_s: float | None = None) -> Tensor:
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._expect()
            try:
                self._simulation.wait(self, timeout_s, self._net)
            except Timeout:
                # Whoever gives up on this receive must not lose a message to it.
                self._expected = False
                self._simulation.withdraw(self)
                raise
            self._result = self._take()
        return self._result

    def _expect(self) -> None:
        if not self._expected:
            self._expected = True
            self._simulation.expect(self)

    def _take(self) -> Tensor:
        message = self.message
        assert message is not None
        self._net.counters.comm_s += max(0.0, message.at_s - self._begin)
        self._simulation.taken(message)
        self.source, x = message.src, message.payload
        try:
            check_message(
                self._like, self._into, x.dtype, len(x), message.src, (message.kind, self._kind)
            )
        except TransportError as error:
            self._error = error
            raise
        if self._into is not None:
            return self._into.copy_(x)
        return x.to(self._like.device)


class _Lane:
    def __init__(
        self,
        net: SimulatedTransport,
        parent: SimulatedTransport,
        simulation: _Simulation,
        thread: _Thread,
    ) -> None:
        self.net = net
        self._parent = parent
        self._simulation = simulation
        self._thread = thread

    def stop(self, timeout_s: float | None = None) -> None:
        self._simulation.stop(self._thread)
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        self._simulation.wait(self._thread, timeout_s, self._parent)
        self.check()

    def check(self) -> None:
        if self._thread.failure is not None:
            self._thread.failure_told = True
            raise self._thread.failure


_Box = tuple[int, int, int]
"""Receiver, channel and tag: what a message and its receive have in common, but for the sender."""

_Entry = tuple[float, int, int, int, Any]
"""Of an agenda: when, then what decides between equals.  A thread: its rank, age, turn, itself.
Anything else: -1, a running number, 0, a function.  So messages precede who looks for them."""


class _Simulation:
    """One run: the threads, the baton, what will happen when, and the links."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.running: _Thread
        self.failures: list[tuple[int, float, BaseException]] = []
        self._time = 0.0
        self._threads: list[list[_Thread]] = [[] for _ in range(world.world_size)]
        self._num_training = world.world_size
        self._numbers = count()
        self._agenda: list[_Entry] = []
        self._idle_agenda: list[_Entry] = []
        """What does not keep the world going: faults and default timeouts."""
        self._finished = threading.Lock()
        self._finished.acquire()
        self._interrupted = False
        self._lost: tuple[int, str, BaseException | None] | None = None
        self._killed_at: dict[int, float] = {}
        self._dropped: set[int] = set()
        links = 1 if world.shared_link else world.world_size
        self._egress_free = [0.0] * links
        self._ingress_free = [0.0] * world.world_size
        self._under_way: dict[int, _Message] = {}
        self._arrived: dict[_Box, dict[int, deque[_Message]]] = {}
        self._expected: dict[tuple[_Box, int], deque[_Receipt]] = {}

    def run(
        self,
        faults: list[tuple[float, Callable[[_Simulation], None]]],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> list[Any]:
        for at_s, fault in faults:
            self._plan(self._idle_agenda, at_s, partial(fault, self))
        begun = False
        try:
            for rank in range(self.world.world_size):
                self.launch(SimulatedTransport(self, rank, Counters()), fn, *args)
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
        return [self._outcome(rank) for rank in range(self.world.world_size)]

    def undelivered(self) -> list[str]:
        return [
            f"rank {m.dst} never took {describe(m.path, m.src, m.tag, m.kind)}, {len(m.payload)} "
            f"elements of {m.payload.dtype}, sent at {m.start_s:.9g} s"
            for m in self._under_way.values()
        ]

    # The threads and the baton

    def launch(self, net: SimulatedTransport, fn: Callable[..., Any], *args: Any) -> _Thread:
        """A thread that runs `fn` as soon as the baton comes to it."""
        siblings = self._threads[net.rank]
        thread = _Thread(net, len(siblings), self.running.clock if siblings else 0.0)
        thread.python_thread = threading.Thread(
            target=self._run_thread,
            args=(thread, fn, args),
            name=f"rank-{net.rank}{net.path}",
            daemon=True,
        )
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread.python_thread.start()
        finally:
            threading.stack_size(previous)
        siblings.append(thread)
        self._schedule(thread, thread.clock)
        return thread

    def sleep(self, seconds: float) -> None:
        """Moves the running thread's clock."""
        me = self.running
        self._schedule(me, me.clock + seconds)
        self._pass_baton(me)

    def wait(self, what: _Awaited, timeout_s: float | None, net: SimulatedTransport) -> None:
        """Blocks the running thread until `what` is there."""
        me = self.running
        agenda = self._idle_agenda if timeout_s is None else self._agenda
        timeout_s = net.timeout_s if timeout_s is None else timeout_s
        me.since, me.deadline = me.clock, me.clock + timeout_s
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
                if what.needs_others:
                    self.check(me.rank, what.in_words())
                if me.clock >= me.deadline:
                    raise Timeout(
                        f"rank {me.rank} has waited {timeout_s:g} s for {what.in_words()}"
                    )
                if what.at_s < math.inf and what.at_s <= me.deadline:
                    self._schedule(me, what.at_s)
                else:
                    me.turn += 1
                    if me.deadline < math.inf:
                        heappush(agenda, (me.deadline, me.rank, me.age, me.turn, me))
                self._pass_baton(me)
        finally:
            what.waiter, me.waits_for = None, None
            if me.age == 0:
                net.counters.wait_s += me.clock - me.since

    def stop(self, lane: _Thread) -> None:
        """Lets the lane's next wait, or the one that it is in, raise `LaneStopped`."""
        if not lane.ended and lane.doom is None:
            lane.doom = LaneStopped(f"lane {lane.name} of rank {lane.rank}")
            if lane.waits_for is not None and lane is not self.running:
                self._rouse(lane)

    @property
    def has_lost(self) -> bool:
        return self._lost is not None

    def check(self, rank: int, waited_for: str) -> None:
        """Raises `PeerLost` on this rank, if a rank is lost."""
        if self._lost is not None:
            lost, reason, cause = self._lost
            if lost == rank and lost in self._dropped and self.world.world_size > 1:
                lost = 0 if rank else 1  # whoever is cut off has lost the others
            raise PeerLost(lost, reason, waited_for) from cause

    def _run_thread(self, thread: _Thread, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        thread.gate.acquire()
        try:
            if thread.doom is not None:
                raise thread.doom
            thread.result = fn(thread.net, *args)
        except BaseException as error:
            if not (isinstance(error, LaneStopped) and error is thread.doom):
                thread.failure = error
        self._end(thread)
        self._hand_over()

    def _end(self, thread: _Thread) -> None:
        thread.ended = True
        thread.turn += 1
        self._ready(thread, thread.clock)
        if thread.failure is not None:
            self._fail(thread, thread.failure)
        if thread.age == 0:
            self._num_training -= 1
            if self._num_training == 0:
                self._stop_stray_lanes()

    def _fail(self, thread: _Thread, error: BaseException) -> None:
        self.failures.append((thread.rank, thread.clock, error))
        if thread.age == 0:
            for lane in self._threads[thread.rank]:
                self.stop(lane)
        if self._lost is None and not isinstance(error, Killed):
            reason = f"failed: {type(error).__name__}: {error}"
            self._plan(
                self._agenda,
                thread.clock + self.world.detect_s,
                partial(self._lose, thread.rank, reason, error),
            )

    def _stop_stray_lanes(self) -> None:
        for training, *lanes in self._threads:
            strays = [lane for lane in lanes if not lane.ended and lane.doom is None]
            if strays and training.failure is None:
                what = "\n".join(f"  {lane.name}: {_what_of(lane)}" for lane in strays)
                training.failure = TransportError(
                    f"rank {training.rank} returned without stopping its lanes:\n{what}"
                )
                self.failures.append((training.rank, training.clock, training.failure))
            for lane in strays:
                self.stop(lane)

    def _outcome(self, rank: int) -> Any:
        training, *lanes = self._threads[rank]
        if training.failure is not None:
            return training.failure
        for lane in lanes:
            if lane.failure is not None and not lane.failure_told:
                return lane.failure
        return training.result

    def _join_threads(self) -> None:
        for thread in self._all_threads():
            thread.python_thread.join()

    def _all_threads(self) -> Iterator[_Thread]:
        return (thread for threads in self._threads for thread in threads)

    def _schedule(self, thread: _Thread, at_s: float) -> None:
        thread.turn += 1
        thread.clock = at_s
        heappush(self._agenda, (at_s, thread.rank, thread.age, thread.turn, thread))

    def _rouse(self, thread: _Thread) -> None:
        """Takes a thread out of its wait, even if what it waits for is about to come."""
        self._schedule(thread, max(self._time, thread.held_until))

    def _plan(self, agenda: list[_Entry], at_s: float, action: Callable[[], None]) -> None:
        heappush(agenda, (at_s, -1, next(self._numbers), 0, action))

    def _ready(self, what: _Awaited, at_s: float) -> None:
        what.at_s = at_s
        waiter = what.waiter
        if waiter is not None and at_s <= waiter.deadline:
            self._schedule(waiter, max(waiter.clock, at_s))

    def _pass_baton(self, me: _Thread) -> None:
        """Lets others run until it is this thread's turn again."""
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
        """Like `_pass_baton`, for a thread that will not run again."""
        following = self._next()
        if following is None:
            self._finished.release()
        else:
            self.running = following
            following.gate.release()

    def _next(self) -> _Thread | None:
        """Whose turn it is, after all that happens before; None when all threads have ended."""
        agenda, idle_agenda = self._agenda, self._idle_agenda
        while True:
            if self._interrupted:
                self._interrupted = False
                self._doom(list(self._all_threads()), "the run was interrupted")
            while agenda and agenda[0][1] >= 0 and agenda[0][4].turn != agenda[0][3]:
                heappop(agenda)
            if not agenda:
                if self._resolve_standstill():
                    continue
                return None
            first = idle_agenda if idle_agenda and idle_agenda[0] < agenda[0] else agenda
            at_s, rank, age, turn, what = heappop(first)
            if rank < 0:
                self._time = at_s
                what()
            elif what.turn == turn:
                if what.clock <= at_s:
                    self._time = what.clock = at_s
                    thread: _Thread = what
                    return thread
                heappush(agenda, (what.clock, rank, age, turn, what))  # delayed meanwhile

    def _resolve_standstill(self) -> bool:
        """Every thread waits, and nothing is under way: raises what must be raised in them."""
        blocked = [thread for thread in self._all_threads() if thread.waits_for is not None]
        for thread in blocked:
            what = thread.waits_for
            if isinstance(what, _Receipt) and what.src != ANY:
                training = self._threads[what.src][0]
                if training.ended:
                    reason = f"has left (it returned at {training.clock:.9g} s)"
                    thread.error = PeerLost(what.src, reason, what.in_words())
                    self._rouse(thread)
        if self._agenda:
            return True
        table = _shortened([f"{_who(thread)} {_what_of(thread)}" for thread in blocked])
        for thread in blocked:
            thread.error = Deadlock(f"every rank waits for another:\n{table}")
            self._rouse(thread)
        return bool(blocked)

    # Faults

    def kill(self, rank: int) -> None:
        if not self._threads[rank][0].ended:
            self._killed_at[rank] = self._time
            reason = f"was killed at {self._time:.9g} s"
            self._doom(self._threads[rank], f"rank {rank} {reason}")
            self._plan(
                self._agenda,
                self._time + self.world.detect_s,
                partial(self._lose, rank, reason, None),
            )

    def delay(self, rank: int, seconds: float) -> None:
        for thread in self._threads[rank]:
            thread.clock = max(thread.clock, self._time) + seconds
            thread.held_until = max(thread.held_until, self._time) + seconds

    def drop(self, rank: int) -> None:
        self._dropped.add(rank)
        timeout_s = self.world.heartbeat_timeout_s
        self._plan(
            self._agenda,
            self._time + timeout_s,
            partial(self._lose, rank, f"stopped answering: not heard of for {timeout_s:g} s", None),
        )

    def _doom(self, threads: list[_Thread], reason: str) -> None:
        for thread in threads:
            if not thread.ended:
                thread.doom = Killed(reason)
                self._schedule(thread, self._time)

    def _lose(self, rank: int, reason: str, cause: BaseException | None) -> None:
        if self._lost is None:
            self._lost = rank, reason, cause
            for thread in self._all_threads():
                if thread.waits_for is not None and thread.waits_for.needs_others:
                    self._rouse(thread)

    # The links

    def send(
        self, net: SimulatedTransport, x: Tensor, dst: int, channel: int, tag: int, kind: int
    ) -> None:
        """Puts a copy of `x` on its way."""
        self.check(net.rank, f"sending to rank {dst}")
        world, clock = self.world, self.running.clock
        message = _Message(
            number=next(self._numbers),
            payload=x.detach().clone(),
            src=net.rank,
            dst=dst,
            channel=channel,
            tag=tag,
            kind=kind,
            path=net.path,
            start_s=clock,
        )
        self._under_way[message.number] = message
        if dst == net.rank:  # between the threads of one rank there is no link
            message.at_s = clock
            self._offer(message)
            return
        num_bytes = round(world.message_bytes(x))
        net.counters.bytes_sent += num_bytes
        net.counters.messages_sent += 1
        link = 0 if world.shared_link else net.rank
        message.transfer_s = transfer_s = num_bytes / world.bandwidth_bytes_s
        message.start_s = start_s = max(clock, self._egress_free[link])
        self._egress_free[link] = start_s + transfer_s
        there_s = start_s + world.latency_s + (transfer_s if world.shared_link else 0.0)
        if there_s <= clock:
            self._deliver(clock, message)
        else:
            self._plan(self._agenda, there_s, partial(self._deliver, there_s, message))

    def _deliver(self, there_s: float, message: _Message) -> None:
        """The message reaches the receiver's link, which takes one at a time."""
        src, dst = message.src, message.dst
        if (
            src in self._dropped
            or dst in self._dropped
            or message.start_s > self._killed_at.get(src, math.inf)
        ):
            del self._under_way[message.number]
            return
        if self.world.shared_link:
            message.at_s = there_s
        else:
            message.at_s = max(there_s, self._ingress_free[dst]) + message.transfer_s
            self._ingress_free[dst] = message.at_s
        self._offer(message)

    def _offer(self, message: _Message, *, first: bool = False) -> None:
        """Binds the message to the first receipt that matches, or keeps it for the next."""
        box = message.dst, message.channel, message.tag
        matching = [
            self._expected[box, src][0]
            for src in (message.src, ANY)
            if (box, src) in self._expected
        ]
        if matching:
            receipt = min(matching, key=lambda receipt: receipt.number)
            self._forget(receipt)
            receipt.message = message
            self._ready(receipt, message.at_s)
            return
        queue = self._arrived.setdefault(box, {}).setdefault(message.src, deque())
        queue.insert(0 if first else len(queue), message)

    def expect(self, receipt: _Receipt) -> None:
        """Binds the receipt to the first message that matches, or to the next."""
        box, src = receipt.box, receipt.src
        senders = self._arrived.get(box, {})
        if src == ANY and senders:
            src = min(senders, key=lambda sender: _place(senders[sender][0]))
        if src not in senders:
            receipt.number = next(self._numbers)
            self._expected.setdefault((box, src), deque()).append(receipt)
            return
        receipt.message = senders[src].popleft()
        receipt.at_s = receipt.message.at_s
        if not senders[src]:
            del senders[src]
            if not senders:
                del self._arrived[box]

    def withdraw(self, receipt: _Receipt) -> None:
        """Undoes `expect`."""
        message, receipt.message, receipt.at_s = receipt.message, None, math.inf
        if message is None:
            self._forget(receipt)
        else:  # it would come too late
            self._offer(message, first=True)

    def _forget(self, receipt: _Receipt) -> None:
        queue = self._expected[receipt.box, receipt.src]
        queue.remove(receipt)
        if not queue:
            del self._expected[receipt.box, receipt.src]

    def taken(self, message: _Message) -> None:
        del self._under_way[message.number]


def _place(message: _Message) -> tuple[float, int]:
    return message.at_s, message.number


def _who(thread: _Thread) -> str:
    return f"rank {thread.rank}" + (f", lane {thread.name}," if thread.age else "")


def _what_of(thread: _Thread) -> str:
    if thread.waits_for is None:
        return "is running"
    return f"waits since {thread.since:.9g} s for {thread.waits_for.in_words()}"


def _shortened(lines: list[str]) -> str:
    rest = [f"... and {len(lines) - LONGEST_LIST} more"] if len(lines) > LONGEST_LIST else []
    return "\n".join(f"  {line}" for line in lines[:LONGEST_LIST] + rest)
