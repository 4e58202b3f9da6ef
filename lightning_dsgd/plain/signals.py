"""What a rank of a plain loop does when it gets SIGTERM or Ctrl-C: see `session.signals`.

Ranks stop, or one leaves, after a batch of `replica.batches(...)`.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.signals import Handlers


class Signals:
    """Handles the signals of one training; a script's own handlers stay in their place.

    Args:
        session: the session that the signals stop
    """

    def __init__(self, session: Session[Any]) -> None:
        self._session = session
        self._handlers = Handlers(session, self._stops_together, self._interrupt)
        self._originals: dict[int, Any] = {}

    def take(self) -> None:
        """Handles both signals from now on, in the main thread."""
        if self._originals or threading.current_thread() is not threading.main_thread():
            return
        defaults = {
            signal.SIGTERM: (signal.SIG_DFL, self._handlers.on_sigterm),
            signal.SIGINT: (signal.default_int_handler, self._handlers.on_sigint),
        }
        for signum, (default, handler) in defaults.items():
            if signal.getsignal(signum) == default:
                self._originals[signum] = signal.signal(signum, handler)

    def give_back(self) -> None:
        """Leaves the signals to whoever had them before."""
        for signum, original in self._originals.items():
            signal.signal(signum, original)
        self._originals = {}

    def _stops_together(self) -> bool:
        session, training = self._session, self._session.training
        if training is None or not (session.is_training or session.phase is Phase.READY):
            return False
        return not training.replica.shows_consensus

    def _interrupt(self, signum: int) -> None:
        name = signal.Signals(signum).name
        raise SystemExit(f"rank {self._session.rank} received {name}")
