"""AD-PSGD (Lian et al., ICML 2018, https://arxiv.org/abs/1710.06952), Algorithm 1.

    training thread:   x_i <- x_i - lr * g_i(x_i)
    lane, meanwhile:   x_i, x_j <- (x_i + x_j) / 2       j: a random neighbour

Legend: x the weights, y their published copy, g the gradient, P ranks.

The graph is bipartite, so that ranks cannot wait for each other in a cycle: odd ranks ask, even
ranks answer.  Odd ranks ask once per step, unless the last exchange is not finished; neighbours are
1, 3, 7, ... hops away (the bipartite exponential graph).  An exchange is atomic on both sides: the
rank that asks has only one at a time, and the rank that answers handles them one after the other.
It works on published copies; both sides get half of the difference, the same bits with opposite
signs, and add it to their weights after their next step (`published.py`).  So the mean over the
ranks is conserved, and updates that the optimizers make during an exchange are kept.

On a device a rank asks, and is asked for, weights that the device has made: what it has only queued
yet is published once it is made, and the training thread is a step ahead at most.

    lane that asks       ask, push y_i                                      pull d, y_i <- y_i + d
    lane that answers    pull y_i, d <- (y_j - y_i) / 2, y_j <- y_j - d, push d

Weights are pushed and pulled, so NCCL may carry them.  An ask is an empty message, which leaves
once y_i is made: the lane that answers waits for no kernel of the rank that asks, and no lane waits
for a training thread.  This is no `exchange`, in which y_j would leave before y_i has come: the
average would be of older weights, and a `wire_dtype` would round both copies.

A rank that has run out of data stops asking, but answers as long as others ask.

Differs from the paper: any optimizer; odd P; an average reaches the weights after a step, not in
the middle of one; `wire_dtype`.  Rounding conserves the mean too: both sides add what was sent.

No training step waits.  Sends |x| per step: the rank that asks its copy, the rank that answers half
of the difference.  A `wire_dtype` divides that by 2, 3.88 or 7.53.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import setting
from lightning_dsgd.primitives import rounding, step_scaling, topology
from lightning_dsgd.primitives.published import publication_of
from lightning_dsgd.primitives.rounds import Background
from lightning_dsgd.transport import ANY, Transport

_ASK, _CONTROL = range(2)  # tags
_STEPPED, _SETTLE = range(2)


@dataclass
class ADPSGD(Algorithm):
    """Averages the weights with random neighbours in the background, while training continues."""

    name: ClassVar[str] = "adpsgd"
    profile: ClassVar[Profile] = Profile(
        when="up to once per step, in the background",
        with_whom="a random neighbour",
        sends="|x|",
        memory="2 |x|; 4 |x| during an exchange; on a device |x| more, 3 |x| with a `wire_dtype`",
    )

    seed: int = setting(default=0, doc="seed of the random choice of neighbours")
    wire_dtype: str = rounding.wire_dtype("is not averaged")
    scale_steps: bool = step_scaling.scale_steps()

    @property
    def traits(self) -> Traits:
        return Traits(scales_steps=self.scale_steps, looks_itself=True)

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        if not on_device:
            return 4.0
        return 5.0 if self.wire_dtype == "float32" else 7.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.neighbours = topology.neighbours("bipartite_exponential", net.rank, net.world_size)
        self.asks = net.rank % 2 == 1
        self.lane: Background | None = None
        self.is_asking = self.has_settled = False
        self.num_steps = self.num_exchanges = 0

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self._begin(x)
        if self.has_settled:  # since then, others may have put something else into x
            self.conditions.look()
            self.published.publish(x)
            self.has_settled = False

    def after_update(self, x: Tensor) -> None:
        self.num_steps += 1
        if self.lane is None:
            return
        self.lane.check()
        self.published.publish(x)
        if self.asks and not self.is_asking:
            self.is_asking = True
            self.lane.tell([_STEPPED], _CONTROL)

    def settle(self, x: Tensor) -> None:
        self._begin(x)
        if self.lane is None:
            return
        if self.asks:
            self.lane.tell([_SETTLE], _CONTROL)
            self.lane.expect().wait()
        self.lane.home.barrier().wait()  # all that was asked has been answered
        self.published.publish(x)
        self.lane.home.barrier().wait()  # no rank asks before all ranks are here
        self.has_settled = True

    def _begin(self, x: Tensor) -> None:
        """Publishes the first weights, after a resume has restored its state."""
        if self.lane is None and self.neighbours:
            self.x = x
            self.conditions.look()
            self.published = publication_of(self.net, x)
            self.like = rounding.encode(x[:0], self.wire_dtype)
            serve = self._ask if self.asks else self._answer
            self.lane = Background(self.net, serve, "averager")

    def stop(self) -> None:
        if self.lane is not None:
            self.lane.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "num_exchanges": self.num_exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_exchanges = state["num_steps"], state["num_exchanges"]

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        self.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        steps = self.num_steps
        return {"exchanges_per_step": self.num_exchanges / steps} if steps else {}

    # ---- the lane ----

    def _ask(self, net: Transport) -> None:
        while True:
            if int(net.recv(_WORDS, net.rank, _CONTROL).wait(math.inf)) == _SETTLE:
                assert self.lane is not None, "its training thread has told it"
                self.lane.answer()
                continue
            draw = random.Random(f"{self.seed}/{net.rank}/{self.num_exchanges}")
            peer = draw.choice(self.neighbours)
            mine = self.published.snapshot()
            message = rounding.encode(mine, self.wire_dtype)
            net.send(mine[:0], peer, _ASK)  # on a device, once the message is made
            net.push(message, peer)
            answer = net.pull(self.like, peer).wait()
            self.published.correct(rounding.decode(answer, like=mine))
            self.num_exchanges += 1
            self.is_asking = False

    def _answer(self, net: Transport) -> None:
        while True:
            ask = net.recv(self.x[:0], ANY, _ASK)
            ask.wait(math.inf)
            theirs = net.pull(self.like, ask.source).wait()
            answer = self.published.meet(rounding.decode(theirs, like=self.x), self.wire_dtype)
            net.push(answer, ask.source)
            self.num_exchanges += 1


_WORDS = torch.empty(0, dtype=torch.int64)
