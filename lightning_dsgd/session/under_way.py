"""What there is while a network is open, and while a model is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.data.claims.claiming import Claiming
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.session.stopping import AgreedBatch


@dataclass
class Training:
    """Holds what there is while a model is trained, but not while it is only evaluated."""

    algorithm: Algorithm
    replica: Replica
    agreed: AgreedBatch
    claiming: Claiming | None = field(default=None, kw_only=True)
    """What claims this rank's batches, where ranks claim them (`data.claims`)."""
    balancing: Balancing | None = field(default=None, kw_only=True)
    """What shares the micro-batches of a step, where ranks do (`data.units`)."""
    is_uneven: bool = field(default=False, kw_only=True)
    """Whether ranks are known to have different numbers of batches."""

    def stop_lanes(self) -> Sequence[Callable[[], None]]:
        """Returns what ends the threads beside the training."""
        claims = () if self.claiming is None else (self.claiming.close,)
        balancing = () if self.balancing is None else (self.balancing.close,)
        return (*balancing, self.replica.stop, self.agreed.close, *claims)


TrainingT = TypeVar("TrainingT", bound=Training)
T = TypeVar("T")


def opened(part: T | None) -> T:
    """Returns a thing that exists while a network is open, and raises where there is none."""
    if part is None:
        raise RuntimeError(
            "a training or an evaluation must be under way, got none: there is no network; call "
            "this while one is"
        )
    return part


def trained(training: T | None) -> T:
    """Returns a thing that exists while a model is trained, and raises where there is none."""
    if training is None:
        raise RuntimeError(
            "a training must be under way, got none: there is no consensus to save; save while one "
            "is"
        )
    return training
