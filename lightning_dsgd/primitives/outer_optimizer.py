"""An outer optimizer: a step of the global model per average, as in DiLoCo.

(Douillard et al., 2023, https://arxiv.org/abs/2311.08105, Algorithm 1.)

    v <- m v + D,    W <- W + lr (D + m v)        Nesterov momentum
                     W <- W + lr v                heavy ball

Legend: W the global model, D the mean over the ranks of what they have added to it (the paper's
outer gradient with the opposite sign), v the momentum, m its factor, lr the outer learning rate.
With lr = 1 and m = 0 the new W is the mean of the ranks' weights.

A D that stays the same is applied lr / (1 - m) times in the long run: 7 times with DiLoCo's 0.7 and
0.9.  Hundreds of local steps lead each rank towards a minimum of its own, in directions that differ
between the ranks, so the mean is a short way.  A few steps all lead the same way, and 7 times their
sum is 7 times the learning rate.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.agreement import average
from lightning_dsgd.transport import Transport

FEW_STEPS: Final = 30
"""Below so many local steps, momentum acts like a larger learning rate; DiLoCo uses 500."""
LARGE_RATE: Final = 2.0

_ALL: Final = slice(None)


class OuterOptimizer:
    """SGD with momentum on the global model.  Memory: |x|; 2 |x| with momentum."""

    def __init__(self, lr: float, factor: float, *, nesterov: bool = True) -> None:
        self.model: Tensor | None = None
        self.momentum: Tensor | None = None
        self._lr = lr
        self._factor = factor
        self._is_nesterov = nesterov

    def begin(self, x: Tensor) -> None:
        """Takes x as the global model."""
        self.model = x.clone() if self.model is None else self.model.copy_(x)

    def model_at(self, span: slice = _ALL) -> Tensor:
        """Returns a view of the global model, or of a span of it."""
        assert self.model is not None, "every rank begins before it takes part in an average"
        return self.model[span]

    def share(self, net: Transport, span: slice = _ALL) -> None:
        """Averages the global model, which may differ between ranks at the beginning."""
        average(net, self.model_at(span))

    def step(self, progress: Tensor, span: slice = _ALL) -> None:
        """Makes a step with D, the mean of the ranks' progress."""
        model = self.model_at(span)
        if not self._factor:
            model.add_(progress, alpha=self._lr)
            return
        if self.momentum is None:
            self.momentum = torch.zeros_like(self.model_at())
        momentum = self.momentum[span]
        momentum.mul_(self._factor).add_(progress)
        if self._is_nesterov:
            model.add_(progress, alpha=self._lr)
            model.add_(momentum, alpha=self._lr * self._factor)
        else:
            model.add_(momentum, alpha=self._lr)

    def apply(self, progress: Tensor) -> None:
        """Adds progress of earlier steps to the model; the momentum stays as it is."""
        self.model_at().add_(progress, alpha=self._lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what there is of the model and of the momentum."""
        known = {"model": self.model, "outer_momentum": self.momentum}
        return {name: tensor.clone() for name, tensor in known.items() if tensor is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned, among other things."""
        self.model, self.momentum = (
            state[name].clone() if name in state else None for name in ("model", "outer_momentum")
        )


def warn_of_rates(net: Transport, owner: Any, option: str, *, nesterov: bool) -> None:
    """Warns of an outer optimizer that diverges, or that is a larger learning rate in disguise.

    Where the local steps reach the minimum, D is the whole way there, and W is a quadratic's
    gradient descent with the curvature 1.

    Args:
        net: of which rank 0 warns
        owner: the algorithm, with its `outer_lr` and `outer_momentum`
        option: the option of `owner` that says how many local steps there are per average, if any
        nesterov: the kind of momentum
    """
    if net.rank:
        return
    lr, factor, num_steps = owner.outer_lr, owner.outer_momentum, getattr(owner, option)
    given = f"outer_lr={lr} and outer_momentum={factor}"
    limit = 2 * (1 + factor) / (1 + 2 * factor) if nesterov else 2 * (1 + factor)
    if lr >= limit:
        _warn(
            f"outer_lr must be below {limit:.2f} with this outer_momentum, or training diverges "
            f"wherever the local steps reach a minimum, got {given}; try outer_lr=0.7"
        )
    rate = lr / (1 - factor)
    if num_steps is not None and rate > LARGE_RATE and num_steps < FEW_STEPS:
        _warn(
            f"outer_lr / (1 - outer_momentum) should be at most {LARGE_RATE:.0f} with fewer than "
            f"{FEW_STEPS} local steps per average, got {given} with {option}={num_steps}: "
            f"this applies the sum of the local steps {rate:.1f} times, like a learning rate that "
            f"is as much larger; try outer_lr=1.0 and outer_momentum=0.0, or {option}=500"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
