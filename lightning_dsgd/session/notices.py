"""What a training would lose in silence: a line each at its start, on the first rank.

A line says what was given, what happens, and what to do.  All are warnings, as another choice
avoids the loss.  Two lines name no loss, and are told: how many entries a sparse strategy sends;
and what setting is meant for several nodes, or else what a strategy waits for that could train on.

One line comes when an epoch begins, as nobody knows before into what its batches are split.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.devices import few_queues, is_on_host, shared_queue
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.primitives.quantised import LEAST_PIECE
from lightning_dsgd.session.session import Session
from lightning_dsgd.transport import Transport

FEW_ENTRIES: Final = 100
"""With fewer selected entries per exchange, sparse gradients train badly."""
LOW_DENSITY: Final = 0.01
"""The papers' lowest density; below it an entry waits for more than a hundred exchanges."""
LOW_BETA: Final = 0.5
"""Adam's first beta that suits sparse gradients."""
_FOR_NODES: Final[dict[str, dict[str, int]]] = {
    "allreduce": {"overlap": True},
    "wagma": {"overlap": True, "group_period": 2},
}
"""What hides the sums between nodes behind a step, by the model of docs/gpus.md, at the least."""
_PERIODS: Final = ("group_period", "local_steps", "sync_period")
"""Hyperparameters that may hold the number of steps between two exchanges; the first counts."""


@dataclass(frozen=True)
class Facts:
    """Holds what is known of a training when it starts.

    Args:
        algorithm: how the ranks learn from one another
        optimizers: all optimizers that step
        sizes: the number of weights that each algorithm exchanges
        num_replicas: how many copies of the model there are
        num_steps: how many steps each rank is to make; inf: that is not known
    """

    algorithm: Algorithm
    optimizers: Sequence[Optimizer]
    sizes: Sequence[int]
    num_replicas: int
    num_steps: float = math.inf


def tell(
    session: Session[Any],
    announce: Callable[[str], None],
    num_steps: float = math.inf,
    refuse: Callable[[Algorithm], None] | None = None,
) -> None:
    """Warns, on the first rank, of what a user of this training would lose.

    Args:
        session: the session whose training starts
        announce: tells the user notices that name no loss
        num_steps: how many steps each rank is to make; inf: that is not known
        refuse: raises `ValueError` for an algorithm with which the face would not train
    """
    if session.training is None or not session.ranks.is_first:
        return
    replica, algorithm = session.training.replica, session.training.algorithm
    parts = replica.parts
    optimizers = list({id(part.optimizer): part.optimizer for part in parts}.values())
    sizes = [len(part.x) for part in parts]
    for text in notices(Facts(algorithm, optimizers, sizes, replica.net.world_size, num_steps)):
        warnings.warn(text, stacklevel=3)
    x, num_replicas = parts[0].x, replica.net.world_size
    if num_replicas > 1:
        if text := shared_queue(x.device):
            warnings.warn(text, stacklevel=3)
        if text := few_queues(x.device):
            announce(text)
    num_bytes = sum(part.x.nbytes for part in parts)
    on_device = not is_on_host(x)

    def check(other: Algorithm) -> None:
        replica.check_pieces(other)
        if refuse is not None:
            refuse(other)

    for text in [
        *engines(algorithm, replica.net, on_device=on_device),
        *(
            between_nodes(parts[0].algorithm, num_replicas, check)
            or waits(algorithm, num_replicas, num_bytes, on_device=on_device)
        ),
    ]:
        announce(text)
    if isinstance(algorithm, ErrorFeedback):
        sent = sum(algorithm.num_selected_of(size) for size in sizes)
        announce(
            f"Sparse exchanges: {sent:,} of {sum(sizes):,} weights are selected in each "
            f"(density={algorithm.share:g})."
        )


def tell_of_parts(session: Session[Any], balancing: Balancing, micro_batches: int | None) -> None:
    """Warns, on the first rank and once, where BatchNorm sees parts of batches by nobody's choice.

    BatchNorm that is frozen, with statistics of its own, normalises by these.

    Args:
        session: the session whose training has begun an epoch
        balancing: what shares the micro-batches of the training
        micro_batches: see `Balanced`
    """
    num_parts, was_chosen = balancing.plan.num_parts, micro_batches is not None
    if was_chosen or num_parts == 1 or balancing.has_told_of_parts:
        return
    assert session.training is not None, "an epoch is begun while a training is under way"
    balancing.has_told_of_parts = any(
        isinstance(each, _BatchNorm) and (each.training or each.running_mean is None)
        for each in session.training.replica.module.modules()
    )
    if balancing.has_told_of_parts and session.ranks.is_first:
        warnings.warn(
            'got a model with BatchNorm and strategy="balanced", which splits each batch into '
            f"{num_parts} micro-batches where a step has one batch of each rank: BatchNorm "
            "normalises each by itself, so the loss curve is not DDP's; set micro_batches=1, with "
            f"which ranks share whole batches, or micro_batches={num_parts} if that is meant",
            stacklevel=3,
        )


