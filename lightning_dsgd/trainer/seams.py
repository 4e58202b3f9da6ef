"""Private names of Lightning's that this package uses, but for those of its base classes.

A private name may change in any release.  So each stands here once, in a function that says what it
is for.  Those by which ranks go through the same epochs stand in `joint`, those of claimed batches
in `claimed`, those of a rank that joins in `elastic.handover`.  A test looks all of them up in both
of Lightning's packages.
"""

from __future__ import annotations

import importlib
import inspect
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

# ---- the Trainer ----


def take_signals(
    trainer: Any, on_sigterm: Callable[..., None], on_requeue: Callable[..., None]
) -> None:
    """Has the Trainer call these functions for SIGTERM, and for SLURM's signal to requeue."""
    trainer._signal_connector._sigterm_notifier_fn = on_sigterm
    trainer._signal_connector._slurm_sigusr_handler_fn = on_requeue


def ask_nobody_for_sigterm(trainer: Any) -> None:
    """Leaves out the broadcast before every batch that asks whether a rank has got SIGTERM."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = list  # asks nobody


def give_back(trainer: Any) -> None:
    """Undoes what `take_signals` and `ask_nobody_for_sigterm` have done.

    The Trainer would put back the handler of Ctrl-C that it has found, which is the session's; the
    session puts back the script's own.
    """
    trainer._signal_connector._original_handlers.pop(signal.SIGINT, None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)


def give_mesh(module: Any, mesh: Any) -> None:
    """Has `configure_model` find a mesh under `self.device_mesh`."""
    module._device_mesh = mesh


def seed_workers(trainer: Any, loader: Any) -> None:
    """Seeds a loader's workers, where the Trainer would if they had nothing to call yet."""
    connector = _lightnings(trainer, "trainer.connectors.data_connector")
    connector._auto_add_worker_init_fn(loader, trainer.global_rank)


def requeue_signal(trainer: Any) -> int | None:
    """Returns the signal for which the Trainer saves, and has SLURM requeue the job, or None."""
    environment = trainer._accelerator_connector.cluster_environment
    asks = getattr(environment, "auto_requeue", False)
    return environment.requeue_signal if asks else None


def requeue(trainer: Any, signum: int) -> None:
    """Saves, and has SLURM requeue the job, as Lightning does by itself."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signum, None)


def interruption(trainer: Any, signum: int) -> type[BaseException]:
    """Returns the class of what the Trainer ends with after a signal."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt
    kind: type[BaseException] = _lightnings(trainer, "utilities.exceptions").SIGTERMException
    return kind


def _lightnings(trainer: Any, name: str) -> Any:
    """Returns a module of that package of Lightning's whose Trainer this is, or is based on."""
    of_trainer = ".trainer.trainer"
    bases = [kind.__module__ for kind in type(trainer).__mro__]
    package = next(
        base.removesuffix(of_trainer)
        for base in bases
        if base in (f"lightning.pytorch{of_trainer}", f"pytorch_lightning{of_trainer}")
    )
    return importlib.import_module(f"{package}.{name}")


def validates_by_time(trainer: Any) -> bool:
    """Returns whether `val_check_interval` is a time."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def detects_anomalies(trainer: Any) -> bool:
    """Returns whether the Trainer was made with `detect_anomaly=True`."""
    return bool(trainer._detect_anomaly)


def current_hook(module: Any) -> str | None:
    """Returns the name of the hook that the Trainer is calling."""
    name: str | None = getattr(module, "_current_fx_name", None)
    return name


def num_optimizer_steps(trainer: Any) -> int:
    """Returns how many optimizer steps were made, counted as the Trainer does for its loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def num_steps_planned(trainer: Any) -> float:
    """Returns how many optimizer steps this rank is to make; inf where Lightning cannot tell."""
    schedules = any(len(scheduling) > 1 for scheduling in _accumulation(trainer))
    planned = -1 if schedules else trainer.estimated_stepping_batches
    return float("inf") if planned < 0 else float(planned)


def most_accumulated(trainer: Any) -> int:
    """Returns of how many batches a step is made at most, in any epoch."""
    scheduled = [number for each in _accumulation(trainer) for number in each.values()]
    most: int = max([trainer.accumulate_grad_batches, *scheduled])
    return most


