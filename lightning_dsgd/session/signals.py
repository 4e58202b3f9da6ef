"""What SIGTERM and Ctrl-C do to a rank, whatever the face.

SIGTERM                all ranks stop after the same batch; where the others can go on without
                       this one, it leaves before a batch
the first Ctrl-C       all ranks stop after the same batch; the second interrupts at once
SLURM's signal         with the Trainer: all ranks stop after the same batch; then the job is saved
                       and requeued
where nobody trains    as in evaluation: this rank ends at once, and the others are told
in a forked process    it ends alone; a loader's worker by the second (`data.workers`)

In a loop, ranks stop after a batch of `replica.batches(...)`.  Handlers run in the training thread,
anywhere in it.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from lightning_dsgd.session.ending import end_fork_by, is_loaders_worker
from lightning_dsgd.session.phases import Phase


class Signals:
    """Handles signals for one session."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._originals: dict[int, Any] = {}

    def take(self) -> None:
        """Handles both signals from now on; a script's own handlers stay in their place."""
        for signum, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            if signum not in self._originals and signal.getsignal(signum) == default:
                self._take(signum, self.on_sigterm if signum == signal.SIGTERM else self.on_sigint)

    def take_sigint(self) -> None:
        """Handles Ctrl-C from now on."""
        self._take(signal.SIGINT, self.on_sigint)

    def _take(self, signum: int, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._originals[signum] = signal.signal(signum, handler)

    def give_back(self) -> None:
        """Leaves the signals to whoever had them before."""
        for signum, original in self._originals.items():
            if original is not None:  # else it was not Python's, which Python cannot put back
                signal.signal(signum, original)
        self._originals = {}

    def _stops_together(self) -> bool:
        """Returns whether ranks train now, and so can stop after the same batch."""
        session, training = self._session, self._session.training
        trains = session.is_training or session.phase is Phase.READY
        if training is None or not trains or session.is_evaluating:
            return False
        return not training.replica.shows_consensus

    def on_sigterm(self, signum: int, _: Any) -> None:
        """Handles SIGTERM: has all ranks stop, or ends this process."""
        session = self._session
        if session.is_fork:
            end_fork_by(signum)
        elif session.has_ended:
            return  # it ends already
        elif self._stops_together():
            session.ranks.request_end(signum)
        else:
            session.end_by(signum, f"rank {session.rank} received")

    def on_sigint(self, signum: int, _: Any) -> None:
        """Handles SIGINT: has all ranks stop the first time."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._session.is_fork and is_loaders_worker():
            return
        if self._session.is_fork or not self._stops_together():
            raise KeyboardInterrupt
        self._session.request_stop(signum)
