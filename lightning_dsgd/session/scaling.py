"""Where a loss is scaled for fp16: all ranks that exchange gradients skip a step, or none does."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def agree_on_overflow(scaler: Any, optimizer: Optimizer) -> None:
    """Has a GradScaler look at the reduced gradient, which one rank's inf has reached on all."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
    for flag in overflow_flags(scaler, optimizer):
        flag.fill_(0.0 if finite else 1.0)


def overflow_flags(scaler: Any, optimizer: Optimizer) -> list[Any]:
    """What torch's GradScaler has noted for each device: whether a gradient was inf or NaN."""
    states = scaler._per_optimizer_states[id(optimizer)]
    return list(states["found_inf_per_device"].values())


def is_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether torch's GradScaler has unscaled the gradients of this step already."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED")
