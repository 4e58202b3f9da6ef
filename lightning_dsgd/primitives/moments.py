"""The tensors that an optimizer keeps for each weight: momentum, and Adam's second moment.

    SGD                           momentum_buffer, if it has momentum
    Adam, AdamW, NAdam, RAdam     exp_avg, exp_avg_sq

    m  <-  sum_i w_i m_i / sum_i w_i          for each parameter, over the ranks that have its m

Legend: m a parameter's tensor of one name, m_i rank i's, w_i how much rank i counts: 1, or as many
samples as its steps since the last average had.

A rank has none of a parameter before its first step, or where it has never had a gradient for it.
It does not count then, and goes on without.  Numbers of steps, by which Adam corrects its moments,
stay each rank's own.  Where ranks begin anew with other weights (after a loss, or as other
parameters are trained) momenta stay as they are until the next average.

From DES-LOC (Iacob et al., 2025, https://arxiv.org/abs/2505.22549), which gives each tensor a
period of its own; here all are averaged with the weights.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.transport import Transport

_ADAMS: Final = (Adam, AdamW, NAdam, RAdam)


def names_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the names of the tensors that an optimizer keeps for each weight.

    Raises:
        ValueError: for an optimizer whose tensors are not known here, and SGD without momentum
    """
    if type(optimizer) in _ADAMS:
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ValueError(
                "average_momentum averages Adam's moments, and not the largest that there was, got "
                "amsgrad=True; set amsgrad=False, or average_momentum=False"
            )
        return "exp_avg", "exp_avg_sq"
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if type(optimizer) is SGD and has_momentum:
        return ("momentum_buffer",)
    what = "SGD without momentum" if type(optimizer) is SGD else type(optimizer).__name__
    raise ValueError(
        "average_momentum needs torch's SGD with momentum, Adam, AdamW, NAdam or RAdam, got "
        f"{what}; set average_momentum=False"
    )


class Moments:
    """Averages what the ranks' optimizers keep, laid out like x.

    Args:
        conditions: the optimizer, and where its parameters lie in x
    """

    def __init__(self, conditions: Conditions) -> None:
        if conditions.optimizer is None:
            raise ValueError(
                "average_momentum needs an optimizer, whose momentum it averages, got none; set "
                "average_momentum=False"
            )
        if conditions.parameters_in is None:
            raise ValueError(
                "average_momentum needs a replica that one rank holds, got shards, or a model of "
                "a training (`simulate`); set average_momentum=False"
            )
        self._names = names_of(conditions.optimizer)
        self._optimizer = conditions.optimizer  # whose state is another dict after a resume
        self._parameters_in = conditions.parameters_in

    def average(self, net: Transport, x: Tensor, span: slice, weight: int) -> None:
        """Averages a fragment's tensors over the ranks that have them; all ranks call this."""
        is_inside = torch.zeros_like(x, dtype=torch.bool)
        is_inside[span] = True
        pairs = self._parameters_in(is_inside)
        # An optimizer makes all of a parameter's tensors in one step.
        states = [self._optimizer.state.get(parameter, {}) for parameter, _ in pairs]
        have = [state.get(self._names[0]) is not None for state in states]
        totals = torch.tensor([weight if has else 0 for has in have])
        net.all_reduce(totals).wait()
        for name in self._names:
            flat = torch.zeros_like(x)
            places = [place for _, place in self._parameters_in(flat)]
            own = [state[name] if has else None for state, has in zip(states, have, strict=True)]
            for each, place in zip(own, places, strict=True):
                if each is not None:
                    place.copy_(each).mul_(weight)
            net.all_reduce(flat[span]).wait()
            rows = zip(own, places, pairs, totals.tolist(), strict=True)
            for each, place, (_, inside), total in rows:
                if each is not None and total:
                    each.copy_(torch.where(inside, place / total, each))
