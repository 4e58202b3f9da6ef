"""Where a loss is scaled for fp16: all ranks that exchange gradients skip a step, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dsgd.replica.part import Part


def agree_on_overflow(scaler: Any, optimizer: Optimizer, parts: Sequence[Part] = ()) -> None:
    """Has a GradScaler look at the reduced gradient, where one rank's inf has reached all ranks.

    The GradScaler looks on the device, as before; the host waits for the result where it steps.
    Where the algorithms of all parts have told the host already, the GradScaler takes their word.
    """
    scale, state = scaler._scale, scaler._per_optimizer_states[id(optimizer)]
    known = [part.algorithm.overflowed for part in parts if part.optimizer is optimizer]
    if known and None not in known:
        state["found_inf_per_device"] = {scale.device: torch.tensor(float(any(known)))}
        return
    one, none_found = torch.ones_like(scale), torch.zeros_like(scale)
    found = scaler._unscale_grads_(optimizer, one, none_found, allow_fp16=True)
    state["found_inf_per_device"] = found


def is_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Returns whether torch's GradScaler has unscaled the gradients of this step already."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED")
