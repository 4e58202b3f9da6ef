"""Synchronous SGD: the baseline that every paper compares with.

    g <- (1/P) sum_i g_i        before every optimizer step

Differs from DistributedDataParallel: the whole gradient is reduced once after backward, and ranks
may have different numbers of batches.  A rank that has run out contributes nothing, and the mean is
over the others; it takes their weights once all have stopped.

Every rank waits for every other in every step.  Sends 2(P-1)/P |g| per step and some integers,
which count the ranks that have a gradient for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.agreement import num_active, take_over_newest
from lightning_dsgd.algorithm import PLAIN, Algorithm, Conditions, Profile
from lightning_dsgd.transport import Transport


@dataclass
class AllReduce(Algorithm):
    """Averages the gradients of all ranks in every step."""

    name: ClassVar[str] = "allreduce"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks",
        sends="2(P-1)/P |g|",
        memory="|g|",
        suits="ranks of equal speed on a fast network; the synchronous baseline",
    )
    uses_gradient: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True
    counts_gradients: ClassVar[bool] = True

    def start(self, net: Transport, x: Tensor, conditions: Conditions = PLAIN) -> None:
        super().start(net, x, conditions)
        self.step = 0

    def before_update(self, x: Tensor, g: Tensor) -> None:
        active = num_active(self.net, active=True, counts=self.conditions.gradient_counts)
        self.net.all_reduce(g).wait()
        g /= active
        self.step += 1

    def settle(self, x: Tensor) -> None:
        zeros = None
        while num_active(self.net, active=False, counts=self.conditions.gradient_counts):
            zeros = torch.zeros_like(x) if zeros is None else zeros.zero_()
            self.net.all_reduce(zeros).wait()
        self.step = take_over_newest(self.net, x, self.step)

    def consensus(self, x: Tensor) -> Tensor:
        # All ranks hold the same, unless they took over weights while keeping their optimizer's
        # state.
        return self.net.broadcast(x.clone(), src=0).wait()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
