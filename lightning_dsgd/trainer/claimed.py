"""The Trainer's loops where ranks claim their batches.

    an epoch ends              where all ranks have been told that there is no batch left
    nominal                    counted as if all ranks made as many batches: `len(loader)`, the
                               progress bar's total, `estimated_stepping_batches`, `max_steps`,
                               `limit_train_batches`, `val_check_interval`
    of this rank               `global_step`, `batch_idx`, what is logged

No rank knows beforehand which batch is its last.  So Lightning's loop ends where its loader says
so, and what Lightning does with the last batch of an epoch is done once all ranks are there:
schedulers of epochs, the validation at the end.  If a rank is lost then, the others go on with
what it has left.

**Schedulers of steps** stand, at each batch, where the batch stands in the epoch: batch b of P
ranks' is the nominal step b // P, whoever makes it.  So all ranks use the learning rate that DDP
would use for that batch, and all schedules end at their ends.

**Validations within an epoch** stand before batches of certain nominal steps: a rank whose next
batch lies behind one validates, and waits there for all ranks.

**Accumulation.**  The batches of one optimizer step are claimed together.

**Resume.**  A checkpoint holds what was trained on in the epoch, how far the schedulers are, and
how many validations there were.  The epoch goes on with what is left.

Private names of Lightning's loops stand here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dsgd.data.claims.claiming import Claiming, Saved
from lightning_dsgd.data.claims.claims import NONE
from lightning_dsgd.data.claims.loaders import ClaimedLoader, notice_of_stream
from lightning_dsgd.data.loaders import has_indices
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.joint import JointEpochs


class TrainerSaved(Saved, total=False):
    """What a checkpoint holds, and what this rank has counted: see `TrainerClaiming.counts`."""

    counts: list[int]
    num_batches: int


class TrainerClaiming(Claiming):
    """Leads one rank of a Trainer's through its epochs: see the head of the file.

    Args:
        session: the session of this rank
        trainer: the Trainer
        num_ranks: how many ranks there are at the start
        is_newcomer: whether this rank comes to others that train
    """

    _session: Session[Any]

    def __init__(
        self, session: Session[Any], trainer: Any, num_ranks: int, *, is_newcomer: bool
    ) -> None:
        super().__init__(session, num_ranks, is_newcomer=is_newcomer)
        self._trainer = trainer
        self._is_told = False
        self._state: TrainerSaved | None = None
        self._unclaimed_epoch = -1
        """The epoch that a checkpoint was saved in, by ranks that claimed nothing."""
        self._num_validations = 0
        self._num_scheduled = 0
        """For how many nominal batches of the epoch the schedulers have stepped."""
        self._has_ended = False
        """Whether the schedulers of epochs have made the step of this epoch."""
        self._steps_before = self._batches_before = 0
        """How many nominal steps and batches the epochs before had."""

    # ---- loaders ----

    def take(self, loader: Any) -> Any:
        """Returns a training loader with claimed batches; streams keep their own split."""
        if has_indices(loader):
            return ClaimedLoader(loader, self, self._begin_epoch)
        if not self._is_told:
            self._is_told = True
            rank_zero_info(notice_of_stream(loader))
        return loader

    @property
    def is_used(self) -> bool:
        """Whether batches are claimed; not so where the training data is a stream."""
        loaders = self._combined.flattened if self._combined is not None else []
        kinds = {isinstance(loader, ClaimedLoader) for loader in loaders}
        if len(kinds) > 1:
            raise ValueError(
                'with data="claimed" all loaders that are read together must be DataLoaders of '
                'datasets with indices, got some with streams; use data="equal"'
            )
        return True in kinds

    @property
    def _combined(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    def _begin_epoch(self, loader: ClaimedLoader) -> None:
        """Begins the epoch of all loaders that are read together with this one."""
        trainer, combined = self._trainer, self._combined
        portion_size = trainer.accumulate_grad_batches
        number = trainer.fit_loop.epoch_progress.current.processed
        if self._session.phase is Phase.JOINED:
            self._session.enter(Phase.TRAINING)  # from its first claim on it meets the others
        self.begin_epoch(
            number,
            combined.flattened,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            shortest=combined._mode == "min_size",
            cycles=combined._mode == "max_size_cycle",
            limit=self._limit(number, portion_size),
            portion_size=portion_size,
        )

    def _limit(self, number: int, portion_size: int) -> float:
        """Returns how many batches an epoch has at most, of all ranks.

        An epoch that a resume goes on with has as many as before, whatever the number of ranks.
        """
        if number == self._unclaimed_epoch:
            raise ValueError(
                "an epoch must go on with the data= that it began with, got a checkpoint within an "
                'epoch of data="equal" with data="claimed"; resume with data="equal", or from a '
                "checkpoint of an epoch's end"
            )
        if self._state is not None and self._state["epoch"][0] == number:
            return self._state.get("num_batches", float("inf"))
        limit: float = self._trainer.num_training_batches * self.num_ranks
        if self._trainer.fit_loop.max_steps >= 0:
            left = max(0, self._trainer.fit_loop.max_steps - self._steps_before)
            limit = min(limit, left * portion_size * self.num_ranks)
        return limit

    # ---- progress ----

    def begin(self, position: int, number: int) -> bool:
        has_begun = super().begin(position, number)
        if has_begun:
            self.schedule()
        return has_begun

    @property
    def num_steps(self) -> int:
        """How many nominal steps the epochs before had."""
        return self._steps_before

    @property
    def _length(self) -> int:
        return self.nominal(self.num_batches)

    def schedule(self, num_batches: int | None = None) -> None:
        """Has the schedulers of steps come to the batch in hand, or to so many nominal batches."""
        if num_batches is None:
            num_batches = self.nominal_before(self.portion)
        while self._num_scheduled < num_batches:
            self._num_scheduled = min(self._num_scheduled + self.portion_size, num_batches)
            progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
            ready, progress.ready = progress.ready, self._num_scheduled
            with warnings.catch_warnings():  # this rank may not have made a step before
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._trainer.fit_loop.epoch_loop._update_learning_rates(
                    interval="step", update_plateau_schedulers=False
                )
            progress.ready = ready

    def schedule_end(self) -> None:
        """Has all schedulers come to the end of the epoch, unless they had before a resume."""
        self.schedule(self._length)
        self.schedule_epoch()

    def schedule_epoch(self) -> None:
        """Has the schedulers of epochs make the step of this epoch, once."""
        if not self._has_ended:
            self._has_ended = True
            self._trainer.fit_loop.epoch_loop._update_learning_rates(
                interval="epoch", update_plateau_schedulers=False
            )

    def count_validation(self) -> None:
        """Notes that this rank validates."""
        self._num_validations += 1

    def is_validation_due(self) -> bool:
        """Returns whether a validation within the epoch stands before this rank's next batch."""
        every = self._trainer.val_check_batch
        if every is None or not self.is_portion_over or self._due(self._length) <= self._due(0):
            return False
        if self._due(self._length - 1) <= self._num_validations:
            return False  # the next one, if any, stands at the end
        portion = self.next_portion()
        return portion != NONE and self._due(self.nominal_before(portion)) > self._num_validations

    def is_due_at_end(self) -> bool:
        """Returns whether a validation stands at the end of the epoch."""
        return self._due(self._length) > self._num_validations

    def _due(self, num_batches: int) -> int:
        """Returns how many validations an epoch has in its first nominal batches."""
        trainer = self._trainer
        every = trainer.val_check_batch
        if every is None or not trainer.fit_loop.epoch_loop._should_check_val_epoch():
            return 0
        if every == float("inf"):
            return int(num_batches == self._length)
        before = self._batches_before if trainer.check_val_every_n_epoch is None else 0
        return int((before + num_batches) // every - before // every)

    def end_epoch(self) -> None:
        """Counts on with the next epoch."""
        self._batches_before += self._length
        self._steps_before += -(-self._length // self.portion_size)
        self._num_validations = self._num_scheduled = 0
        self._has_ended = False

    # ---- checkpoints and newcomers ----

    def counts(self) -> list[int]:
        """Returns what this rank has counted."""
        counted = self._num_validations, self._num_scheduled, int(self._has_ended)
        return [*counted, self._steps_before, self._batches_before]

    def take_counts(self, counts: list[int]) -> None:
        """Takes over what `counts` has returned."""
        self._num_validations, self._num_scheduled, has_ended, *before = counts
        self._has_ended = bool(has_ended)
        self._steps_before, self._batches_before = before

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds the claims to a checkpoint; all ranks call it."""
        if self.is_used:
            saved: TrainerSaved = {
                **self.state(),
                "counts": self.counts(),
                "num_batches": self.num_batches,
            }
            checkpoint[record.CLAIMS] = saved

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on with the claims in a checkpoint, once the network is there."""
        self._state = checkpoint.get(record.CLAIMS)
        if self._state is None and self._session.takes_part and seams.is_within_epoch(checkpoint):
            epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
            self._unclaimed_epoch = epochs["processed"]
        if self._state is not None:
            self.take_counts(self._state["counts"])
            self.load_state(self._state)


class ClaimedEpochs(JointEpochs):
    """Keeps this rank's epochs in step with the others', where batches are claimed.

    Args:
        session: the session of all ranks
        trainer: the Trainer whose loops are taken over
        begin: called once the Trainer knows its batches, before training
        claiming: what this rank claims
    """

    def __init__(
        self,
        session: Session[Any],
        trainer: Any,
        begin: Callable[[], None],
        claiming: TrainerClaiming,
    ) -> None:
        super().__init__(session, trainer, begin)
        self._claiming = claiming

    @property
    def are_apart(self) -> bool:
        return self._claiming.is_used or super().are_apart

    @property
    def num_steps(self) -> int:
        return self._claiming.num_steps if self._claiming.is_used else super().num_steps

    def begin(self) -> None:
        if self._claiming.is_used:
            if seams.fetches_itself(self._trainer.lightning_module):
                raise ValueError(
                    'with data="claimed" the Trainer must fetch the batches, got a training_step '
                    'that takes dataloader_iter; take a batch, or use data="equal"'
                )
            _take_epoch_loop(self._trainer.fit_loop.epoch_loop, self._claiming)
        super().begin()

    def validate(self) -> None:
        self._claiming.count_validation()
        super().validate()

    def before_validation(self) -> None:
        self._claiming.count_validation()
        super().before_validation()

    def make_batches(self, fetcher: Any) -> None:
        if not self._claiming.is_used:
            super().make_batches(fetcher)
            return
        loop = self._trainer.fit_loop.epoch_loop
        with warnings.catch_warnings():  # what is left of the epoch is in the checkpoint
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
            loop.reset()
        loop.on_run_start(fetcher)
        self._go_on(fetcher)

    def _go_on(self, fetcher: Any) -> None:
        """Makes batches until the loader has none, as Lightning's loop does."""
        loop = self._trainer.fit_loop.epoch_loop
        fetcher.length = None  # the nominal length is no limit
        while not self._is_epoch_over():
            try:
                loop.advance(fetcher)
                self._after_batch(fetcher)
            except StopIteration:
                break
            finally:
                loop.on_iteration_done()

    def _is_epoch_over(self) -> bool:
        """Returns whether the epoch ends; `max_steps` has bounded it at its beginning."""
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        if loop.batch_progress.is_last_batch and loop._is_validation_done:
            return True
        # `done` says why training goes on, where it may not stop yet.
        return bool(trainer.should_stop and loop.done and trainer.fit_loop._can_stop_early)

    def _after_batch(self, fetcher: Any) -> None:
        """Validates as often as validations stand before this rank's next batch."""
        self._trainer.fit_loop.epoch_loop.on_advance_end(fetcher)
        while not self._trainer.should_stop and self._claiming.is_validation_due():
            self.before_validation()
            super().validate()

    def await_end(self) -> None:
        """Waits until all have done their batches, those of lost ranks included; ends the epoch."""
        super().await_end()
        claiming, trainer = self._claiming, self._trainer
        if not claiming.is_used:
            return
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        left, num_stopped = claiming.left(has_stopped=not fetcher.done)
        while left and not num_stopped:  # a rank was lost while others stood here
            iter(fetcher)  # the loaders have come to their end before
            self._go_on(fetcher)
            super().await_end()
            left, num_stopped = claiming.left(has_stopped=not fetcher.done)
        self.is_out = loop.batch_progress.current.ready == 0
        if not left:
            loop.batch_progress.is_last_batch = True
            claiming.schedule_end()
            if claiming.is_due_at_end():
                self.validate()
        claiming.end_epoch()


def _take_epoch_loop(loop: Any, claiming: TrainerClaiming) -> None:
    """Has Lightning's loop ask for what it would know if ranks made as many batches."""

    def should_validate(fetcher: Any) -> bool:
        if loop.restarting:
            return False
        if loop.trainer.should_stop and loop.trainer.fit_loop._can_stop_early:
            return bool(loop._should_check_val_epoch())
        return claiming.is_validation_due()

    def update_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if update_plateau_schedulers:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
        elif interval == "epoch":  # for those of steps see `TrainerClaiming.schedule`
            claiming.schedule_epoch()

    loop._should_check_val_fx = should_validate
    loop.update_lr_schedulers = update_schedulers
    loop._num_ready_batches_reached = lambda: bool(loop.batch_progress.is_last_batch)
    loop._accumulated_batches_reached = lambda: claiming.is_portion_over


def check_trainer(trainer: Any, algorithm_name: str) -> None:
    """Raises for options and callbacks that cannot work where ranks claim their batches."""
    for callback in trainer.checkpoint_callbacks:
        found = seams.saves_within_epochs(callback)
        if found is not None and found[0] == "every_n_train_steps":
            raise ValueError(
                'ranks must save together, got every_n_train_steps with data="claimed" and '
                f'strategy="{algorithm_name}", where ranks make different numbers of steps; use '
                "every_n_epochs, train_time_interval, or val_check_interval in the Trainer"
            )
