"""The tensors that an optimizer keeps for each weight: momentum, and Adam's second moment.

    SGD                           momentum_buffer, if it has momentum
    Adam, AdamW, NAdam, RAdam     exp_avg, exp_avg_sq

    m  <-  sum_i w_i m_i / sum_i w_i          for each parameter, over the ranks that have its m

Legend: m a parameter's tensor of one name, m_i rank i's, w_i how much rank i counts: 1, or as many
samples as its steps since the last average had, or the push weight of the weights beside it.  The
sums are over all ranks (`average`), or over this one and those that have sent it their `message`.

A rank has none of a parameter before its first step, or where it has never had a gradient for it.
It does not count then, and goes on without.  Numbers of steps, by which Adam corrects its moments,
stay each rank's own.  Where ranks begin anew with other weights (after a loss, or as other
parameters are trained) momenta stay as they are until the next average.

From DES-LOC (Iacob et al., 2025, https://arxiv.org/abs/2505.22549), which gives each tensor a
period of its own; here all are averaged with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.hyperparameters import setting
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


def average_momentum(note: str) -> Any:
    """Makes the hyperparameter `average_momentum`; the note says what else it needs."""
    return setting(
        default=False,
        doc="if True, the optimizer's momentum is averaged with the weights, and Adam's second "
        "moment too; sends as much again as the weights in float32, twice as much with Adam; "
        f"{note}",
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
        inside = [place for _, place in self._parameters_in(is_inside)]
        totals = self._counts(x) * weight
        net.all_reduce(totals).wait()
        for name in self._names:
            sums = self._laid_out(name, x).mul_(weight)
            net.all_reduce(sums[span]).wait()
            rows = zip(self._kept(name, sums), inside, totals.tolist(), strict=True)
            for (each, place), is_in, total in rows:
                if each is not None and total:
                    each.copy_(torch.where(is_in, place / total, each))

    def message(self, x: Tensor, weight: float) -> list[Tensor]:
        """Returns what a rank sends to another: by parameter w_i, or 0, then each w_i m_i."""
        flats = [self._laid_out(name, x).mul_(weight) for name in self._names]
        return [self._counts(x) * weight, *flats]

    def send(self, net: Transport, message: Sequence[Tensor], dst: int) -> None:
        """Sends a message, which nobody changes any more."""
        counts, *flats = message
        net.send(counts, dst)
        for flat in flats:
            net.push(flat, dst)

    def receive(self, net: Transport, x: Tensor, src: int) -> list[Tensor]:
        """Waits for the next message that a rank has sent here."""
        flats = [net.pull(x[:0], src) for _ in self._names]
        return [net.recv(_COUNTS, src).wait(), *(flat.wait() for flat in flats)]

    def merge(self, weight: float, message: Sequence[Tensor]) -> None:
        """Makes this rank's tensors the mean of them and of a message, or of a sum of several."""
        counts, *flats = message
        for name, flat in zip(self._names, flats, strict=True):
            for (each, place), count in zip(self._kept(name, flat), counts.tolist(), strict=True):
                if each is not None and count:
                    total = weight + count
                    each.mul_(weight / total).add_(place, alpha=1 / total)

    def _counts(self, x: Tensor) -> Tensor:
        """Returns 1 for each parameter whose tensors the optimizer has, else 0."""
        # An optimizer makes all of a parameter's tensors in one step.
        kept = self._kept(self._names[0], x)
        return torch.tensor([float(each is not None) for each, _ in kept], dtype=torch.float64)

    def _laid_out(self, name: str, x: Tensor) -> Tensor:
        """Returns the tensors of one name, laid out like x, with 0 where there are none."""
        flat = torch.zeros_like(x)
        for each, place in self._kept(name, flat):
            if each is not None:
                place.copy_(each)
        return flat

    def _kept(self, name: str, flat: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """Returns each parameter's tensor of one name, or None, with its place in a flat tensor."""
        return [
            (self._optimizer.state.get(parameter, {}).get(name), place)
            for parameter, place in self._parameters_in(flat)
        ]


_COUNTS: Final = torch.empty(0, dtype=torch.float64)
