"""How ranks with different numbers of batches go through the same epochs and the same validations.

Else one would validate, save or end more often than another, and wait for it.  A rank asks all:

    before a validation                      VALIDATE
    after its last batch of an epoch         END_EPOCH; while another rank validates, it does too
    before an epoch                          GO_ON, or FINISHED: it has nothing to train on any more

So all ranks validate as often in an epoch as the one that does most often, and begin another epoch
until all are finished.  A rank that is finished before, for it has made `max_steps` steps, has
epochs without batches: it serves the others, saves with them, and adds nothing to what they log.

Why nobody waits for ever.  A meeting is over once every rank has come to one, and who waits there
serves those that have batches left.  Then

- all are at the end of the epoch, and end it; or
- some are to validate: all validate, and those go on with fewer batches left than before; or
- all are before an epoch: it begins where one of them is not finished.  That one has a batch in it,
  or counts as finished after it.  So epochs end where `max_steps` or `max_epochs` bound them; or
- they have come to different points: every rank raises an error that says so (`meeting`).

Ranks with as many batches as each other come to the same points by themselves, and ask nothing.
Ranks may have different numbers if they say so before training, or do not know them (streams), or
load their data anew in later epochs.

The private names of Lightning's loops, and of what they log and save, stand here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from lightning_dsgd.session.meeting import END_EPOCH, FINISHED, GO_ON, VALIDATE
from lightning_dsgd.session.session import Session
from lightning_dsgd.trainer import seams


class JointEpochs:
    """Keeps this rank's epochs in step with the others' for one training.

    Attributes:
        is_out: whether this rank had no batch in the epoch before

    Args:
        session: the session of all ranks
        trainer: the Trainer whose loops are taken over
        begin: called once the Trainer knows its batches, before training
    """

    def __init__(self, session: Session[Any], trainer: Any, begin: Callable[[], None]) -> None:
        self._session = session
        self._trainer = trainer
        self._begin = begin
        self.is_out = False
        _take_runs(trainer, self)

    @property
    def are_apart(self) -> bool:
        """Whether, as all ranks agree, ranks may have different numbers of batches."""
        training, trainer = self._session.training, self._trainer
        if training is None:
            return False
        is_unknown = math.isinf(trainer.num_training_batches)
        is_known_uneven = bool(training.is_uneven)
        return is_known_uneven or is_unknown or trainer.reload_dataloaders_every_n_epochs > 0

    @property
    def num_steps(self) -> int:
        """How many steps of `max_steps` are made."""
        return int(self._trainer.global_step)

    def train(self) -> None:
        """Makes all epochs, as Lightning's loop does; ranks agree on whether there is one more."""
        loop = self._trainer.fit_loop
        loop.setup_data()
        self.begin()
        if self._is_training_over() or self._trainer.limit_train_batches == 0:
            return
        loop.reset()
        loop.on_run_start()
        while not self._is_training_over():
            try:
                loop.on_advance_start()
                loop.advance()
                loop.on_advance_end()
            except StopIteration:
                break
            finally:
                loop.on_iteration_done()
        loop._restarting = False
        loop.on_run_end()

    def _is_training_over(self) -> bool:
        """Returns whether no epoch follows; where ranks are apart, the same on each."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        if not self.are_apart:
            return bool(loop.done)
        is_finished = bool(
            0 <= loop.max_steps <= self.num_steps
            or 0 <= loop.max_epochs <= loop.epoch_progress.current.processed
            or (trainer.should_stop and loop._can_stop_early)
            or self.is_out
        )
        ends = self._session.meet(FINISHED if is_finished else GO_ON) and is_finished
        if ends:
            bool(loop.done)  # which logs why training ends
        elif is_finished:
            loop.epoch_loop._restarting = False  # else a resume would begin with a batch
        return ends

    def begin(self) -> None:
        """Begins, where the Trainer knows its batches and is about to train."""
        self._begin()
        if self.are_apart:
            _monitor_alike(self._trainer, self._session.text_of_rank_0)

    def make_batches(self, fetcher: Any) -> None:
        """Makes an epoch's batches, as Lightning's loop does."""
        loop = self._trainer.fit_loop.epoch_loop
        type(loop).run(loop, fetcher)

    def after_batches(self) -> None:
        """Joins the others once this rank has done all its batches of this epoch."""
        if not self.are_apart or self._session.has_ended:
            return
        self._session.end_batch()  # if `on_train_batch_start` has skipped the rest
        batches = self._trainer.fit_loop.epoch_loop.batch_progress
        self.is_out = batches.current.ready == 0
        if self.is_out:
            self._session.follow()
        self.await_end()
        _save_anyhow(self._trainer)
        mine = [] if self.is_out else logged_over_all(self._trainer)
        theirs = self._session.texts(json.dumps(mine))
        if self.is_out:
            log_nothing(self._trainer, [each for text in theirs for each in json.loads(text)])

    def await_end(self) -> None:
        """Waits until all ranks have done their batches; validates where others do."""
        while not self._session.meet(END_EPOCH):
            self.validate()

    def validate(self) -> None:
        """Validates as the Trainer does after a batch, where all ranks do."""
        _save_anyhow(self._trainer)
        _validate(self._trainer)

    def before_validation(self) -> None:
        """Waits for all ranks before this one validates, where they may have different numbers."""
        if self.are_apart:
            self._session.meet(VALIDATE)
            _save_anyhow(self._trainer)

    def before_stop(self) -> None:
        """Has callbacks that save where training is stopped do so on all ranks."""
        if self.are_apart:
            _forget_saved_step(self._trainer.checkpoint_callbacks)


def take_validation_data(trainer: Any, check: Callable[[list[float]], None]) -> None:
    """Has the Trainer call this with the numbers of batches of the loaders of an evaluation."""
    for loop in _evaluations(trainer):
        loop.setup_data = partial(_set_up_data, loop, check)


def give_back(trainer: Any) -> None:
    """Gives back the Trainer's own methods, in whose place others stand."""
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, *_evaluations(trainer)
    for owner in (*loops, *trainer.checkpoint_callbacks):
        for name in _TAKEN:
            vars(owner).pop(name, None)


