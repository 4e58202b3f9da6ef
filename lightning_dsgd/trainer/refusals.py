"""What cannot work is refused before the first batch, on every rank, with the way out."""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from torchmetrics import Metric

from lightning_dsgd.agreement import by_rank, everyones
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.written import as_strategy, written
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.sessions import TrainerSession

# ---- when the ranks have met ----


def check_searches(trainer: Any, algorithm: Algorithm) -> None:
    """Raises for a search callback, and names the way out, before Lightning refuses it."""
    searches = {"BatchSizeFinder": "batch size"}
    if trainer.state.fn == "fit":
        searches["LearningRateFinder"] = "learning rate"
    for callback in trainer.callbacks:
        for name, what in searches.items():
            if seams.is_a(name, callback):
                raise ValueError(
                    f"a {what} must be searched on one device, got {type(callback).__name__} "
                    f'with strategy="{algorithm.name}"; search with Trainer(devices=1), '
                    "then train with what was found"
                )


# ---- before training ----


def check_trainer(trainer: Any, algorithm: Algorithm) -> None:
    """Raises for options and callbacks of the Trainer that cannot work."""
    plugin = type(trainer.precision_plugin).__name__
    if "FSDP" in plugin or "DeepSpeed" in plugin:
        raise ValueError(
            f"the precision plugin must work on whole parameters, got {plugin} with "
            f'strategy="{algorithm.name}"; use precision="16-mixed" or "bf16-mixed"'
        )
    for callback in trainer.callbacks:
        if seams.is_a("ModelPruning", callback) and not algorithm.traits.lockstep:
            raise ValueError(
                "ranks must prune the same weights, got "
                f'{type(callback).__name__} with strategy="{algorithm.name}", whose ranks have '
                'weights of their own; use strategy="allreduce", or prune after training'
            )
    if algorithm.traits.takes_pieces and (most := seams.most_accumulated(trainer)) > 1:
        given, way_out = algorithm.pieces_option
        raise ValueError(
            f"{given} sends a gradient during its backward pass, so a step must have one, got "
            f"accumulate_grad_batches={most}; set {way_out}"
        )
    if seams.validates_by_time(trainer):
        raise ValueError(
            "ranks must evaluate after the same batch, got val_check_interval as a time, which "
            f'every rank measures by itself, with strategy="{algorithm.name}"; use a number of '
            "batches"
        )


def check_may_be_lost(trainer: Any) -> None:
    """Raises for callbacks and metrics that wait for a rank that may be lost."""
    for callback in trainer.callbacks:
        if seams.is_timer(callback) or seams.saves_by_time(callback):
            raise ValueError(
                "callbacks must not look at a clock where a rank may be lost, got "
                f'{type(callback).__name__} with on_loss="continue"; use max_epochs, max_steps '
                'or every_n_train_steps, or on_loss="end"'
            )
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, Metric):
            raise ValueError(
                "torchmetrics asks all ranks by itself, also those that are lost, got the "
                f'metric {name!r} with on_loss="continue"; log tensors with sync_dist=True, or '
                'use on_loss="end"'
            )


def check_number_of_processes(world_size: int, num_nodes: int, devices: int) -> None:
    """Raises unless each device has a process."""
    processes = num_nodes * devices
    if world_size != processes:
        raise ValueError(
            f"each device needs a process of its own, got {world_size} processes for "
            f"devices={devices} and num_nodes={num_nodes}; start {processes} "
            f"processes, or set devices and num_nodes so that their product is {world_size}"
        )


def check_units(algorithm: Algorithm, *, takes_units: bool) -> None:
    """Raises where a strategy and its algorithm do not agree on how the ranks share a step."""
    if algorithm.traits.sums_units == takes_units:
        return
    whose = "share the micro-batches of a step" if takes_units else "each make their own step"
    raise ValueError(
        f"the ranks of this strategy {whose}, got {written(algorithm)}; write "
        f"{as_strategy(algorithm)}"
    )


def check_sync_batchnorm(algorithm: Algorithm, device: torch.device) -> None:
    """Raises for `sync_batchnorm=True` where it cannot work."""
    got = f'got sync_batchnorm=True with strategy="{algorithm.name}"'
    way_out = (
        "leave it out (BatchNorm statistics are averaged when the model is evaluated and saved)"
    )
    if not algorithm.traits.lockstep:
        raise ValueError(
            f"sync_batchnorm must be off where ranks do not step together, {got}; {way_out}, "
            'or, on GPUs, use strategy="allreduce"'
        )
    if algorithm.traits.sums_units:
        raise ValueError(
            "sync_batchnorm must be off where ranks compute different numbers of micro-batches, "
            f'{got}; {way_out}, or use strategy="allreduce"'
        )
    if algorithm.traits.takes_pieces:
        given, without = algorithm.pieces_option
        raise ValueError(
            f"sync_batchnorm must be off with {given}, as both would sum during the backward "
            f"pass, in an order that differs between ranks, {got}; {way_out}, or set {without}"
        )
    if device.type == "cpu":
        raise ValueError(
            "sync_batchnorm must be off on CPUs, for which torch has no SyncBatchNorm, "
            f"{got}; {way_out}"
        )


def check_numbers_of_batches(session: TrainerSession, algorithm: Algorithm) -> bool:
    """Raises, on every rank, where ranks with other numbers of batches wait for each other.

    Ranks may have different numbers, but then all must have some, and none may save within an
    epoch.

    Returns:
        Whether ranks have different numbers of batches.
    """
    training = session.training
    if training is None:
        return False
    trainer = training.trainer
    texts = everyones(session.meetings, f"{trainer.num_training_batches} batches an epoch")
    if len(set(texts)) == 1:
        return False
    got = f'got {by_rank(texts)}, with strategy="{algorithm.name}"'
    if any(text.startswith("0 ") for text in texts):
        raise ValueError(f"every rank must have batches to train on, {got}; {_HAVE_BATCHES}")
    _check_saves(trainer, f"{got} and")
    return True


def check_validation_data(session: TrainerSession, num_batches: list[float]) -> None:
    """Raises, on every rank, where some ranks have no batch of a loader of which others have."""
    texts = session.texts(json.dumps(num_batches))
    for index, numbers in enumerate(zip(*map(json.loads, texts), strict=False)):
        if 0 in numbers and any(numbers):
            raise ValueError(
                "every rank must have batches to evaluate on, got "
                f"{by_rank([f'{number} batches' for number in numbers])} of evaluation loader "
                f"{index}; {_HAVE_BATCHES}"
            )


_HAVE_BATCHES: Final = (
    "give every rank at least one (Lightning's sampler repeats samples for that), or train with "
    "fewer ranks"
)


def _check_saves(trainer: Any, got: str) -> None:
    for callback in trainer.checkpoint_callbacks:
        found = seams.saves_within_epochs(callback)
        if found is not None:
            option, value = found
            raise ValueError(
                f"ranks must save as often as each other, {got} {option}={value}; use "
                "every_n_epochs, or give every rank as many batches"
            )