def schedules_accumulation(trainer: Any) -> bool:
    """Returns whether callbacks schedule of how many batches a step is made."""
    return bool(_accumulation(trainer))


def _accumulation(trainer: Any) -> list[dict[int, int]]:
    """Returns what the callbacks schedule: from which epoch on, of how many batches a step is."""
    callbacks = trainer.callbacks
    return [c.scheduling for c in callbacks if is_a("GradientAccumulationScheduler", c)]


def is_accumulating(trainer: Any) -> bool:
    """Returns whether the optimizer does not step after the current batch."""
    return bool(trainer.fit_loop._should_accumulate())


def clip(trainer: Any, optimizer: Any) -> None:
    """Clips an optimizer's gradients as in a training step, unless the step itself does."""
    trainer.precision_plugin._clip_gradients(
        trainer.lightning_module,
        optimizer,
        trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
    )


def fetches_itself(module: Any) -> bool:
    """Returns whether a module's `training_step` takes its batches from an iterator."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


# ---- more than one micro-batch in a batch of the loop ----


def training_step(trainer: Any, batch: Any) -> Any:
    """Computes a batch that Lightning's loop has not fetched, as the loop would."""
    loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = _call(trainer)._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
    results = trainer._results
    if results is not None:
        results.batch, results.batch_size = batch, None
    kwargs = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
    return _call(trainer)._call_strategy_hook(trainer, "training_step", *kwargs.values())


def backward(trainer: Any, loss: Any, optimizer: Any) -> None:
    """Makes a backward pass, as Lightning's loop would."""
    _call(trainer)._call_strategy_hook(trainer, "backward", loss, optimizer)


def _call(trainer: Any) -> Any:
    return _lightnings(trainer, "trainer.call")


def logged(trainer: Any) -> dict[str, tuple[Any, ...]]:
    """Returns what was logged so far in this epoch, to compare with and to return to."""
    entries = trainer.fit_loop.epoch_loop._results.items()
    return {key: tuple(getattr(entry, n, None) for n in _VALUES) for key, entry in entries}


def logged_since(trainer: Any, before: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, str]]:
    """Returns what was logged for a step since then, and how all ranks' values are reduced.

    That is the name of a reduction, or "" for a value that is this rank's alone.
    """
    logs: dict[str, tuple[Any, str]] = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta, value = entry.meta, entry._forward_cache
        is_new = key not in before or before[key][0] is not value
        if meta.on_step and entry.is_tensor and value is not None and is_new:
            asks = meta.sync.should and not meta.sync.rank_zero_only
            logs[key] = value, str(meta.sync.op or "mean").lower() if asks else ""
    return logs


def forget_logs(trainer: Any, before: dict[str, tuple[Any, ...]]) -> None:
    """Forgets what was logged since then; metrics keep theirs."""
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        if not entry.is_tensor:
            continue
        if key not in before:
            entry.reset()
            continue
        for name, value in zip(_VALUES, before[key], strict=True):
            if value is not None:
                setattr(entry, name, value)


_VALUES = ("_forward_cache", "value", "cumulated_batch_size", "has_reset")


def show_log(trainer: Any, key: str, value: float) -> None:
    """Shows a value in the place of what `training_step` has logged last for a step."""
    entry = trainer.fit_loop.epoch_loop._results.get(key)
    if entry is not None and entry._forward_cache is not None:
        entry._forward_cache = torch.full_like(entry._forward_cache, value)
        if entry.meta.sync.should:  # the epoch's value is one over all ranks, and of one dtype
            entry.has_reset = False
            dtype = torch.promote_types(entry.value.dtype, entry._forward_cache.dtype)
            entry.value = entry.value.to(dtype)


# ---- what a rank restores ----


def is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint was saved after an epoch had begun and before it was over."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return bool(epochs["processed"] < epochs["started"])


