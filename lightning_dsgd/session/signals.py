"""What SIGTERM and Ctrl-C do to a rank, whatever the face.

SIGTERM                all ranks stop after the same batch; where the others can go on without
                       this one, it leaves
the first Ctrl-C       all ranks stop after the same batch; the second interrupts at once
where nobody trains    as in evaluation: this rank ends at once, and the others are told
in a forked process    it ends alone

Handlers run in the training thread, anywhere in it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning_dsgd.session.ending import end_fork_by, is_loaders_worker
from lightning_dsgd.session.session import Session


class Handlers:
    """Handles signals for one session.

    Args:
        session: the session that the signals stop
        stops_together: whether the ranks train now, so that they can stop after the same batch
        interrupt: ends this rank at once, for a signal
    """

    def __init__(
        self,
        session: Session[Any],
        stops_together: Callable[[], bool],
        interrupt: Callable[[int], None],
    ) -> None:
        self._session = session
        self._stops_together = stops_together
        self._interrupt = interrupt

    def on_sigterm(self, signum: int, _: Any) -> None:
        """Handles SIGTERM: has all ranks stop, or ends this process."""
        if self._session.is_fork:
            end_fork_by(signum)
        elif self._session.has_ended:
            return  # it ends already
        elif self._stops_together():
            self._session.ranks.request_end(signum)
        else:
            self._interrupt(signum)

    def on_sigint(self, signum: int, _: Any) -> None:
        """Handles SIGINT: has all ranks stop the first time."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._session.is_fork and is_loaders_worker():
            return
        if self._session.is_fork or not self._stops_together():
            raise KeyboardInterrupt
        self._session.request_stop(signum)
