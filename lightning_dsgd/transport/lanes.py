"""Lanes between processes: a thread beside the training thread, with channels of its own.

    thread     tell: a mark in its stream, and a message       ...queues the next step...
    courier    asks whether the mark has passed                it has: sends the message to the lane
    lane       waits for messages of all ranks, also of its own, and never for the mark

So the lane serves other ranks while a kernel of its own rank is slow, and what it is told of has
been done: its stream need not wait for it.  A lane has a courier once it is told of something that
the device has not done yet, so on the CPU it has none.  Nothing waits for the courier for ever: it
asks a mark until the lane is stopped, and a mark that fails makes this rank a lost one.  Where
another rank is lost the courier ends, and what the lane is told after that stays in the queue: the
change of the view, or the end of the job, stops all lanes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from torch import Tensor

from lightning_dsgd.devices import PASSED, Mark, until
from lightning_dsgd.transport.contract import LaneStopped, PeerLost, Timeout, Transport, failed
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.mailboxes import Expected
from lightning_dsgd.transport.mesh import Mesh

_LONGEST_PAUSE_S: Final = 5e-3
"""How long a courier pauses at most: it asks marks during nearly all of the training."""


class Lane:
    """A thread beside the training thread, from its start until its function returns.

    The thread that has started it stops and joins it; any thread tells it.  The lane's thread
    writes `_waiting` and `_failure`, the other one `_is_stopping`.  To wait, the lane says what it
    waits for and then looks whether it is to stop; to stop it, the other thread says so and then
    looks what it waits for.  So at least one of the two sees what the other has written, which
    relies on the interpreter's lock: it lets no thread run ahead of its own writes.

    Args:
        mesh: is told if the function fails; the lane uses its port, on a stream of its own
    """

    net: Endpoint

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: Expected | None = None
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._begun = self._ended = PASSED
        self._told: SimpleQueue[tuple[Mark, Callable[[], object]] | None] = SimpleQueue()
        self._courier: threading.Thread | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread

    def start(self, net: Endpoint, fn: Callable[[Any], None]) -> None:
        """Runs `fn(net)` in the lane's thread; other threads may only send on `net`."""
        self.net = net
        self._begun = self._mesh.port.mark()
        self._thread = threading.Thread(
            target=self._run, args=(fn,), name=f"dsgd{net.path}", daemon=True
        )
        self._thread.start()

    # ---- in the lane ----

    def _run(self, fn: Callable[[Any], None]) -> None:
        port = self._mesh.port
        try:
            port.enter()
            with port.using(port.new()):
                self._begun.hold()
                try:
                    fn(self.net)
                finally:
                    self._ended = port.mark()
        except LaneStopped:
            pass
        except BaseException as failure:
            self._failure = failure
            if isinstance(failure, PeerLost) and self._mesh.policy.goes_on:
                return  # the training thread goes on without this lane
            self._mesh.lose(self.net.rank, failed(failure))

    def begin_waiting(self, expected: Expected) -> None:
        """Notes what the lane is about to wait for; raises `LaneStopped` if it is to stop."""
        self._waiting = expected
        self.check_stop()

    def end_waiting(self) -> None:
        """Notes that the lane waits no more."""
        self._waiting = None

    def check_stop(self) -> None:
        """Raises `LaneStopped` if the lane is to stop."""
        if self._is_stopping:
            raise LaneStopped

    # ---- in its courier ----

    def _carry(self) -> None:
        port = self._mesh.port
        try:
            port.enter()
            with port.using(port.new()):  # empty: what is sent waits for nothing
                while (told := self._told.get()) is not None:
                    mark, send = told
                    until(mark.has_passed, math.inf, self.check_stop, _LONGEST_PAUSE_S)
                    send()
        except (LaneStopped, PeerLost):
            pass
        except Exception as failure:
            self._mesh.lose(self.net.rank, failed(failure))
            raise

    # ---- in any other thread ----

    def tell(self, x: Tensor, tag: int = 0, over: Transport | None = None) -> None:
        """Sends to the lane, which gets it once the device has done what this thread has queued."""
        net: Transport = over or self.net
        mark = self._mesh.port.mark()
        with self._starting:
            if self._courier is None and not mark.has_passed():
                self._courier = threading.Thread(
                    target=self._carry, name=f"dsgd{self.net.path}-courier", daemon=True
                )
                self._courier.start()
        if self._courier is None:
            net.send(x, net.rank, tag)
        else:
            self._told.put((mark, lambda: net.send(x, net.rank, tag)))

    # ---- in the thread that has started it ----

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the lane, even in the midst of a receive, and raises the lane's failure, if any."""
        if self._mesh.is_forks:
            return
        self._is_stopping = True
        waiting = self._waiting
        if waiting is not None:
            waiting.break_off(LaneStopped())
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the lane's function has returned, and raises its failure, if any."""
        if self._mesh.is_forks:
            return
        limit = self.net.timeout_s if timeout_s is None else timeout_s
        self._await_end(self._thread, limit)
        if self._courier is not None:
            self._is_stopping = True
            self._told.put(None)
            self._await_end(self._courier, limit)
        self._ended.hold()
        self.check()

    def _await_end(self, thread: threading.Thread, limit_s: float) -> None:
        thread.join(limit_s)
        if thread.is_alive():
            raise Timeout(
                f"rank {self.net.rank} has waited {limit_s:g} s for its {thread.name} to end"
            )

    def check(self) -> None:
        """Raises the lane's failure, if it has failed."""
        if self._failure is not None:
            raise self._failure