_TAKEN: Final = (
    *("run", "setup_data", "_monitor_candidates"),
    # Of the loop of batches, where these are claimed: see `trainer.claimed`.
    *("_should_check_val_fx", "_num_ready_batches_reached", "_accumulated_batches_reached"),
    "update_lr_schedulers",
)
"""The methods in whose place others may stand."""


def _take_runs(trainer: Any, epochs: JointEpochs) -> None:
    batches = trainer.fit_loop.epoch_loop
    validation = batches.val_loop

    def make_batches(fetcher: Any) -> None:
        epochs.make_batches(fetcher)
        epochs.after_batches()

    def validate() -> Any:
        if not trainer.sanity_checking:
            epochs.before_validation()
        return type(validation).run(validation)

    trainer.fit_loop.run = epochs.train
    batches.run, validation.run = make_batches, validate


def _set_up_data(loop: Any, check: Callable[[list[float]], None]) -> None:
    before = loop._combined_loader
    type(loop).setup_data(loop)
    if loop._combined_loader is not before:
        check(loop._max_batches)


def _evaluations(trainer: Any) -> list[Any]:
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def _validate(trainer: Any) -> None:
    """Validates as the Trainer does after a batch."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    trainer.validating = True
    if not seams.is_accumulating(trainer):
        trainer.lightning_module.on_validation_model_zero_grad()
    type(loop).run(loop)
    trainer.training = True


_HOW: Final = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "metric_attribute"),
)
"""What a rank that has logged nothing must know to make the same entry, beside the reduction."""


def logged_over_all(trainer: Any) -> list[list[Any]]:
    """Returns how this rank logs the values of this epoch that it asks all ranks for.

    Each is what Lightning's `log` is told, and the dtype of the value, or "" for a metric.
    """
    logged: list[list[Any]] = []
    for entry in trainer.fit_loop.epoch_loop._results.values():
        meta, sync = entry.meta, entry.meta.sync
        is_asked = (sync.should and not sync.rank_zero_only) if entry.is_tensor else True
        is_to_come = meta.fx == "on_train_epoch_end"  # known from an epoch before
        if is_asked and meta.on_epoch and (is_to_come or not entry.has_reset):
            dtype = str(entry.value.dtype).removeprefix("torch.") if entry.is_tensor else ""
            logged.append([_how(entry), dtype])
    return logged


def _how(entry: Any) -> dict[str, Any]:
    """Returns what Lightning's `log` was told for an entry, in words that JSON can hold."""
    meta = entry.meta
    told = {name: getattr(meta, name) for name in _HOW} | {"reduce_fx": meta.reduce_fx.__name__}
    return told | {"sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}


def key_of(how: dict[str, Any]) -> str:
    """Returns Lightning's key of a value that is logged so."""
    return f"{how['fx']}.{how['name']}"


def _make_entry(trainer: Any, how: dict[str, Any], value: Any) -> Any:
    """Makes and returns the entry that this rank's own log would make, had it logged as others.

    Lightning refuses a later log of a module's whose entry differs in anything.
    """
    results = trainer.fit_loop.epoch_loop._results
    # Not over all ranks yet: it would ask them at once for a value of a step.
    told = how | {"sync_dist": False}
    results.log(**told, value=value, batch_size=1, sync_dist_fn=trainer.strategy.reduce)
    entry = results[key_of(how)]
    entry.meta.sync.should = how["sync_dist"]
    return entry


def log_nothing(trainer: Any, logged: list[list[Any]]) -> None:
    """Has this rank ask for values that others log over all ranks, to which it adds nothing."""
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    for how, dtype in logged:
        key = key_of(how)
        if key not in results:
            value = (
                torch.zeros((), device=module.device)
                if dtype
                else module.get_submodule(how["metric_attribute"])
            )
            made = _make_entry(trainer, how, value)
            if dtype:
                made.reset()
        entry = results[key]
        if entry.has_reset:
            entry.has_reset, entry._update_count, entry._computed = False, 1, None
        if dtype:
            entry.value = entry.value.to(getattr(torch, dtype))


def logged_alone(trainer: Any) -> list[list[Any]]:
    """Returns how this rank logs the values of this epoch that it asks nobody for, and the values.

    Each is what Lightning's `log` is told, and the epoch's value so far.
    """
    logged: list[list[Any]] = []
    for entry in trainer.fit_loop.epoch_loop._results.values():
        meta, sync = entry.meta, entry.meta.sync
        is_asked = sync.should and not sync.rank_zero_only
        if not entry.is_tensor or is_asked or entry.has_reset:
            continue
        is_mean = meta.on_epoch and meta.is_mean_reduction
        value = entry.value / entry.cumulated_batch_size if is_mean else entry.value
        logged.append([_how(entry), float(value)])
    return logged


def logged_for_steps(trainer: Any) -> dict[str, float]:
    """Returns what this rank has logged for its last step in this epoch, by Lightning's keys."""
    return {
        key: float(entry._forward_cache)
        for key, entry in trainer.fit_loop.epoch_loop._results.items()
        if entry.is_tensor and entry.meta.on_step and not entry.has_reset
    }


def show_last_step(trainer: Any, key: str, value: float) -> None:
    """Shows a value of a step where this rank has logged none, as if it were of its last step."""
    results, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    entry, shown = results[key], torch.tensor(value, device=trainer.lightning_module.device)
    entry._forward_cache = shown
    name, of_step = results._forked_name(entry, on_step=True)
    connector._callback_metrics.update({name: shown, of_step: shown})
    if entry.meta.logger:
        connector._logged_metrics[of_step] = shown


def log_as_others(trainer: Any, how: dict[str, Any], value: float) -> None:
    """Has this rank show a value that others have logged, each for itself, and this one has not."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.lightning_module.device
    key, given = key_of(how), torch.tensor(value, device=device)
    if key in results:
        results.update_metrics(key, given, 1)
    else:
        _make_entry(trainer, how, given)


def _save_anyhow(trainer: Any) -> None:
    """Has callbacks come to an epoch's or a validation's end although this rank has made no step.

    A callback does nothing there where it has saved at this step, which is so on some ranks alone.
    """
    callbacks = trainer.checkpoint_callbacks
    _forget_saved_step([c for c in callbacks if not getattr(c, "_every_n_train_steps", 0)])


def _forget_saved_step(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = -1


def _monitor_alike(trainer: Any, text_of_rank_0: Callable[[str], str]) -> None:
    """Has callbacks name and choose what they save by rank 0's values, on all ranks."""
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_monitor_candidates"):
            callback._monitor_candidates = partial(_monitored, callback, text_of_rank_0)


def _monitored(
    callback: Any, text_of_rank_0: Callable[[str], str], trainer: Any
) -> dict[str, torch.Tensor]:
    mine = type(callback)._monitor_candidates(callback, trainer)
    text = json.dumps({name: value.item() for name, value in mine.items()})
    return {name: torch.tensor(value) for name, value in json.loads(text_of_rank_0(text)).items()}
