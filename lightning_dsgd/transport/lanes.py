"""Lanes between processes: a thread beside the training thread, with channels of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lightning_dsgd.devices import PASSED
from lightning_dsgd.transport.contract import LaneStopped, PeerLost, Timeout, failed
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.mailboxes import Expected
from lightning_dsgd.transport.mesh import Mesh


class Lane:
    """A lane, from when it is started until its function returns.

    The thread that has started it stops and joins it.  The lane's thread writes `_waiting` and
    `_failure`, the other one `_is_stopping`.  To wait, the lane writes what it waits for and then
    looks whether it is to stop; to stop it, the other thread says so and then looks what it waits
    for.  So at least one of the two sees what the other has written, which relies on the
    interpreter's lock: it lets no thread run ahead of its own writes.

    Args:
        mesh: which is told if the function fails; its port is the lane's, on a stream of its own
    """

    net: Endpoint

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: Expected | None = None
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._begun = self._ended = PASSED
        self._thread: threading.Thread

    def start(self, net: Endpoint, fn: Callable[[Any], None]) -> None:
        """Runs `fn(net)`; `net` is for the lane's thread alone, but for sending."""
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
            if isinstance(failure, PeerLost) and self._mesh.survives:
                return  # the training thread goes on without this lane
            self._mesh.lose(self.net.rank, failed(failure))

    def begin_waiting(self, expected: Expected) -> None:
        """It is about to wait; raises `LaneStopped` if it is to stop."""
        self._waiting = expected
        self.check_stop()

    def end_waiting(self) -> None:
        """It waits no more."""
        self._waiting = None

    def check_stop(self) -> None:
        """Raises `LaneStopped` if it is to stop."""
        if self._is_stopping:
            raise LaneStopped

    # ---- in the thread that has started it ----

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the lane, also one that is blocked in a receive, and raises what it failed with."""
        if self._mesh.is_forks:
            return
        self._is_stopping = True
        waiting = self._waiting
        if waiting is not None:
            waiting.break_off(LaneStopped())
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the lane's function has returned, and raises what it failed with."""
        if self._mesh.is_forks:
            return
        limit = self.net.timeout_s if timeout_s is None else timeout_s
        self._thread.join(limit)
        if self._thread.is_alive():
            raise Timeout(
                f"rank {self.net.rank} has waited {limit:g} s for its {self._thread.name} to end"
            )
        self._ended.hold()
        self.check()

    def check(self) -> None:
        """Raises what the lane failed with, if it has."""
        if self._failure is not None:
            raise self._failure
