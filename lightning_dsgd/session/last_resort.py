"""Ends the process of a rank whose training thread, which may hang in a library, misses a loss.

Threads: the mesh's thread tells of the loss, and starts a timer; the timer's thread reads the
session's phase.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from lightning_dsgd.session.ending import say
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.transport import PeerLost

NOTICE_WITHIN_S: Final = 15.0
"""How long a training thread may take to notice a loss before its process is ended."""


class LastResort:
    """Waits for the training thread of one session."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._timer: threading.Timer | None = None

    def await_notice(self, lost: PeerLost) -> None:
        """Ends this process after a while, unless the training thread notices the loss."""
        session = self._session
        net = session.net_if_open  # the training thread may close it at any moment
        if net is not None and net.ends_with_peers:
            say(f"[rank {session.rank}] {lost}")
        session.quiet_observer()
        if net is not None:  # else training is over
            self._timer = threading.Timer(NOTICE_WITHIN_S, self._end, [lost])
            self._timer.daemon = True
            self._timer.start()

    def _end(self, lost: PeerLost) -> None:
        session = self._session
        if session.is_open and session.phase is not Phase.BROKEN:  # also in another view by now
            say(
                f"[rank {session.rank}] ends: {lost}, and training did not come back to notice "
                f"within {NOTICE_WITHIN_S:g} s"
            )
            session.end_children()
            os._exit(1)

    def cancel(self) -> None:
        """Cancels the timer, as training is over and the network closed."""
        if self._timer is not None:
            self._timer.cancel()
