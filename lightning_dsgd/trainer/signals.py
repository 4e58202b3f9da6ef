"""What a rank does under Lightning when it gets a signal.

SIGTERM, Ctrl-C        see `session.signals`; where training goes on after a loss, SIGTERM has this
                       rank alone leave, before a batch
SLURM's signal         all ranks stop after the same batch; then the job is saved and requeued
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from lightning_dsgd.session.ending import say
from lightning_dsgd.session.signals import Handlers
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.sessions import TrainerSession


class Signals:
    """Handles signals for one session.

    Args:
        session: the session that the signals stop
        trainer: the Trainer of that session
        takes_sigint: whether Ctrl-C is handled here until `give_back_sigint`
    """

    def __init__(self, session: TrainerSession, trainer: Any, *, takes_sigint: bool) -> None:
        self._session = session
        self._trainer = trainer
        self._original_sigint: Any = None
        handlers = Handlers(session, self._stops_together, self._interrupt)
        seams.take_signals(trainer, handlers.on_sigterm, self._on_requeue)
        if takes_sigint and threading.current_thread() is threading.main_thread():
            self._original_sigint = signal.signal(signal.SIGINT, handlers.on_sigint)

    def give_back_sigint(self) -> None:
        """Leaves Ctrl-C to whoever had it before."""
        if self._original_sigint is not None:
            signal.signal(signal.SIGINT, self._original_sigint)
            self._original_sigint = None

    def _stops_together(self) -> bool:
        is_training = self._session.training is not None and self._session.is_training
        return is_training and not self._trainer.validating

    def _interrupt(self, signum: int) -> None:
        seams.interrupt(self._trainer, signum, f"rank {self._session.rank} received")

    def _on_requeue(self, signum: int, _: Any) -> None:
        """Stops all ranks together where SLURM's time is up soon; they save, and are requeued.

        Lightning alone would save in the midst of whatever this rank does.
        """
        session = self._session
        if session.is_fork:
            return
        if session.training is None:
            name = signal.Signals(signum).name
            say(f"[rank {session.rank}] {name}: no training to requeue")
        elif not session.has_ended:
            session.training.agreed.request(signum)
