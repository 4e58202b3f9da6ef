"""The session of one call of the Trainer: what all ranks do together that only a Trainer has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_dsgd.session.session import Session, Training, TrainingT
from lightning_dsgd.session.stopping import END, ENDS, SAVE
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.clock import Clock
from lightning_dsgd.trainer.joint import JointEpochs
from lightning_dsgd.trainer.processes import Processes


@dataclass
class TrainerTraining(Training):
    """Holds what there is while a Trainer fits.

    Attributes:
        is_uneven: whether ranks have different numbers of batches
    """

    trainer: Any
    clock: Clock
    epochs: JointEpochs
    is_uneven: bool = False


class LaunchedSession(Session[TrainingT]):
    """A session of ranks that Lightning may have started.

    Args:
        processes: the ranks' processes on this node
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes

    def _quiet_observer(self) -> None:
        seams.quiet_observer()

    def _end_children(self) -> None:
        self._processes.end_children(within_s=0.0)

    def _forgive_others(self) -> None:
        self._processes.forgive()


class TrainerSession(LaunchedSession[TrainerTraining]):
    """Leads one rank through one call of the Trainer."""

    def end_batch(self) -> None:
        """Does what all ranks have agreed to do after this batch."""
        super().end_batch()
        if self.training is None:
            return
        clock = self.training.clock
        clock.begin_saving()
        for what, detail in self.training.agreed.due():
            are_all_here = self.meet(what)
            if what == SAVE:
                clock.save(detail, are_all_here=are_all_here)
            elif are_all_here:
                clock.end_training()

    def end_epoch(self) -> None:
        """Notes that this rank has done all batches of an epoch, or skips the rest of it."""
        super().end_batch()
        if self.training is not None:
            self.training.clock.ends_epoch(self.training.trainer.current_epoch)

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

    def _end_by(self, signum: int, begin: str, end: str = "") -> NoReturn:
        if self.training is None:
            super()._end_by(signum, begin, end)
        if signum not in ENDS:
            seams.requeue(self.training.trainer, signum)
        seams.interrupt(self.training.trainer, signum, begin, end)


def check_of_all(group: Any) -> None:
    """Raises for a group of some ranks, whose collective would wait for a lost one."""
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError(
            f'a collective must be of all ranks with on_loss="continue", got group={group!r}; '
            'leave it out, or use on_loss="end"'
        )
