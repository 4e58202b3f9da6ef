"""HPSGD (Zhou et al., 2020, https://arxiv.org/abs/2009.02701), Algorithms 2 and 3.

    r_i <- r_i - mu * g_i(r_i)                                   every step, on the replica
    W_{s+1} = W_s - (mu / P) * sum over ranks i, steps e in [s] of g_i,e       Equation (1)
            = (1 / P) * sum over ranks i of r_i at switch s                    Equation (2)
    r_i <- r_i + W_{s+1} - (r_i at switch s)                     at switch s + 1

Legend: r_i the replica of rank i (x), W_s the global model, g gradient, mu learning rate, P ranks;
switch s is the step boundary at which a rank merges the all-reduce of round s - 1 and hands over
for round s; [s] are the steps that it has made between its switches s - 1 and s.

**Two roles.**  The trainer is the training thread.  It owns x, and acts at step boundaries only:
if the sum in flight is there, it switches, else it goes on.  The synchroniser is a lane.  It
executes the rounds in order, and it alone waits for other ranks.

**Two sums.**  One is in flight while the other fills, and neither is ever added to:

    x at switch s     =  W_s + the updates in [s]           handed over; Equation (2) averages it
    x - (that copy)   =  the updates since switch s         the sum that fills

So a step costs nothing, and a switch one addition and one copy of |x|.  "Updates" are what the
optimizer did to x: -mu * g for plain SGD, its own steps for any other, whose state stays local.

**When all merge.**  (a) A rank hands over for round s once, at its first step boundary after its
lane has finished round s - 1.  (b) No lane finishes round s before every rank has handed over for
it: it is an all-reduce.  This is the whole agreement, and no message says "now".  By induction
over s:

1. *The same models.*  Every rank executes the same rounds in the same order, and an all-reduce
   leaves the same bits everywhere: W_0, W_1, ... is one sequence.  No rank is two switches ahead
   of another.
2. *Each update once.*  A step lies between two consecutive switches of its rank: in one [s].
3. *Nobody waits.*  A trainer only looks.  A round takes t_sync after the slowest rank's hand-over,
   so the number of steps in [s] follows t_sync / t_train, on each rank by itself.

**Standing still.**  A rank that stops (`settle`) merges what is in flight, hands over what is
left, and goes on handing over, with nothing added, whenever it has merged.  Each round first
counts the ranks that stand still.  The round in which all do is the last one: it holds every
update that is in no round before it, and leaves the global model in all replicas, to the bit.

Differs from the paper:

- Ranks switch together in the sense of (a) and (b), each at its own step number.  Where speeds
  differ, a common step number T that nobody waits for runs away: when the slowest rank gets there,
  the fastest is at c * T, c > 1, already, and the next common number is no less than that.
- The replica keeps this rank's own sum in flight; in Algorithm 2 it restarts without it.
- The replica is sent in place of the sum of gradients: by Equation (2) the same.  The paper's
  reason not to, two threads that write the weights at once, does not arise where only one writes
  them.
- Any optimizer; a bound on the steps between two switches; an outer optimizer as in DiLoCo
  (Douillard et al., 2023, https://arxiv.org/abs/2311.08105), for which W_s minus the right side of
  Equation (1) is the gradient.  By default it is plain SGD with the learning rate 1, which is
  Equation (1).

Waits for nobody; with `max_local_steps` for the sum in flight, once so many steps are made.  Sends
2(P-1)/P |x| and two words a synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.transport import Receipt, Transport

_WORDS = torch.empty(0, dtype=torch.int64)


@dataclass
class HPSGD(Algorithm):
    """Trains on while the sum of all ranks' progress travels, and merges it when it is there.

    Memory above plain training: 2 |x|; with an outer optimizer 4 |x|.

    Args:
        max_local_steps: after how many steps since the last switch the trainer waits; None: never
        outer_lr: learning rate of the outer optimizer
        outer_momentum: its Nesterov momentum
    """

    name: ClassVar[str] = "hpsgd"
    profile: ClassVar[Profile] = Profile(
        when="as often as the network can",
        with_whom="all ranks, beside the training",
        sends="2(P-1)/P |x| a synchronisation",
        suits="slow networks: no training step waits",
    )

    max_local_steps: int | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def check(self, world_size: int) -> None:
        super().check(world_size)
        bound = self.max_local_steps
        if bound is not None and bound < 1:
            raise ValueError(
                "max_local_steps must be None or a whole number of at least 1, got "
                f"max_local_steps={bound!r}; try max_local_steps=None"
            )
        if not self.outer_lr > 0:
            raise ValueError(
                f"outer_lr must be positive, got outer_lr={self.outer_lr}; try outer_lr=1.0"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                "outer_momentum must be at least 0 and less than 1, got "
                f"outer_momentum={self.outer_momentum}; try outer_momentum=0.9"
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.handed_over = torch.empty_like(x)
        self.merged = torch.empty_like(x)  # the lane's, from a hand-over to its answer
        self.outer = None if self._is_plain() else _Nesterov(self.outer_lr, self.outer_momentum)
        self.num_local_steps = 0  # since the last switch
        self.num_syncs = self.num_synced_steps = 0
        self.in_flight: Receipt | None = None
        self._connect(net)

    def _connect(self, net: Transport) -> None:
        self.home = net.sub("home")  # where the lane answers the trainer
        self.lane = net.spawn_lane(self._synchronize, "synchroniser")

    def _is_plain(self) -> bool:
        return self.outer_lr == 1 and self.outer_momentum == 0

    # ---- the trainer ----

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.outer is not None:
            self.outer.begin(x)

    def after_update(self, x: Tensor) -> None:
        self.lane.check()
        self.num_local_steps += 1
        if self.in_flight is not None:
            if not (self._may_not_go_on() or self.in_flight.done()):
                return
            self.merge(x)
        self.hand_over(x, stands_still=False)

    def settle(self, x: Tensor) -> None:
        is_last = False
        while not is_last:
            if self.in_flight is None:
                self.hand_over(x, stands_still=True)
            is_last = self.merge(x)

    def consensus(self, x: Tensor) -> Tensor:
        return x.clone()

    def stop(self) -> None:
        self.lane.stop()

    def _may_not_go_on(self) -> bool:
        return self.max_local_steps is not None and self.num_local_steps >= self.max_local_steps

    def merge(self, x: Tensor) -> bool:
        """Works the sum in flight in; gives whether x is now the global model, on all ranks."""
        assert self.in_flight is not None
        num_standing_still, _ = self.in_flight.wait().tolist()
        self.in_flight = None
        is_last: bool = num_standing_still == self.net.world_size
        if is_last:
            x.copy_(self.merged)
            if self.outer is not None:
                self.outer.end()
        else:
            x += self.merged
        return is_last

    def hand_over(self, x: Tensor, *, stands_still: bool) -> None:
        """Has the lane begin a round with x as it is; from here on another sum fills."""
        self.handed_over.copy_(x)
        if self.outer is not None:
            self.outer.begin(x)  # without a step since the last round, x is still the global model
        self.in_flight = self.home.recv(_WORDS, self.net.rank)
        words = torch.tensor([int(stands_still), self.num_local_steps])
        self.lane.net.send(words, self.net.rank)
        self.num_syncs += self.num_local_steps > 0
        self.num_synced_steps += self.num_local_steps
        self.num_local_steps = 0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "num_syncs": self.num_syncs,
            "num_synced_steps": self.num_synced_steps,
        }
        if self.outer is not None and self.outer.momentum is not None:
            state["outer_momentum"] = self.outer.momentum.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_syncs = state["num_syncs"]
        self.num_synced_steps = state["num_synced_steps"]
        momentum = state.get("outer_momentum")
        if self.outer is not None and momentum is not None:
            self.outer.momentum = momentum.to(self.merged, copy=True)

    def metrics(self) -> dict[str, float]:
        if not self.num_syncs:
            return {}
        return {
            "num_syncs": float(self.num_syncs),
            "local_steps_per_sync": self.num_synced_steps / self.num_syncs,
        }

    # ---- the synchroniser ----

    def _synchronize(self, net: Transport) -> None:
        """Executes rounds; `handed_over` and `merged` are the lane's while one is in flight.

        `merged` becomes what is to be added to x; after a last round, the global model itself.
        """
        is_settled = True
        while True:
            words = net.recv(_WORDS, net.rank).wait(math.inf)
            net.all_reduce(words).wait()
            num_standing_still, num_steps = words.tolist()
            self.merged.copy_(self.handed_over)
            if num_steps or not is_settled:  # else all stand still, on the same global model
                net.all_reduce(self.merged).wait()
                self.merged /= net.world_size
                if self.outer is not None:
                    self.outer.step(self.merged, is_update=num_steps > 0)
            is_settled = num_standing_still == net.world_size
            if not is_settled:
                self.merged -= self.handed_over
            self.home.send(words, net.rank)


class _Nesterov:
    """SGD with Nesterov momentum on the global model, which takes what a round adds to it.

    v <- m v + (W' - W),    W <- W + lr ((W' - W) + m v)

    Legend: W the global model, W' what Equation (1) makes of it, v the momentum, m its factor.
    """

    def __init__(self, lr: float, factor: float) -> None:
        self.momentum: Tensor | None = None
        self._lr = lr
        self._factor = factor
        self._model: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        """Where nothing is in flight and no step has been made, x is the global model."""
        if self._model is None:
            self._model = x.clone()

    def end(self) -> None:
        """All replicas are the global model; what is done to them from here on is done to it."""
        self._model = None

    def step(self, averaged: Tensor, *, is_update: bool) -> None:
        """Makes W of W', in place; a round without any local step moves nothing."""
        assert self._model is not None, "every rank begins before it hands over"
        if is_update:
            if self.momentum is None:
                self.momentum = torch.zeros_like(averaged)
            averaged -= self._model
            self.momentum.mul_(self._factor).add_(averaged)
            self._model.add_(averaged, alpha=self._lr)
            self._model.add_(self.momentum, alpha=self._lr * self._factor)
        averaged.copy_(self._model)
