"""Muon, which updates matrices alone, with AdamW for all other parameters: one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices, and AdamW for the rest, at the same learning rate.

    Lightning steps one optimizer by itself, and `torch.optim.Muon` takes matrices only.  Its update
    has the size of AdamW's here (`adjust_lr_fn="match_rms_adamw"`), so a rate suits both.

    Args:
        matrices: weights of two dimensions, of hidden layers.
        rest: all other parameters: embeddings, heads, biases, norms.
        lr: learning rate.
        betas: the betas of AdamW.
        weight_decay: of both.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.1,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"Muon needs torch 2.9 or newer, got torch {torch.__version__}")
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay),
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        super().__init__([part.param_groups[0] for part in self.parts], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            # A checkpoint replaces both.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss
