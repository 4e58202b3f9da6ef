"""A simulated rank's transport, its receives and its lanes.

An endpoint is used by its own thread, and by other threads of its rank to send on.  Whichever
thread uses it holds the baton, so nothing here needs a lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from lightning_dsgd.simulated.baton import Awaited, Thread
from lightning_dsgd.simulated.faults import Faults
from lightning_dsgd.simulated.links import Expected, Message
from lightning_dsgd.simulated.simulation import Simulation
from lightning_dsgd.transport.contract import (
    ANY,
    Lane,
    PeerLost,
    Receipt,
    Timeout,
    Transport,
    TransportError,
    Views,
    Work,
)
from lightning_dsgd.transport.counters import Counters
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.messages import check_message, describe
from lightning_dsgd.transport.works import Done

POLL_S = 1e-6
"""The time of a look at an unfinished receive, so that loops that poll move on in virtual time."""


class SimulatedTransport(Endpoint):
    """One rank's end of a simulated network.

    Attributes:
        is_newcomer: whether this rank comes to others that are there, which it must `join`
    """

    def __init__(
        self,
        simulation: Simulation,
        rank: int,
        timeout_s: float,
        counters: Counters,
        path: str = "",
    ) -> None:
        self.is_newcomer = rank >= simulation.num_first
        world_size = rank + 1 if self.is_newcomer else simulation.num_first
        super().__init__(rank, world_size, timeout_s, counters, path)
        self._simulation = simulation

    def compute(self, seconds: float) -> None:
        """Lets so many seconds pass for this thread."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards, got seconds={seconds}")
        self._simulation.baton.sleep(seconds)

    def work(self, seconds: float) -> None:
        """Takes so many seconds of a processor, which the ranks of a machine may share."""
        self._simulation.processors.work(self.rank, seconds)

    def now(self) -> float:
        return self._simulation.baton.running.clock

    def check(self) -> None:
        self._simulation.faults.check(self.rank, "a check between two steps")

    @property
    def is_forks(self) -> bool:
        return False

    def check_process(self) -> None:
        return None  # ranks are threads here

    def on_lost(self, callback: Callable[[PeerLost], None]) -> None:
        self._simulation.faults.on_lost(self.rank, callback)

    @contextlib.contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        faults = self._simulation.faults
        try:
            yield
        except RuntimeError:
            with contextlib.suppress(PeerLost, Timeout):
                self.wait_for(_Verdict(faults, self.rank), faults.heartbeat_timeout_s)
            faults.check(self.rank, what)
            raise

    def fail(self, reason: str) -> None:
        """Tells all that this rank has failed, which takes `detect_s`, and closes."""
        baton, faults = self._simulation.baton, self._simulation.faults
        if not faults.has_lost(self.rank):
            faults.lose(self.rank, reason, baton.running.clock + faults.detect_s)
            baton.sleep(faults.detect_s)
        self.close()

    @property
    def views(self) -> Views:
        return self._simulation.faults.views_of(self.rank)

    def join(self, within_s: float) -> None:
        """Asks the other ranks to let this newcomer in; `views.next_view` gives its first view."""
        self._simulation.faults.join(self.rank, within_s)

    def close(self) -> None:
        self._simulation.faults.close(self.rank)

    def sub(self, name: str) -> SimulatedTransport:
        return self._at(f"{self.path}/{name}")

    def _at(self, path: str) -> SimulatedTransport:
        return SimulatedTransport(self._simulation, self.rank, self.timeout_s, self.counters, path)

    def post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        self._simulation.faults.check(self.rank, f"sending to rank {dst}")
        payload = x.detach().clone()
        processors, links, done_s = self._simulation.processors, self._simulation.links, 0.0
        if dst != self.rank:
            done_s = processors.begin_sending(self.rank, links.bytes_of(payload))
        num_bytes = links.send(Message(payload, self.rank, dst, channel, tag, kind, self.path))
        if dst != self.rank:
            self.counters.count("simulated", num_bytes)
        processors.sleep_until(done_s)
        return Done(None)

    def collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> Receipt:
        return _Receipt(self, self._simulation, like, src, channel, tag, kind, into)

    def wait_for(self, what: Awaited, timeout_s: float | None) -> None:
        """Blocks the running thread until `what` is there; counts the training thread's waits."""
        baton = self._simulation.baton
        me = baton.running
        begin = me.clock
        try:
            baton.wait(what, timeout_s, self.timeout_s)
        finally:
            if me.age == 0:
                self.counters.wait_s += me.clock - begin

    def start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        net = self._at(name)
        thread = self._simulation.start(self.rank, name, partial(fn, net))
        return _Lane(net, self, self._simulation, thread)


