"""Synchronous SGD: the baseline that every paper compares with.

    g <- (1/P) sum_i g_i        before every optimizer step

Differs from DistributedDataParallel: the gradient is reduced once, whole, after backward, and ranks
may have different numbers of batches: a rank that has run out contributes nothing, the mean is over
those that go on, and their weights are taken over once all have stopped.

Every rank waits for every other in every step.  Sends 2(P-1)/P |g| and some words a step,
which tell who has a gradient for what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Profile, num_active, take_over_newest
from lightning_dsgd.transport import Transport


@dataclass
class AllReduce(Algorithm):
    """Averages the gradients of all ranks in every step.

    Memory above plain training: |g|.
    """

    name: ClassVar[str] = "allreduce"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks",
        sends="2(P-1)/P |g|",
        suits="equal ranks on a fast network; the synchronous baseline",
    )
    uses_gradient: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True
    counts_gradients: ClassVar[bool] = True

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.step = 0

    def before_update(self, x: Tensor, g: Tensor) -> None:
        active = num_active(self.net, active=True, num_gradients=self.num_gradients)
        self.net.all_reduce(g).wait()
        g /= active
        self.step += 1

    def settle(self, x: Tensor) -> None:
        zeros = None
        while num_active(self.net, active=False, num_gradients=self.num_gradients):
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
