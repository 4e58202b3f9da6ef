"""What every face is told by its arguments, and what it refuses of them."""

from __future__ import annotations

import re
import threading
from numbers import Real
from typing import Any

import torch
from torch.optim import LBFGS

from lightning_dsgd.algorithm import Algorithm, Conditions


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless an option is one of its choices."""
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {listed}, got {name}={value!r}")


def check_seconds(name: str, value: Any, example: float) -> None:
    """Raises unless an option is a number of seconds that a wait can take."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(
            f"{name} must be a number of seconds, got {name}={value!r}; try {name}={example}"
        )
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{name} must be positive and at most {threading.TIMEOUT_MAX:.0f}, got {name}={value}; "
            f"try {name}={example}"
        )


def check_loss(on_loss: str, min_ranks: Any, transport: str, max_ranks: int | None = None) -> None:
    """Raises unless the options about lost and joining ranks can be honoured."""
    check_choice("on_loss", on_loss, ("end", "continue"))
    for name, value in (("min_ranks", min_ranks), ("max_ranks", max_ranks)):
        if value is not None and on_loss != "continue":
            raise ValueError(
                f'{name} needs on_loss="continue", got {name}={value!r} with '
                f'on_loss="{on_loss}"; set on_loss="continue", or leave {name} out'
            )
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_number or value < 1):
            raise ValueError(f"{name} must be at least 1, got {name}={value!r}; try 2")
    if on_loss == "continue" and transport == "mpi":
        raise ValueError(
            'MPI ends all ranks when one is lost, got on_loss="continue" with transport="mpi"; '
            'use transport="process_group"'
        )


def check_survival(
    algorithm: Algorithm,
    world_size: int,
    min_ranks: int | None,
    device: torch.device,
    max_ranks: int | None = None,
    num_shards: int = 1,
) -> None:
    """Raises unless training can go on with fewer ranks, or more, where some are lost or join.

    With shards, `min_ranks` counts the ranks in whole replicas, and None asks that more than
    half be left to vote, the broken replica's ranks included: one replica may be left.
    """
    if device.type != "cpu":
        raise ValueError(
            "training must be on CPUs to go on without a lost rank, as NCCL does not, got "
            f'on_loss="continue" on {device.type}; train on CPUs, or use on_loss="end"'
        )
    fewest, most = min_ranks or 2, max_ranks or world_size
    if most < world_size:
        raise ValueError(
            "max_ranks must be at least the number of ranks at the start, got "
            f"max_ranks={max_ranks} with {world_size} ranks; leave it out, or try "
            f"max_ranks={2 * world_size}"
        )
    one, many = "rank", "ranks"
    if num_shards > 1:
        one, many = f"replica of {num_shards} ranks", f"replicas of {num_shards} ranks"
        fewest, most = -(-(min_ranks or 1) // num_shards), world_size // num_shards
    for size in range(min(fewest, most), most + 1):
        try:
            algorithm.check(size, Conditions())
        except ValueError as err:
            ways = "min_ranks" if max_ranks is None else "min_ranks or max_ranks"
            if num_shards > 1:
                ways = f"min_ranks={num_shards * _fewest_suitable(algorithm, most)}"
            raise ValueError(
                f'with on_loss="continue", strategy="{algorithm.name}" must be able to go on with '
                f"{size} {one if size == 1 else many}, but {err}; choose it so that it suits "
                f'{fewest} to {most} {many}, set {ways}, or use on_loss="end"'
            ) from err


def _fewest_suitable(algorithm: Algorithm, most: int) -> int:
    """Returns the smallest size from which on an algorithm suits all sizes up to `most`."""
    for size in range(most - 1, 0, -1):
        try:
            algorithm.check(size, Conditions())
        except ValueError:
            return size + 1
    return 1


def describe(algorithm: Algorithm, evaluate: str, average_buffers: bool) -> str:
    """Says all options that must be equal on all ranks, as a text that is equal too."""
    options = {
        **algorithm.hyperparameters(),
        "evaluate": evaluate,
        "average_buffers": average_buffers,
    }
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return re.sub(" at 0x[0-9a-f]+", "", f'strategy="{algorithm.name}" with {listed}')


def check_optimizers(optimizers: list[Any], world_size: int, scaler: Any) -> None:
    """Raises for optimizers whose steps an algorithm cannot stand between."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and world_size > 1:
            raise ValueError(
                "the optimizer must compute one gradient a step, got LBFGS, whose number of "
                "gradients differs between ranks; use SGD or Adam"
            )
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                "where a loss is scaled for fp16, gradients must be unscaled before the step, got "
                f"a fused {type(optimizer).__name__}; use fused=False"
            )
