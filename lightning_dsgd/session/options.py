"""What every face is told by its arguments, and what it refuses of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypedDict

from torch.optim import LBFGS, Optimizer

from lightning_dsgd import keywords, wings
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.data.unequal import Samples
from lightning_dsgd.hyperparameters import above, at_least, one_of, setting
from lightning_dsgd.keywords import Table

_LONGEST: Final = int(threading.TIMEOUT_MAX)
"""The longest wait that Python can make, in seconds."""


def _seconds(default: float, doc: str) -> Any:
    return above(0, at_most=_LONGEST, default=default, doc=doc)


class Options(TypedDict, total=False):
    """The options of every face: name, type, rule, default and text."""

    transport: Annotated[
        str,
        one_of(
            *("auto", "process_group", "mpi"),
            default="auto",
            doc='"process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun '
            "has started the ranks as one MPI world that mpi4py can join, else TCP. With "
            'on_loss="continue" on GPUs, "process_group" also has NCCL make the sums',
        ),
    ]
    timeout_s: Annotated[
        float, _seconds(1800.0, "how long a rank waits for another before it gives up")
    ]
    heartbeat_timeout_s: Annotated[
        float, _seconds(20.0, "after how much silence a rank counts as lost")
    ]
    startup_timeout_s: Annotated[
        float,
        _seconds(300.0, "how long a rank waits for all others to start, and then to connect"),
    ]
    average_buffers: Annotated[
        bool,
        setting(
            default=True,
            doc="whether BatchNorm statistics are averaged with the weights; else rank 0's are "
            "evaluated and saved",
        ),
    ]
    check_finite: Annotated[
        bool,
        setting(
            default=False,
            doc="looks for NaN and inf in gradients and weights before they are sent; one more "
            "pass",
        ),
    ]
    share_device: Annotated[
        bool,
        setting(
            default=False,
            doc="whether several ranks may train on one GPU: all that they exchange then travels "
            "through the host's memory, as NCCL takes one rank per GPU",
        ),
    ]
    on_loss: Annotated[
        str,
        one_of(
            *("end", "continue"),
            default="end",
            doc='"end" ends the job, on all ranks, when one is lost; "continue" goes on without '
            'it, and with shards without its replica: see the page "Going on without a rank"',
        ),
    ]
    min_ranks: Annotated[
        int | None,
        at_least(
            1,
            default=None,
            doc='with on_loss="continue", how many ranks must be left; None means more than half '
            "of those before the loss. With shards a number counts the ranks in whole replicas, "
            "and None all that are left to vote, those of the broken replica included",
        ),
    ]


class WholeOptions(Options, total=False):
    """The options where each rank holds a whole replica."""

    data: Annotated[
        str,
        one_of(
            *("equal", "claimed"),
            default="equal",
            doc='"equal" deals each rank as many batches of an epoch; "claimed" lets ranks claim '
            "batches from it as they need them, so that a slow rank holds up nobody: see the page "
            '"Claimed batches"',
        ),
    ]
    weigh_by: Annotated[
        str,
        one_of(
            *("ranks", "samples"),
            default="ranks",
            doc='"ranks" counts all ranks alike in a mean; "samples" each by its samples since the '
            'last one, where batch sizes differ: see the page "Works with"',
        ),
    ]


def choose(owner: str, table: type[Table], given: Table) -> Table:
    """Returns a face's options, those left out with their defaults; raises for wrong ones."""
    chosen = keywords.choose(owner, table, given)
    _check_loss(chosen)
    return chosen