def engines(algorithm: Algorithm, net: Transport, *, on_device: bool) -> list[str]:
    """Returns what the network's own line on engines leaves open: what carries rounded values."""
    texts, wire_dtype = [], getattr(algorithm, "wire_dtype", "float32")
    if on_device and wire_dtype != "float32" and net.world_size > 1:
        carrier = "messages carry what is rounded, through the host's memory"
        if net.sum_engine:
            carrier = f"{net.sum_engine} carries what is rounded"
        texts.append(f'With wire_dtype="{wire_dtype}" {carrier}.')
    return texts


def waits(algorithm: Algorithm, num_replicas: int, num_bytes: int, *, on_device: bool) -> list[str]:
    """Returns what a strategy waits for, where it could train on, and what that would cost.

    Args:
        algorithm: how the ranks learn from one another
        num_replicas: how many copies of the model there are
        num_bytes: of a rank's weights
        on_device: whether they lie on an accelerator
    """
    if not algorithm.traits.could_overlap or num_replicas == 1:
        return []
    ahead: Algorithm = replace(algorithm, overlap=True)  # type: ignore[type-var]
    waiting, training = (
        each.num_copies(num_replicas, on_device=on_device) for each in (algorithm, ahead)
    )
    mb = num_bytes / 1e6
    return [
        f'With overlap=False ranks wait in every exchange of strategy="{algorithm.name}" until '
        f"{mb:.3g} MB of weights are averaged; with overlap=True they train on meanwhile, for "
        f"{(training - waiting) * mb:.3g} MB more memory."
    ]


def between_nodes(
    algorithm: Algorithm, num_replicas: int, check: Callable[[Algorithm], None]
) -> list[str]:
    """Returns what setting is meant for ranks on several nodes, where another one has been set.

    Nothing is said of an algorithm that knows the nodes, or is to be as printed, and of a setting
    that this training would refuse.

    Args:
        algorithm: has been started, and knows how many ranks a node has
        num_replicas: how many copies of the model there are
        check: raises `ValueError` for an algorithm with which this training would not go on
    """
    per_node, name = algorithm.conditions.ranks_per_node, algorithm.name
    options = algorithm.hyperparameters()
    is_apart = options.get("node_size") or options.get("paper") or options.get("delay")
    if per_node is None or per_node >= num_replicas or is_apart:
        return []
    meant = {key: least for key, least in _FOR_NODES.get(name, {}).items() if options[key] < least}
    if not meant:
        return []
    try:
        other: Algorithm = replace(algorithm, **meant)  # type: ignore[type-var]
        other.check(num_replicas, algorithm.conditions)
        check(other)
    except ValueError:
        return []
    given, way_out = (
        " and ".join(f"{key}={each[key]}" for key in meant) for each in (options, meant)
    )
    return [
        f'With {given} ranks of strategy="{name}" wait for what travels between nodes; {way_out} '
        'is meant to hide that (page "On GPUs", "Two nodes of 8 GPUs").'
    ]


def notices(facts: Facts) -> list[str]:
    """Returns the lines to say; there are none where nothing is lost."""
    if facts.num_replicas == 1:
        return [
            f'got one rank with strategy="{facts.algorithm.name}": it trains alone, nothing is '
            "averaged; start several, with devices=4 in the Trainer or Fabric, or with torchrun, "
            "mpiexec or srun, as in `torchrun --nproc-per-node 4 train.py`"
        ]
    return [text for rule in _RULES if (text := rule(facts))]


def _adam_where_weights_are_averaged(facts: Facts) -> str:
    algorithm, name = facts.algorithm, facts.algorithm.name
    outer_lr, momentum = (getattr(algorithm, f"outer_{x}", 0.0) for x in ("lr", "momentum"))
    enlarges = outer_lr > 1 - momentum  # which makes up for averages
    adam = _adam(facts)
    averages = algorithm.traits.averages_weights and not algorithm.traits.uses_gradient
    if adam is None or not averages or algorithm.traits.scales_steps or enlarges:
        return ""
    way_out = "set scale_steps=True"
    if not hasattr(algorithm, "scale_steps"):
        way_out = 'use strategy="sgp" with scale_steps=True'
    return (
        f'got {type(adam).__name__} with strategy="{name}": where weights are averaged, the mean '
        f"of its steps is up to {math.sqrt(facts.num_replicas):.1f} times smaller than with DDP, "
        f"so the same learning rate learns less; {way_out} and let the learning rate fall to zero "
        '(page "Coming from DDP", "Adam")'
    )


