"""Callbacks that look at a clock: `Timer`, and `ModelCheckpoint(train_time_interval=...)`.

Lightning's ask rank 0 after every batch whether it is time, for which all ranks would have to wait.
Here a rank that finds that it is time asks all ranks to end, or to save, after the same batch
(`stopping`).  The training thread alone uses a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dsgd.session.stopping import END, SAVE, AgreedBatch
from lightning_dsgd.trainer import seams


class Clock:
    """Stands between the Trainer's callbacks and their clocks, for one training.

    Attributes:
        last_epoch: the epoch with which training ends, if a rank's time was up and the ranks were
            in different epochs

    Args:
        trainer: the Trainer whose callbacks look at clocks
        agreed: how this rank asks all ranks
        are_apart: whether ranks may have different numbers of batches
    """

    def __init__(self, trainer: Any, agreed: AgreedBatch, are_apart: Callable[[], bool]) -> None:
        self.last_epoch: int | None = None
        self._trainer = trainer
        self._agreed = agreed
        self._are_apart = are_apart
        self._asked: set[tuple[int, int]] = set()
        self._saving: set[int] = set()
        self._left_out_in: int | None = None
        self._ended_epoch = -1
        callbacks = trainer.callbacks
        self._callbacks = [c for c in callbacks if seams.is_timer(c) or seams.saves_by_time(c)]
        for index, callback in enumerate(self._callbacks):
            if seams.is_timer(callback):
                seams.take_timer(callback, self._check_timer)
            elif trainer.lightning_module.automatic_optimization:
                seams.take_saver(callback, partial(self._save_by_time, index))
            else:
                rank_zero_warn(
                    "Lightning's ModelCheckpoint saves nothing by train_time_interval where "
                    "optimization is manual; use every_n_train_steps or every_n_epochs"
                )

    def save(self, index: int, *, are_all_here: bool) -> None:
        """Notes whether all ranks save after this batch for the callback of this number."""
        self._asked.discard((SAVE, index))
        if are_all_here:
            self._saving.add(index)

    def ends_epoch(self, epoch: int) -> None:
        """Notes that this rank has done all batches of an epoch."""
        self._ended_epoch = epoch
        self.end_after_last_epoch()

    def stop_asking_to_end(self) -> None:
        """Stops asking to end: all ranks know that a rank's time is up."""
        self._asked.add((END, 0))

    def end_after(self, epoch: int) -> None:
        """Notes, once, that training ends with this epoch on all ranks."""
        if self.last_epoch is None:
            self.last_epoch = epoch
            self.end_after_last_epoch()

    def end_after_last_epoch(self) -> None:
        """Ends training if this rank has done the epoch with which all ranks end."""
        if self.last_epoch is not None and self._ended_epoch >= self.last_epoch:
            self.end_training()

    def end_training(self) -> None:
        """Has the Trainer end as if its own time were up."""
        if any(map(seams.is_verbose, self._callbacks)) and not self._trainer.should_stop:
            rank_zero_info("Time limit reached. Signaling Trainer to stop, on all ranks.")
        self._trainer.should_stop = True

    def leave_out_save(self) -> None:
        """Goes on without a checkpoint, and asks for none until the next epoch."""
        if self._left_out_in is None:
            rank_zero_warn(
                "a checkpoint by train_time_interval is left out where a rank has run out of "
                "batches before the others; use every_n_epochs, or give every rank as many batches"
            )
        self._left_out_in = self._trainer.current_epoch

    def give_back(self) -> None:
        """Takes this clock out of the callbacks."""
        for callback in self._callbacks:
            seams.give_back_callback(callback)

    def _ask(self, what: int, detail: int = 0) -> None:
        """Asks all ranks to do something, once until all have done it."""
        if (what, detail) not in self._asked:
            self._asked.add((what, detail))
            self._agreed.ask(what, detail)

    def _check_timer(self, timer: Any, trainer: Any) -> None:
        """Asks, for a Timer, whether it is time to end."""
        if seams.current_hook(trainer.lightning_module) != "on_train_batch_end":
            seams.ask_timer(timer, trainer)  # all ranks are here
        elif seams.is_time_up(timer):
            self._ask(END)

    def _save_by_time(self, index: int, saver: Any, *args: Any) -> None:
        """Saves after a batch where all ranks do, whatever the ModelCheckpoint's clock says."""
        is_due = index in self._saving
        self._saving.discard(index)
        may_ask = not is_due and self._left_out_in != self._trainer.current_epoch
        if may_ask and seams.is_time_to_save(saver, time.monotonic()):
            self._ask(SAVE, index)
        seams.after_batch(saver, is_due, self._are_apart(), *args)