def leave_loaders_out(checkpoint: Mapping[str, Any]) -> None:
    """Removes from a checkpoint how far its loaders are, which other loaders cannot read."""
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def restore_from(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Has the Trainer restore this checkpoint where it would restore a file's."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint
    forget_loader(trainer)  # if an optimizer's schedule has asked for its length


def forget_loader(trainer: Any) -> None:
    """Has the loader of the training made and prepared anew, if that was done already."""
    trainer.fit_loop._combined_loader = None


def be_silent() -> None:
    """Leaves logs and messages to another rank."""
    rank_zero_only.rank = 1  # type: ignore[attr-defined]


# ---- how ranks are started ----


def started_by(launcher: Any) -> list[Any]:
    """Returns the processes that a launcher has started."""
    return list(getattr(launcher, "procs", []))


def take_over_launcher(
    launcher: Any, launch: Callable[..., Any], run_rank: Callable[..., None]
) -> None:
    """Has a launcher that forks or spawns call these functions in place of its own methods."""
    launcher.launch = launch
    launcher._wrapping_function = run_rank


def launch(launcher: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts the ranks, as the launcher does by itself."""
    return type(launcher).launch(launcher, *args, **kwargs)


def run_rank(launcher: Any, local_rank: int, *args: Any) -> None:
    """Runs a rank, as the launcher does by itself."""
    type(launcher)._wrapping_function(launcher, local_rank, *args)


def quiet_observer() -> None:
    """Keeps Lightning's observer from killing this process before it can say why it ends.

    The observer would do so when a child has died.
    """
    for thread in threading.enumerate():
        if thread.name == "child-process-observer" and hasattr(thread, "_child_processes"):
            thread._child_processes = []


# ---- callbacks that look at a clock ----


def is_a(name: str, callback: object) -> bool:
    """Returns whether an object is Lightning's class of this name, from either of its packages."""
    return any(base.__name__ == name for base in type(callback).__mro__)


def is_timer(callback: Any) -> bool:
    """Returns whether a callback is a Timer that ends training after some time."""
    return is_a("Timer", callback) and callback._duration is not None


def is_verbose(timer: Any) -> bool:
    """Returns whether a Timer is to say that the time is up."""
    return bool(getattr(timer, "_verbose", False))


def is_time_up(timer: Any) -> bool:
    """Returns whether a Timer has run for as long as it may."""
    return bool(timer.time_elapsed() >= timer._duration)


def ask_timer(timer: Any, trainer: Any) -> None:
    """Has a Timer ask rank 0 whether the time is up; all ranks have to."""
    type(timer)._check_time_remaining(timer, trainer)


def take_timer(timer: Any, ask: Callable[..., None]) -> None:
    """Has a Timer call `ask` with itself and the Trainer where it would ask rank 0."""
    timer._check_time_remaining = lambda trainer: ask(timer, trainer)


def saves_by_time(callback: Any) -> bool:
    """Returns whether a callback is a ModelCheckpoint with `train_time_interval`."""
    return getattr(callback, "_train_time_interval", None) is not None


def is_time_to_save(saver: Any, now: float) -> bool:
    """Returns whether a ModelCheckpoint's interval is over."""
    last = saver._last_time_checked
    return last is not None and now - last >= saver._train_time_interval.total_seconds()


def take_saver(saver: Any, after_batch: Callable[..., None]) -> None:
    """Has a ModelCheckpoint call this with itself and its hook's arguments after every batch."""
    saver.on_train_batch_end = lambda *args: after_batch(saver, *args)


def after_batch(saver: Any, is_due: bool, are_apart: bool, *args: Any) -> None:
    """Calls a ModelCheckpoint's hook after a batch, with an answer in place of its clock's.

    Where ranks are apart, a checkpoint that is due is saved whatever this rank's step is, and also
    if this is the last batch of its epoch, after which Lightning would wait for a validation.
    """
    interval, saves_at_end = saver._train_time_interval, saver._save_on_train_epoch_end
    try:
        if is_due:
            saver._last_time_checked = float("-inf")
        else:
            saver._train_time_interval = None
        if is_due and are_apart:
            saver._last_global_step_saved = -1
            saver._save_on_train_epoch_end = True
        type(saver).on_train_batch_end(saver, *args)
    finally:
        saver._train_time_interval = interval
        saver._save_on_train_epoch_end = saves_at_end


def give_back_callback(callback: Any) -> None:
    """Undoes what `take_timer` or `take_saver` has done."""
    for name in ("_check_time_remaining", "on_train_batch_end"):
        vars(callback).pop(name, None)


def saves_within_epochs(callback: Any) -> tuple[str, Any] | None:
    """Returns the option by which a ModelCheckpoint saves within an epoch, and its value."""
    for option in ("every_n_train_steps", "train_time_interval"):
        value = getattr(callback, f"_{option}", None)
        if value:
            return option, value
    return None
