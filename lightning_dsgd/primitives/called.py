"""Rounds to which the first rank calls the others, and a period that follows the learning rate.

**Called rounds.**  Ranks make different numbers of steps in the same time.  The first rank that has
made a period's steps since the last average calls all others, and each takes part after the step in
hand.  So a slow rank holds up the others for a step, and not for a period.

Why nobody waits for ever: a rank that has called waits for ranks that end a step, or that stand
still and serve every call until all ranks do.  Each rank tells each other one whether it steps,
once in each round, so all know alike whether there is an average, and when all stand still.  The
wait for a lost rank ends as every wait on a network does.

**A growing period.**  The steps to the next average become

    H <- max(first, first (lr_max / (2 lr))^2), at most 32 first

the quadratic synchronisation rule (Gu et al., 2023, https://arxiv.org/abs/2310.14423).  Legend: lr
the largest rate of the optimizer at the average, lr_max the highest at an average so far.  Rates
differ where ranks claim their batches.  So each rank that steps sends its H, and all go on with the
mean of these, the same number on every rank.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.transport import Transport

_WORDS = torch.empty(0, dtype=torch.int64)
_MOST: Final = 32  # how many times the first period a growing one is


class Period:
    """How many steps there are to the next average, the same number on all ranks.

    Args:
        first: how many at first
        grows: whether they grow as the learning rate falls
        conditions: the optimizer whose rate that is
    """

    def __init__(self, first: int, conditions: Conditions, *, grows: bool) -> None:
        self.optimizer = conditions.optimizer if grows else None
        if grows and self.optimizer is None:
            raise ValueError(
                "growing_period needs an optimizer, whose rate it follows, got none; leave it out"
            )
        self.steps = self._first = first
        self._highest_lr = 0.0

    def wish(self) -> Tensor:
        """Returns this rank's period by its learning rate, and 1; nothing if periods are equal."""
        if self.optimizer is None:
            return _WORDS
        lr = max(float(group["lr"]) for group in self.optimizer.param_groups)
        self._highest_lr = max(self._highest_lr, lr)
        growth = _MOST if self._highest_lr else 1.0  # a warm-up may begin at 0
        if lr > 0:
            growth = (0.5 * self._highest_lr / lr) ** 2
        return torch.tensor([int(self._first * min(max(1.0, growth), _MOST)), 1])

    def take(self, sums: Tensor) -> None:
        """Goes on with the mean of the periods that the stepping ranks wish."""
        if self.optimizer is not None and sums[-1]:
            self.steps = int(sums[-2] // sums[-1])

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resume needs, if the period grows."""
        if self.optimizer is None:
            return {}
        return {"period": self.steps, "highest_lr": self._highest_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned, beside other entries."""
        if self.optimizer is not None:
            self.steps = state.get("period", self.steps)
        self.carry_over(state)

    def carry_over(self, state: dict[str, Any]) -> None:
        """Takes over what does not depend on which ranks there are."""
        self._highest_lr = state.get("highest_lr", self._highest_lr)

    def metrics(self) -> dict[str, float]:
        """Returns the period, if it grows."""
        return {} if self.optimizer is None else {"sync_period": float(self.steps)}


class CalledRounds:
    """Counts the ranks that are still stepping; the first to come to a round calls the others.

    Each rank tells each other one, in each round, whether it is stepping.
    """

    def __init__(self, net: Transport) -> None:
        self._net = net
        self._others = [rank for rank in range(net.world_size) if rank != net.rank]
        self._listen()

    def _listen(self) -> None:
        self._told = [self._net.recv(_WORDS, peer) for peer in self._others]

    def is_called(self) -> bool:
        """Returns whether a rank that is stepping has come to the next round."""
        return any(each.done() and bool(each.wait()[0]) for each in self._told)

    def num_active(self, *, active: bool, counts: Tensor) -> int:
        """Returns how many ranks are still stepping; see `agreement.num_active`."""
        mine = torch.tensor([int(active), *counts.tolist()])
        for peer in self._others:
            self._net.send(mine, peer)
        flags = torch.stack([mine, *(each.wait() for each in self._told)]).sum(0)
        counts.copy_(flags[1:])
        self._listen()
        return int(flags[0])