def _adam_with_sparse_gradients(facts: Facts) -> str:
    algorithm, adam = facts.algorithm, _adam(facts, above=LOW_BETA)
    if (
        adam is None
        or not isinstance(algorithm, ErrorFeedback)
        or not algorithm.traits.uses_gradient
    ):
        return ""
    return (
        f'got {type(adam).__name__} with strategy="{algorithm.name}": an entry collects many '
        "gradients and is applied in one step, which Adam's first moment spreads over later ones; "
        f'set its first beta to {LOW_BETA:g}; better, exchanges="changes" with scale_steps=True '
        "and a first beta of 0.3, or local_steps=2 with density=0.4 and scale_steps=True (page "
        '"oktopk", "Accuracy")'
    )


def _few_entries(facts: Facts) -> str:
    algorithm, num_weights = facts.algorithm, min(facts.sizes)
    if not isinstance(algorithm, ErrorFeedback):
        return ""
    count = algorithm.num_selected_of(num_weights)
    if count >= min(FEW_ENTRIES, num_weights):
        return ""
    density = min(1.0, math.ceil(1000 * FEW_ENTRIES / num_weights) / 1000)
    entries = "1 entry is" if count == 1 else f"{count} entries are"
    return (
        f'got density={algorithm.share:g} of {num_weights:,} weights with strategy="'
        f'{algorithm.name}": {entries} selected in an exchange, so few that training may diverge; '
        f'set density={density:g} or more, or use strategy="allreduce"'
    )


def _momentum_with_long_delay(facts: Facts) -> str:
    algorithm = facts.algorithm
    momentum = max(_of_groups(facts.optimizers, "momentum", 0.0))
    if not momentum or not isinstance(algorithm, ErrorFeedback):
        return ""
    if algorithm.share >= LOW_DENSITY or not algorithm.traits.uses_gradient:
        return ""
    return (
        f'got momentum={momentum:g} with density={algorithm.share:g} and strategy="'
        f'{algorithm.name}": an entry waits for {1 / algorithm.share:,.0f} steps or more, and '
        f"momentum then repeats it; set density={LOW_DENSITY:g} or more, momentum=0, or "
        "local_steps=4, which exchanges what steps with momentum have changed"
    )


def _period_longer_than_training(facts: Facts) -> str:
    algorithm, num_steps = facts.algorithm, facts.num_steps
    option = next((name for name in _PERIODS if hasattr(algorithm, name)), None)
    if option is None or algorithm.traits.uses_gradient:
        return ""
    period = getattr(algorithm, option)
    if period <= max(1, num_steps):
        return ""
    return (
        f'got {option}={period} with strategy="{algorithm.name}" in a training of {num_steps:.0f} '
        "steps: the ranks learn nothing from each other before its end; try "
        f"{option}={max(1, int(num_steps) // 10)}"
    )


def _small_pieces(facts: Facts) -> str:
    algorithm, num_weights = facts.algorithm, max(facts.sizes)
    num_pieces = getattr(algorithm, "num_buckets", 1) if algorithm.traits.takes_pieces else 1
    enough = max(1, num_weights // LEAST_PIECE)
    if num_pieces <= enough:
        return ""
    return (
        f'got num_buckets={num_pieces} with strategy="{algorithm.name}" and {num_weights:,} '
        "weights: messages of so small pieces take longer than what they hide; set "
        f"num_buckets={enough}, or {algorithm.pieces_option[1]}"
    )


_RULES: Final = (
    _adam_where_weights_are_averaged,
    _adam_with_sparse_gradients,
    _few_entries,
    _momentum_with_long_delay,
    _period_longer_than_training,
    _small_pieces,
)


def _adam(facts: Facts, above: float = -1.0) -> Optimizer | None:
    """Returns the first optimizer of Adam's kind whose first beta is above `above`, or None."""
    for optimizer in facts.optimizers:
        for betas in _of_groups([optimizer], "betas", ()):
            if betas and float(betas[0]) > above:
                return optimizer
    return None


def _of_groups(optimizers: Sequence[Optimizer], name: str, default: Any) -> list[Any]:
    """Returns a setting's value in each group of parameters."""
    return [group.get(name, default) for each in optimizers for group in each.param_groups]
