"""NoLoCo (Kolehmainen et al., 2025, https://arxiv.org/abs/2506.10911), equations 2 and 3.

    x_i <- x_i - lr * g_i(x_i)                                   every step; Adam in the paper
    v_i <- m v_i + b/2 (D_i + D_j) - c (W_i - (W_i + W_j) / 2)   every sync_period-th step
    W_i <- W_i + v_i,   x_i <- W_i                               j: a random partner

Legend: x_i the weights of rank i, W_i its slow weights, D = x - W what its steps have added, v the
momentum, m outer_momentum, b outer_lr, c pull.  There is no global model; the pull draws the
partners' together.  Over all ranks it adds up to nothing, so the mean of W and of v makes
DiLoCo's outer step with the heavy ball, whoever met.

A rank needs one tensor of its partner, D + c/b W, and not both: that is x where c = b, as in the
released code.  Partners, and what a rank does that stops: `partners.py`.

Differs from the paper: this one tensor, where the paper sends two; a rank whose partner has
stopped, or that has none as P is odd, steps with its own D; the consensus is the mean of all x.

A rank waits for one partner every sync_period steps, and then sends |x| and one integer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import above, at_least, setting
from lightning_dsgd.primitives import outer_optimizer, step_scaling, topology
from lightning_dsgd.primitives.partners import Partners
from lightning_dsgd.transport import Transport


@dataclass
class NoLoCo(Algorithm):
    """Steps like DiLoCo with the progress of random pairs, and draws their models together."""

    name: ClassVar[str] = "noloco"
    profile: ClassVar[Profile] = Profile(
        when="every `sync_period` steps",
        with_whom="a random partner",
        sends="|x| / `sync_period`",
        memory="2 |x|, 4 |x| during an exchange",
    )

    sync_period: int = at_least(1, default=50, doc="number of steps from one exchange to the next")
    outer_lr: float = above(
        0, default=0.7, doc="learning rate of the outer step, which is made once per exchange"
    )
    outer_momentum: float = at_least(0, below=1, default=0.5, doc="momentum of the outer step")
    pull: float = at_least(
        0, default=0.7, doc="factor with which the slow weights of two partners draw together"
    )
    seed: int = setting(default=0, doc="seed of the random pairs")
    scale_steps: bool = step_scaling.scale_steps()

    @property
    def traits(self) -> Traits:
        return Traits(
            exchange_period=self.sync_period, scales_steps=self.scale_steps, looks_itself=True
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 4.0  # during an exchange

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.steps_since = self.version = 0
        self.partners = Partners(net, topology.random_partners, "complete", self.seed)
        self.outer = outer_optimizer.OuterOptimizer(
            self.outer_lr, self.outer_momentum, nesterov=False
        )
        limit = 2 * (1 - self.outer_momentum**2)
        if net.rank == 0 and self.pull >= limit:
            warnings.warn(
                f"pull must be below {limit:.2f} with this outer_momentum, or the ranks' models "
                f"drift apart, got pull={self.pull} and outer_momentum={self.outer_momentum}; try "
                f"pull={limit / 2:.2g}",
                stacklevel=2,
            )
        outer_optimizer.warn_of_rates(net, self, "sync_period", nesterov=False)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.outer.model is None or not (self.version or self.steps_since):
            self.conditions.look()
            self.outer.begin(x)

    def after_update(self, x: Tensor) -> None:
        self.steps_since += 1
        if self.steps_since < self.sync_period:  # more, if a resume shortened it
            return
        slow, share = self.outer.model_at(), self.pull / self.outer_lr
        mine = torch.add(x, slow, alpha=share - 1)
        met = self.partners.meet(self.version, torch.ones(1, dtype=torch.int64))
        if met is not None:
            mine.add_(self.net.exchange(mine, met[0]).wait()).mul_(0.5)
        self.outer.step(mine.sub_(slow, alpha=share))
        x.copy_(slow)
        self.steps_since, self.version = 0, self.version + 1

    def settle(self, x: Tensor) -> None:
        self.version = self.partners.settle(self.version)

    def state_dict(self) -> dict[str, Any]:
        state = {"version": self.version, "steps_since": self.steps_since}
        return state | self.outer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.steps_since = state["version"], state["steps_since"]
        self.outer.load_state_dict(state)
