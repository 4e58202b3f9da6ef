"""A lock for tensors on a device that several threads of a rank change in turn."""

from __future__ import annotations

import threading
from types import TracebackType

from torch import Tensor

from lightning_dsgd.devices import port_of


class StreamLock:
    """Guards tensors that threads with streams of their own change in turn.

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
