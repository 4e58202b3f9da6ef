"""What ranks of Lightning's Trainer take over from each other, by its private names.

    a newcomer, from a member        the member's state before a batch (`give`, `take`), besides the
                                     weights: as bytes that torch loads without pickles
    the first member, from rank 0    the loggers' runs, and the progress bar

As in `trainer.seams`, each private name stands in a function that says what it is for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.transport import Transport

_NEVER_AGAIN: Final = 1 << 40
"""More epochs than any training has."""
_SIZE = torch.zeros(1, dtype=torch.int64)

# ---- a newcomer, from a member ----


def give(net: Transport, newcomers: Sequence[int], trainer: Any, session: dict[str, Any]) -> None:
    """Gives this rank's state to these ranks of the view.

        checkpoint       what Lightning saves: optimizers, schedulers, callbacks, loops; of a batch
                         that is about to begin
        random_states    of all generators that training draws from
        session          what the members have agreed on and counted so far

    It is loaded with `weights_only=True`: tensors, numbers, text, and lists and dicts of them.
    """
    state = {
        "checkpoint": state_before_batch(trainer),
        "random_states": record.random_states(),
        "session": session,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    given = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    net.expect_at_most(given.nbytes)
    for newcomer in newcomers:
        net.send(torch.tensor([given.nbytes]), newcomer)
    for newcomer in newcomers:
        net.recv(_SIZE, newcomer).wait()  # it expects so much
        net.send(given, newcomer)


def take(net: Transport, giver: int) -> dict[str, Any]:
    """Takes the state that the giver gives."""
    size = net.recv(_SIZE, giver).wait()
    net.expect_at_most(int(size))
    net.send(size, giver)
    taken: Tensor = net.recv(torch.empty(0, dtype=torch.uint8), giver).wait()
    buffer = io.BytesIO(taken.numpy().tobytes())
    try:
        state: dict[str, Any] = torch.load(buffer, "cpu", weights_only=True)
    except Exception as err:
        raise ValueError(
            "what callbacks and modules save must be tensors, numbers, text, lists and dicts for a "
            f"rank to join, got from the rank that gives its state: {err}; change their state_dict"
        ) from err
    return state


def position(trainer: Any) -> list[int]:
    """Returns the epoch and the number of the batch that is about to begin.

    The result is empty where a loop restarted here would first look whether to validate.
    """
    loop = trainer.fit_loop.epoch_loop
    every = trainer.val_check_batch
    if loop._should_check_val_epoch() and every is not None and every != float("inf"):
        counts_on = trainer.check_val_every_n_epoch is None
        index = loop.total_batch_idx if counts_on else loop.batch_idx
        if index % every == 0:
            return []
    return [int(trainer.current_epoch), int(loop.batch_idx)]


def state_before_batch(trainer: Any) -> dict[str, Any]:
    """Returns a checkpoint of this rank from which another begins with the batch about to begin.

    Left out is what each rank has from its own script: hyperparameters, and its loader's place.
    """
    dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoint: dict[str, Any] = trainer.strategy.noted(dumped, trainer)
    for name in [name for name in checkpoint if "hparams" in name or "hyper_parameters" in name]:
        del checkpoint[name]
    loop = checkpoint["loops"]["fit_loop"]
    loop["state_dict"].pop("combined_loader", None)
    progress = loop["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(("ready", "started", "processed"), counts["completed"]))
    on_host: dict[str, Any] = apply_to_collection(checkpoint, Tensor, Tensor.cpu)
    return on_host


def loaders_of(trainer: Any) -> dict[str, Any]:
    """Returns which loaders were made, and when each is made again: alike on all ranks."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    return {
        "has_validation": validation._combined_loader is not None,
        "every": trainer.reload_dataloaders_every_n_epochs,
        "training_from": trainer.fit_loop._last_train_dl_reload_epoch,
        "validation_from": validation._last_val_dl_reload_epoch,
    }


def have_loaders_as(trainer: Any, loaders: dict[str, Any]) -> None:
    """Makes the validation loaders that the other ranks have; making one asks all ranks."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    if loaders["has_validation"] and validation._combined_loader is None:
        trainer.validating = True
        validation.setup_data()
        trainer.training = True
    elif not loaders["has_validation"]:
        validation._combined_loader = None
    trainer.reload_dataloaders_every_n_epochs = loaders["every"]
    trainer.fit_loop._last_train_dl_reload_epoch = loaders["training_from"]
    validation._last_val_dl_reload_epoch = loaders["validation_from"]


def make_loaders_again(trainer: Any) -> None:
    """Has the loaders made anew before the next epoch and the next validation, once."""
    trainer.reload_dataloaders_every_n_epochs = (
        trainer.reload_dataloaders_every_n_epochs or _NEVER_AGAIN
    )
    trainer.fit_loop._last_train_dl_reload_epoch = float("-inf")
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = float("-inf")


# ---- the first member, from rank 0 ----


def log_versions(trainer: Any) -> list[Any]:
    """Returns the version under which each logger writes; None where it has none."""
    return [getattr(logger, "version", None) for logger in trainer.loggers]


def logs_nothing() -> bool:
    """Returns whether this rank leaves logs and messages to rank 0."""
    return bool(getattr(rank_zero_only, "rank", 0))


def take_over_logs(trainer: Any, versions: list[Any], suffix: str) -> None:
    """Has loggers go on beside rank 0's, in a run that names rank 0's; shows progress.

    Args:
        trainer: the Trainer of a rank that was not rank 0
        versions: the versions of rank 0's loggers
        suffix: added to the versions
    """
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    for logger, version in zip(trainer.loggers, versions, strict=True):
        if hasattr(logger, "_version") and hasattr(logger, "_experiment"):
            name = f"version_{version}" if isinstance(version, int) else version
            logger._version = f"{name}_{suffix}"
            logger._experiment = None
        elif hasattr(logger, "_wandb_init") and not logger._wandb_init.get("id"):
            # With an id of the user's, W&B goes on in that run.
            logger._wandb_init |= {"name": f"{version}_{suffix}", "group": version}
            logger._experiment = None
    bar = trainer.progress_bar_callback
    if bar is not None and hasattr(bar, "init_train_tqdm"):
        bar.enable()
        bar.train_progress_bar = bar.init_train_tqdm()
