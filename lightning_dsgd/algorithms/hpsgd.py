"""HPSGD (Zhou et al., 2020, https://arxiv.org/abs/2009.02701), Algorithms 2 and 3.

    r_i <- r_i - mu * g_i(r_i)                                   every step, on the replica
    W_{s+1} = W_s - (mu / P) * sum over ranks i, steps e in [s] of g_i,e       Equation (1)
            = (1 / P) * sum over ranks i of r_i at switch s                    Equation (2)
    r_i <- r_i + W_{s+1} - (r_i at switch s)                     at switch s + 1

Legend: r_i the replica of rank i (x), W_s the global model, g gradient, mu learning rate, P ranks;
switch s is the step boundary at which a rank merges the all-reduce of round s - 1 and hands over
for round s; [s] are the steps that it has made between its switches s - 1 and s.

**Two roles.**  The trainer is the training thread.  It owns x, and acts at step boundaries only:
if the sum in flight has arrived, it switches, else it continues.  The synchroniser is a lane.  It
executes the rounds in order, and only it waits for other ranks.  It hears of a hand-over once the
device has made what is handed over, so no sum that it begins waits for a slow kernel.

**Two sums.**  One is in flight while the other fills, and neither is ever added to:

    x at switch s     =  W_s + the updates in [s]           handed over; Equation (2) averages it
    x - (that copy)   =  the updates since switch s         the sum that fills

So a step costs nothing extra, and a switch costs one addition and one copy of |x|.  "Updates" are
the changes that the optimizer made to x: -mu * g for plain SGD, its own steps for any other, whose
state stays local.

**When all merge.**  (a) A rank hands over for round s once, at its first step boundary after its
lane has finished round s - 1.  (b) No lane finishes round s before every rank has handed over for
it: it is an all-reduce.  Nothing else is agreed, and no message says "now".  By induction over s:

1. *The same models.*  Every rank executes the same rounds in the same order, and an all-reduce
   leaves the same bits everywhere: W_0, W_1, ... is one sequence.  No rank is two switches ahead
   of another.
2. *Each update once.*  A step lies between two consecutive switches of its rank: in one [s].
3. *No trainer waits for another rank.*  It only checks.  A round takes t_sync after the slowest
   rank's hand-over, so the number of steps in [s] follows t_sync / t_train, on each rank
   separately.

A trainer waits for its own device, though: the host is at most one step ahead of it.  Else it would
queue steps without a bound while a kernel is slow, and count them as made.

**Standing still.**  A rank that stops (`settle`) merges what is in flight, hands over what is
left, and continues to hand over, with nothing added, whenever it has merged.  Each round first
counts the ranks that stand still.  The round in which all do is the last one: it contains every
update that is in no earlier round, and leaves the global model in all replicas, to the bit.
If something else changes a replica while all stand still (a callback that swaps the weights), a
comparison with that model at the start of the next round detects it, and the change is averaged
like an update.

Differs from the paper:

- Ranks switch together in the sense of (a) and (b), each at its own step number.  If speeds differ,
  a common step number T without waiting grows without bound: when the slowest rank reaches it, the
  fastest is already at c * T, c > 1, and the next common number is no less than that.
- The replica keeps this rank's own sum in flight; in Algorithm 2, and with `paper=True`, it goes on
  from W_{s+1} without it.
- The replica is sent instead of the sum of gradients: by Equation (2) the result is the same.  The
  paper avoids this because two threads would write the weights at once; here only one writes them.
- Any optimizer; a bound on the steps between two switches; an outer optimizer as in DiLoCo
  (Douillard et al., 2023, https://arxiv.org/abs/2311.08105), for which W_s minus the right side of
  Equation (1) is the gradient (`primitives/outer_optimizer.py`).  By default it is plain SGD with
  the learning rate 1, which is Equation (1).

With a `wire_dtype` the updates since the last switch are sent rounded, and what is rounded off is
sent the next time (`primitives/quantised.py`).  The last round sends all of it, unrounded, so the
global model contains every update.  Not in the paper.

No training step waits for another rank; with `max_local_steps` a rank waits for the sum in flight
once it has made so many steps.  Sends 2(P-1)/P |x| and three integers per synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.agreement import average, weigh
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.devices import PASSED, Mark, port_of
from lightning_dsgd.hyperparameters import above, at_least, setting
from lightning_dsgd.primitives import outer_optimizer, quantised, rounding, step_scaling
from lightning_dsgd.primitives.outer_optimizer import OuterOptimizer
from lightning_dsgd.primitives.own_device import await_mark
from lightning_dsgd.primitives.rounds import Rounds
from lightning_dsgd.transport import Transport


@dataclass
class HPSGD(Algorithm):
    """Averages the weights in the background and merges the result while training continues."""

    name: ClassVar[str] = "hpsgd"
    profile: ClassVar[Profile] = Profile(
        when="as often as the network allows, in the background",
        with_whom="all ranks",
        sends="2(P-1)/P |x| per synchronisation",
        memory="2 |x|, 3 |x| with `paper=True`; 4 |x| with an outer optimizer, 5 |x| with a "
        "`wire_dtype`",
    )
    printed: ClassVar[dict[str, Any]] = {
        "max_local_steps": None,
        "outer_lr": 1,
        "outer_momentum": 0,
        "wire_dtype": "float32",
        "scale_steps": False,
    }

    max_local_steps: int | None = at_least(
        1,
        default=None,
        doc="a rank waits once it has made this many steps since the last synchronisation; None "
        "means never",
    )
    outer_lr: float = above(
        0,
        default=1.0,
        doc="learning rate of the outer optimizer, which steps once per synchronisation",
    )
    outer_momentum: float = at_least(
        0, below=1, default=0.0, doc="Nesterov momentum of the outer optimizer"
    )
    wire_dtype: str = rounding.wire_dtype()
    scale_steps: bool = step_scaling.scale_steps()
    paper: bool = setting(
        default=False,
        doc="if True, a rank goes on from the global model alone after each synchronisation, as "
        "printed: its own steps that are being summed come back with the next one",
    )

    @property
    def traits(self) -> Traits:
        return Traits(weighs_samples=True, scales_steps=self.scale_steps, looks_itself=True)

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        if self.wire_dtype != "float32":
            return 5.0
        if self.outer_lr != 1 or self.outer_momentum:
            return 4.0
        return 3.0 if self.paper else 2.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.x = x
        self.handed_over = torch.empty_like(x)
        is_apart = self.paper and net.world_size > 1
        self.restart = x.clone() if is_apart else None  # W_s, from which the replica began
        self.merged = x.clone()  # the lane's, from a hand-over to its answer
        self.is_at_rest = True  # nothing is in flight, and `merged` is the global model
        self.is_touched = False  # x was another one when training went on from there
        self.was_last = True  # the lane's: all ranks stood still in the round before
        self.residual = quantised.residual_of(net, x, self.wire_dtype)
        is_plain = self.outer_lr == 1 and self.outer_momentum == 0 and self.residual is None
        self.outer = None if is_plain else OuterOptimizer(self.outer_lr, self.outer_momentum)
        self.num_local_steps = 0  # since the last switch
        self.made: Mark = PASSED  # behind the last step
        self.samples = self.no_samples()
        self.num_syncs = self.num_synced_steps = 0
        outer_optimizer.warn_of_rates(net, self, "max_local_steps", nesterov=True)
        self.rounds = Rounds(net, self._synchronize, "synchroniser")

    # ---- the trainer ----

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.is_at_rest:
            self.conditions.look()
            self._begin(x)

    def after_update(self, x: Tensor) -> None:
        self.rounds.check()
        await_mark(self.net, self.made)
        self.made = port_of(x.device).mark()
        self.num_local_steps += 1
        self.samples += self.weight
        if self.rounds.num_under_way:
            bound = self.max_local_steps
            may_go_on = bound is None or self.num_local_steps < bound
            if may_go_on and not self.rounds.is_made():
                return
            self.merge(x)
        self.hand_over(x, stands_still=False)

    def settle(self, x: Tensor) -> None:
        is_last = False
        while not is_last:
            if not self.rounds.num_under_way:
                self.hand_over(x, stands_still=True)
            is_last = self.merge(x)

    def consensus(self, x: Tensor) -> Tensor:
        return x.clone()

    def stop(self) -> None:
        self.rounds.stop()

    def _begin(self, x: Tensor) -> None:
        """Begins anew at the first step or round after all ranks have stood still."""
        self.is_at_rest = False
        self.is_touched = not torch.equal(x, self.merged)
        if self.restart is not None:
            self.restart.copy_(x)
        if self.outer is not None:
            self.outer.begin(x)

    def merge(self, x: Tensor) -> bool:
        """Adds the sum in flight to x; returns whether x is now the global model on all ranks."""
        num_standing_still, *_ = self.rounds.wait()
        is_last: bool = num_standing_still == self.net.world_size
        if is_last:
            x.copy_(self.merged)
            self.is_at_rest = True
        else:
            x += self.merged
            if self.restart is not None:
                x -= self.restart
                self.restart.copy_(self.merged)
        return is_last

    def hand_over(self, x: Tensor, *, stands_still: bool) -> None:
        """Hands the lane a copy of x, with which the lane begins a round."""
        if self.is_at_rest:
            self._begin(x)
        self.handed_over.copy_(x)
        if self.restart is not None:
            x.copy_(self.restart)
        words = [int(stands_still), self.num_local_steps, int(self.is_touched)]
        self.rounds.ask(words + self.samples.tolist())
        self.samples.zero_()
        self.is_touched = False
        if self.num_local_steps > 0:
            self.num_syncs += 1
        self.num_synced_steps += self.num_local_steps
        self.num_local_steps = 0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "num_syncs": self.num_syncs,
            "num_synced_steps": self.num_synced_steps,
            "is_merged": self.is_at_rest and torch.equal(self.x, self.merged),
        }
        if self.outer is not None and self.outer.momentum is not None:
            state["outer_momentum"] = self.outer.momentum.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_syncs = state["num_syncs"]
        self.num_synced_steps = state["num_synced_steps"]
        if state.get("is_merged"):  # the weights are the global model, and no change to it
            self.merged.copy_(self.x)
        momentum = state.get("outer_momentum")
        if self.outer is not None and momentum is not None:
            self.outer.momentum = momentum.to(self.merged, copy=True)

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        self.num_syncs = state["num_syncs"]
        self.num_synced_steps = state["num_synced_steps"]

    def metrics(self) -> dict[str, float]:
        if not self.num_syncs:
            return {}
        return {
            "num_syncs": float(self.num_syncs),
            "local_steps_per_sync": self.num_synced_steps / self.num_syncs,
        }

    # ---- the synchroniser ----

    def _synchronize(self, net: Transport, words: Tensor) -> Tensor:
        """Makes a round; the lane owns `handed_over` and `merged` while a round is in flight.

        `merged` becomes the change to add to x, or, after a last round and with `paper`, the global
        model.
        """
        samples = words[3:].clone()
        net.all_reduce(words).wait()
        num_standing_still, num_steps, num_touched, *_ = words.tolist()
        self.merged.copy_(self.handed_over)
        if self.outer is not None and num_touched:
            self.outer.share(net)
        is_last = num_standing_still == net.world_size
        # In other rounds all ranks stand still, on the same global model.
        if num_steps or num_touched or not self.was_last:
            weight = samples, words[3:]
            self._sum(net, self.outer, weight, has_steps=num_steps > 0, is_last=is_last)
        self.was_last = is_last
        if not is_last and self.restart is None:
            self.merged -= self.handed_over
        return words

    def _sum(
        self,
        net: Transport,
        outer: OuterOptimizer | None,
        weight: tuple[Tensor, Tensor],
        *,
        has_steps: bool,
        is_last: bool,
    ) -> None:
        """Makes the next global model from the weights handed over, in `merged`."""
        if self.residual is None:
            weigh(net, self.merged, *weight)
            average(net, self.merged)
        if outer is None:
            return
        self.merged -= outer.model_at()
        if self.residual is not None:
            weigh(net, self.merged, *weight)
            self._sum_rounded(net, self.residual, is_last=is_last)
        if has_steps:
            outer.step(self.merged)
        elif self.residual is not None:  # of rounds before; else it is zero, up to rounding
            outer.apply(self.merged)
        self.merged.copy_(outer.model_at())

    def _sum_rounded(self, net: Transport, residual: Tensor, *, is_last: bool) -> None:
        """Averages with rounding; a last round sends all that was rounded off before, unrounded."""
        if not is_last:
            quantised.average(net, self.merged, residual, self.wire_dtype)
            return
        self.merged += residual
        residual.zero_()
        average(net, self.merged)