class _Verdict(Awaited):
    """The knowledge that a rank is lost, for a thread that waits for it."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self._faults, self._rank = faults, rank

    def in_words(self) -> str:
        return "which rank is lost"

    def check(self) -> None:
        self._faults.check(self._rank, self.in_words())


class _Receipt(Expected):
    """A receive under way on a simulated network."""

    source: int

    def __init__(
        self,
        net: SimulatedTransport,
        simulation: Simulation,
        like: Tensor,
        src: int,
        channel: int,
        tag: int,
        kind: int,
        into: Tensor | None,
    ) -> None:
        super().__init__(net.rank, src, channel, tag)
        self._net = net
        self._simulation = simulation
        self._like = like
        self._tag = tag
        self._kind = kind
        self._into = into
        self._begin = simulation.baton.running.clock
        self._result: Tensor | None = None
        self._error: TransportError | None = None
        self._is_expected = False
        self._expect()

    def in_words(self) -> str:
        return describe(self._net.path, self.src, self._tag, self._kind)

    def check(self) -> None:
        self._simulation.faults.check(self._net.rank, self.in_words())

    def why_never(self) -> PeerLost | None:
        why = self._simulation.faults.why_left(self.src) if self.src != ANY else ""
        return PeerLost(self.src, why, self.in_words()) if why else None

    def done(self) -> bool:
        if self._result is not None or self._error is not None:
            return True
        self._expect()
        self._simulation.baton.sleep(POLL_S)
        is_there = self.at_s <= self._simulation.baton.running.clock
        return is_there or self._simulation.faults.has_lost(self._net.rank)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._expect()
            begin = self._net.now()
            try:
                self._net.wait_for(self, timeout_s)
            except Timeout:
                # Whoever gives up on this receive must not lose a message to it.
                self._is_expected = False
                self._simulation.links.withdraw(self)
                self._tell(begin, self._net.now(), self.src)
                raise
            end = self._net.now()
            self._result = self._take()
            self._tell(begin, end, self.source)
        return self._result

    def _tell(self, begin: float, end: float, src: int) -> None:
        watch, me = self._net.counters.watch, self._simulation.baton.running
        if watch is not None and end > begin:
            watch.waited(begin, end, src, in_lane=me.age != 0)

    def _expect(self) -> None:
        if not self._is_expected:
            self._is_expected = True
            self._simulation.links.expect(self)

    def _take(self) -> Tensor:
        message = self.message
        assert message is not None
        self._net.counters.comm_s += max(0.0, message.at_s - self._begin)
        self._simulation.links.take(message)
        if message.src != self._net.rank:
            is_placed = self._into is not None
            self._simulation.processors.take(self._net.rank, message, is_placed=is_placed)
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
    """A lane of a simulated rank, with a clock of its own."""

    def __init__(
        self,
        net: SimulatedTransport,
        parent: SimulatedTransport,
        simulation: Simulation,
        thread: Thread,
    ) -> None:
        self.net = net
        self._parent = parent
        self._simulation = simulation
        self._thread = thread

    def tell(self, x: Tensor, tag: int = 0, over: Transport | None = None) -> None:
        net = over or self.net
        net.send(x, net.rank, tag)

    def stop(self, timeout_s: float | None = None) -> None:
        self._simulation.baton.stop(self._thread)
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        self._parent.wait_for(self._thread, timeout_s)
        self.check()

    def check(self) -> None:
        if self._thread.failure is not None:
            self._thread.failure_told = True
            raise self._thread.failure
