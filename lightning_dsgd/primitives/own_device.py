"""A rank's own device: waits for it, so that the other ranks need not, and turns at its tensors.

A step counts once the device has made it, and not when the host has queued it: a rank that is told
of a step takes no part in a sum that would have to wait for a slow kernel.

A training thread that waits for its group's answer waits for its own step first, which costs
nothing; one that does not wait tells its lane by `Lane.tell`, and goes on.  On the CPU a step is
made once it is queued.
"""

from __future__ import annotations

import threading
from types import TracebackType

from torch import Tensor

from lightning_dsgd.devices import Mark, port_of, until
from lightning_dsgd.transport import Timeout, Transport


def await_mark(net: Transport, mark: Mark) -> None:
    """Waits until the device has come to a mark; the wait ends as one for a message does.

    Raises:
        PeerLost: if a rank is lost meanwhile
        Timeout: after the network's `timeout_s`
    """
    if not until(mark.has_passed, net.timeout_s, net.check):
        raise Timeout(
            f"rank {net.rank} has waited {net.timeout_s:g} s for its own device to make a step"
        )


def await_step(net: Transport, x: Tensor) -> None:
    """Waits until the device has done all that this thread has queued for x."""
    await_mark(net, port_of(x.device).mark())


class StreamLock:
    """Guards tensors on a device that threads of a rank, with streams of their own, change in turn.

    The stream of the thread that takes the lock waits for what the last holder has queued; the
    host does not wait.
    """

    def __init__(self, x: Tensor) -> None:
        self._port = port_of(x.device)
        self._lock = threading.Lock()
        self._mark = self._port.mark()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._mark.hold()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._mark = self._port.mark()
        self._lock.release()