def check_data(chosen: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Raises unless ranks that train with the algorithm can divide and count the data so."""
    if chosen.get("weigh_by") == "samples" and not algorithm.traits.weighs_samples:
        raise ValueError(
            "means are weighted by samples where all ranks average at one point, got "
            f'weigh_by="samples" with strategy="{algorithm.name}"; use "hpsgd", "local_sgd", '
            '"diloco", "eager_sgd", "allreduce" or a sparse strategy, or weigh_by="ranks" with '
            "batches of one size"
        )
    if algorithm.traits.sums_units:
        _check_units(chosen, algorithm)
    elif chosen.get("data") == "claimed" and algorithm.traits.lockstep:
        raise ValueError(
            "ranks that wait for each other in every step must have as many batches as each other, "
            f'got data="claimed" with strategy="{algorithm.name}"; use data="equal", or a strategy '
            'that does not wait, such as "popsgd"'
        )


def _check_units(chosen: Mapping[str, Any], algorithm: Algorithm) -> None:
    if chosen.get("data") == "claimed":
        raise ValueError(
            f'strategy="{algorithm.name}" shares the batches of each step by itself, got '
            'data="claimed"; leave data out'
        )


def samples_of(
    chosen: Mapping[str, Any], optimizers: Callable[[], Sequence[Optimizer]]
) -> Samples | None:
    """Returns what counts the samples of these optimizers' steps; None: nobody asks for it."""
    return Samples(optimizers) if chosen.get("weigh_by") == "samples" else None


def ranks_of(chosen: Mapping[str, Any], opening: Any, face: str = "face.LoopFace") -> Any:
    """Returns the ranks of a session that goes on after a loss; None: a loss ends the job.

    Args:
        chosen: the options
        opening: how the ranks open their network
        face: the class in the wing `elastic` that says what leads the training
    """
    if chosen["on_loss"] == "end":
        return None
    module, _, name = face.partition(".")
    face_of = getattr(wings.load(f"elastic.{module}", 'on_loss="continue"'), name)
    members = wings.load("elastic.members", 'on_loss="continue"').Members
    return members(opening, face_of, chosen["min_ranks"], chosen.get("max_ranks"))


def _check_loss(chosen: Mapping[str, Any]) -> None:
    """Raises unless the options about lost and joining ranks can be honoured."""
    on_loss = chosen["on_loss"]
    for name in ("min_ranks", "max_ranks"):
        value = chosen.get(name)
        if value is not None and on_loss != "continue":
            raise ValueError(
                f'{name} needs on_loss="continue", got {name}={value!r} with '
                f'on_loss="{on_loss}"; set on_loss="continue", or leave {name} out'
            )
    if on_loss == "continue" and chosen["transport"] == "mpi":
        raise ValueError(
            'MPI ends all ranks when one is lost, got on_loss="continue" with transport="mpi"; '
            'use transport="auto", which takes TCP then'
        )


def describe(algorithm: Algorithm, chosen: Mapping[str, Any]) -> str:
    """Says all options that must be equal on all ranks, as a text that is equal too."""
    names = ("evaluate", "average_buffers", "data", "weigh_by")
    options = algorithm.hyperparameters() | {n: chosen[n] for n in names if n in chosen}
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return re.sub(" at 0x[0-9a-f]+", "", f'strategy="{algorithm.name}" with {listed}')


def check_optimizers(
    optimizers: list[Any], world_size: int, scaler: Any, algorithm: Algorithm
) -> None:
    """Raises for optimizers whose steps an algorithm cannot stand between."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and (world_size > 1 or algorithm.traits.sums_units):
            differs = "differs between ranks" if world_size > 1 else "is not known before"
            raise ValueError(
                "the optimizer must compute one gradient a step, got LBFGS, whose number of "
                f'gradients {differs}, with strategy="{algorithm.name}"; use SGD or Adam'
            )
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                "where a loss is scaled for fp16, gradients must be unscaled before the step, got "
                f"a fused {type(optimizer).__name__}; use fused=False"
            )


def check_is_first(optimizer: Any, *, is_first: bool) -> None:
    """Raises where an optimizer asks for another gradient of a step whose units are computed."""
    if not is_first:
        raise ValueError(
            "the optimizer must compute one gradient a step, as the micro-batches of a step are "
            f"shared once, got {type(optimizer).__name__}, which calls its closure again; use SGD "
            'or Adam, or strategy="allreduce"'
        )
