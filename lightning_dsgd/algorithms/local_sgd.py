"""Local SGD (Stich, ICLR 2019, https://arxiv.org/abs/1805.09767), Algorithm 1.

    x_i <- x_i - lr * g_i(x_i)                  every step
    x_i <- (1/P) sum_j x_j                      every sync_period-th step

Differs from the paper: any optimizer takes the local step, its state stays local; a rank that has
run out of data goes on taking part in the averages with the weights it has.

Every rank waits for every other once a period, and then sends 2(P-1)/P |x| and one word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Profile, average, num_active
from lightning_dsgd.transport import Transport


@dataclass
class LocalSGD(Algorithm):
    """Averages the weights of all ranks every `sync_period` steps.

    Memory above plain training: none.

    Args:
        sync_period: how many local steps lie between two averages
    """

    name: ClassVar[str] = "local_sgd"
    profile: ClassVar[Profile] = Profile(
        when="every `sync_period` steps",
        with_whom="all ranks",
        sends="2(P-1)/P |x| / `sync_period`",
        suits="slow networks, ranks of equal speed",
    )

    sync_period: int = 8

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.sync_period < 1:
            raise ValueError(
                "sync_period must be a whole number of at least 1, got "
                f"sync_period={self.sync_period!r}; try sync_period=8"
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.steps_since_sync = 0

    def after_update(self, x: Tensor) -> None:
        self.steps_since_sync += 1
        if self.steps_since_sync >= self.sync_period:  # more, if a resume made the period shorter
            num_active(self.net, active=True)
            self._synchronize(x)

    def settle(self, x: Tensor) -> None:
        while num_active(self.net, active=False):
            self._synchronize(x)

    def _synchronize(self, x: Tensor) -> None:
        average(self.net, x)
        self.steps_since_sync = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps_since_sync": self.steps_since_sync}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_since_sync = state["steps_since_sync"]
