"""Where a loss is scaled for fp16: all ranks that exchange gradients skip a step, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def agree_on_overflow(scaler: Any, optimizer: Optimizer) -> None:
    """Has a GradScaler look at the reduced gradient, which one rank's inf has reached on all.

    It looks as it did before, on the device; the host waits for what it has found where it steps.
    """
    scale, state = scaler._scale, scaler._per_optimizer_states[id(optimizer)]
    one, none_found = torch.ones_like(scale), torch.zeros_like(scale)
    found = scaler._unscale_grads_(optimizer, one, none_found, allow_fp16=True)
    state["found_inf_per_device"] = found


def is_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether torch's GradScaler has unscaled the gradients of this step already."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED")
