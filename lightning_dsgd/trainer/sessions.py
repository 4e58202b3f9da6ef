"""The session of one call of the Trainer: what all ranks do together that only a Trainer has."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_dsgd.session.ending import ended_by, say
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.ranks import Ranks
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import END, END_SIGNALS, SAVE
from lightning_dsgd.session.under_way import Training, TrainingT
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.children import Processes
from lightning_dsgd.trainer.claimed import TrainerClaiming
from lightning_dsgd.trainer.clock import Clock
from lightning_dsgd.trainer.joint import JointEpochs


@dataclass
class TrainerTraining(Training):
    """Holds what there is while a Trainer fits.

    Attributes:
        claiming: what claims this rank's batches, where ranks claim them
    """

    trainer: Any
    clock: Clock
    epochs: JointEpochs
    claiming: TrainerClaiming | None = field(default=None, kw_only=True)


class LaunchedSession(Session[TrainingT]):
    """A session of ranks that Lightning may have started."""

    def __init__(self, processes: Processes, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        self._processes = processes

    def stop(self) -> None:
        """Notes that all ranks stop here, also those that this process has started."""
        super().stop()
        self._processes.stop()

    def quiet_observer(self) -> None:
        seams.quiet_observer()

    def end_children(self) -> None:
        self._processes.end_children(within_s=0.0)

    def forgive_others(self) -> None:
        self._processes.forgive()


class TrainerSession(LaunchedSession[TrainerTraining]):
    """Leads one rank through one call of the Trainer."""

    _trainer: Any = None
    _requeue_signum: int | None = None
    """The signal by which SLURM asks to save and to requeue the job; None: nobody asks."""

    def take_signals(self, trainer: Any) -> None:
        """Has the Trainer hand SIGTERM and SLURM's signal over from now on."""
        self._trainer = trainer
        self._requeue_signum = seams.requeue_signal(trainer)
        seams.take_signals(trainer, self._on_sigterm, self._on_requeue)

    @property
    def is_evaluating(self) -> bool:
        return not self.is_training or bool(self._trainer.validating)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        """Ends or stops the ranks, unless this is the signal by which SLURM asks to requeue."""
        if self.training is None or signum != self._requeue_signum:
            self.signals.on_sigterm(signum, frame)

    def _on_requeue(self, signum: int, frame: Any) -> None:
        """Stops all ranks together where SLURM's time is up soon; they save, and are requeued.

        Lightning alone would save in the midst of whatever this rank does.
        """
        if self.is_fork:
            if signum in END_SIGNALS:
                self.signals.on_sigterm(signum, frame)
            return
        if self.training is None:
            say(f"[rank {self.rank}] {signal.Signals(signum).name}: no training to requeue")
        elif not self.has_ended:
            self.request_stop(signum)

    def do_together(self, what: int, detail: int) -> None:
        """Does what all ranks have agreed to do after this batch."""
        assert self.training is not None
        are_all_here, clock = self.meet(what), self.training.clock
        if what == SAVE:
            clock.save(detail, are_all_here=are_all_here)
        elif are_all_here:
            clock.end_training()

    def end_epoch(self) -> None:
        """Notes that this rank has done all batches of an epoch, or skips the rest of it."""
        self.end_batch()
        if self.training is not None:
            self.training.clock.ends_epoch(self.training.trainer.current_epoch)
        self.ranks.end_epoch()

    def _agree(self, what: int, votes: Tensor, *, are_all_here: bool) -> bool:
        training = self.training
        if training is None:
            return are_all_here
        if votes[SAVE] and not are_all_here:
            training.clock.leave_out_save()
        if votes[END]:
            mine = torch.tensor([training.trainer.current_epoch])
            epochs = [int(theirs) for theirs in self.meetings.all_gather(mine).wait()]
            are_all_here = are_all_here and len(set(epochs)) == 1
            training.clock.stop_asking_to_end()
            if not are_all_here:
                training.clock.end_after(max(epochs))
        return are_all_here

    def end_by(self, signum: int, begin: str, end: str = "") -> NoReturn:
        if self._trainer is None:
            super().end_by(signum, begin, end)
        if signum == self._requeue_signum and self.phase is Phase.STOPPING:
            seams.requeue(self._trainer, signum)
        raise ended_by(signum, seams.interruption(self._trainer, signum), begin, end)
