"""What an optimizer keeps for each weight beside it: momentum, and Adam's second moment.

    SGD                           momentum_buffer, if it has momentum
    Adam, AdamW, NAdam, RAdam     exp_avg, exp_avg_sq

Where ranks average their weights and each keeps a momentum of its own, the momentum goes on to draw
a rank to where it came from.  At DDP's learning rate that costs quality.  So the ranks can average
it with the weights (DES-LOC, Iacob et al., 2025, https://arxiv.org/abs/2505.22549).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_dsgd.algorithm import Conditions

_ADAMS: Final = (Adam, AdamW, NAdam, RAdam)


def names_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the names of the tensors that an optimizer keeps for each weight, the same on all.

    Raises:
        ValueError: for an optimizer of which that is not known, or that keeps none
    """
    if isinstance(optimizer, _ADAMS):
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ValueError(
                "average_momentum averages Adam's moments, and not the largest that there was, got "
                "amsgrad=True; set amsgrad=False, or average_momentum=False"
            )
        return "exp_avg", "exp_avg_sq"
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return ("momentum_buffer",)
    what = "SGD without momentum" if isinstance(optimizer, SGD) else type(optimizer).__name__
    raise ValueError(
        "average_momentum needs torch's SGD with momentum, Adam, AdamW, NAdam or RAdam, got "
        f"{what}; set average_momentum=False"
    )


class Moments:
    """Reads and writes what an optimizer keeps, laid out like x.

    Args:
        conditions: the optimizer, and where its parameters lie in x
    """

    def __init__(self, conditions: Conditions) -> None:
        if conditions.optimizer is None or conditions.parameters_in is None:
            raise ValueError(
                "average_momentum needs an optimizer of the whole model, got none, or one of a "
                "shard; set average_momentum=False"
            )
        self.names = names_of(conditions.optimizer)
        self._state = conditions.optimizer.state
        self._parameters_in = conditions.parameters_in

    def read(self, name: str, like: Tensor) -> Tensor:
        """Returns one of the tensors, flat; zeros where this rank has made no step yet."""
        flat = torch.zeros_like(like)
        for kept, place in self._places(name, flat):
            place.copy_(kept)
        return flat

    def write(self, name: str, flat: Tensor) -> None:
        """Takes values over for the weights that this rank has stepped."""
        for kept, place in self._places(name, flat):
            kept.copy_(place)

    def _places(self, name: str, flat: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Returns what is kept for each parameter, with its place in a tensor like x."""
        pairs = [
            (self._state.get(p, {}).get(name), place) for p, place in self._parameters_in(flat)
        ]
        return [(kept, place) for kept, place in pairs if kept is not None]
