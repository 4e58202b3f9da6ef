"""AD-PSGD (Lian et al., ICML 2018, https://arxiv.org/abs/1710.06952), Algorithm 1.

    training thread:   x_i <- x_i - lr * g_i(x_i)
    lane, meanwhile:   x_i, x_j <- (x_i + x_j) / 2       j: a random neighbour

Legend: x the weights, g the gradient, P ranks.

The graph is bipartite, so that no cycle of ranks can wait: odd ranks ask, even ranks answer.  Odd
ranks ask once a step, unless the last exchange still goes on; neighbours are 1, 3, 7, ... hops away
(the bipartite exponential graph).  An exchange is atomic on both sides: who asks has no other under
way, who answers makes one after the other.  It works on published copies; both sides get half of
the difference, the same bits with opposite signs, and add it to their weights after their next step
(`published.py`).  So the mean over the ranks is conserved, and what the optimizers do in the
meantime is kept.

A rank that has run out of data asks no more, but answers as long as others ask.

Differs from the paper: any optimizer; odd P; an average reaches the weights after a step, not in
the middle of one.

Waits for nobody.  Sends |x| a step (who asks: its copy; who answers: half of the difference).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.published import Published
from lightning_dsgd.transport import ANY, Lane, Transport

_ASK, _ANSWER, _CONTROL = range(3)  # tags
_STEPPED, _SETTLE = range(2)


@dataclass
class ADPSGD(Algorithm):
    """Averages the weights with those of random neighbours, beside the training.

    Memory above plain training: 2 |x|, the published copy and the corrections; 2 |x| more during an
    exchange (what is sent and what is received).

    Args:
        seed: of the neighbours that are asked
    """

    name: ClassVar[str] = "adpsgd"
    profile: ClassVar[Profile] = Profile(
        when="once a step, beside the training",
        with_whom="a random neighbour",
        sends="|x|",
        suits="stragglers of every kind: nobody ever waits",
    )

    seed: int = 0

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.neighbours = topology.neighbours("bipartite_exponential", net.rank, net.world_size)
        self.asks = net.rank % 2 == 1
        self.home = net.sub("home")  # where the training thread is answered
        self.lane: Lane | None = None
        self.is_asking = self.has_settled = False
        self.num_steps = self.num_exchanges = 0

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self._begin(x)
        if self.has_settled:  # since then, others may have put something else into x
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
            self._tell(_STEPPED)

    def settle(self, x: Tensor) -> None:
        self._begin(x)
        if self.lane is None:
            return
        if self.asks:
            self._tell(_SETTLE)
            self.home.recv(_WORDS, self.net.rank).wait()
        self.home.barrier().wait()  # all that was asked has been answered
        self.published.publish(x)
        self.home.barrier().wait()  # nobody asks before all are here
        self.has_settled = True

    def _begin(self, x: Tensor) -> None:
        """Publishes the first weights; what a resume restores has come by now."""
        if self.lane is None and self.neighbours:
            self.published = Published(x)
            self.like = x[:0]
            serve = self._ask if self.asks else self._answer
            self.lane = self.net.spawn_lane(serve, "averager")

    def stop(self) -> None:
        if self.lane is not None:
            self.lane.stop()

    def _tell(self, kind: int) -> None:
        assert self.lane is not None
        self.lane.net.send(torch.tensor([kind]), self.net.rank, _CONTROL)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "num_exchanges": self.num_exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_exchanges = state["num_steps"], state["num_exchanges"]

    def metrics(self) -> dict[str, float]:
        steps = self.num_steps
        return {"exchanges_per_step": self.num_exchanges / steps} if steps else {}

    # ---- the lane ----

    def _ask(self, net: Transport) -> None:
        while True:
            if int(net.recv(_WORDS, net.rank, _CONTROL).wait(math.inf)) == _SETTLE:
                self.home.send(_WORDS, net.rank)
                continue
            draw = random.Random(f"{self.seed}/{net.rank}/{self.num_exchanges}")
            peer = draw.choice(self.neighbours)
            net.send(self.published.snapshot(), peer, _ASK, copy=False)
            self.published.correct(net.recv(self.like, peer, _ANSWER).wait())
            self.num_exchanges += 1
            self.is_asking = False

    def _answer(self, net: Transport) -> None:
        while True:
            receipt = net.recv(self.like, ANY, _ASK)
            theirs = receipt.wait(math.inf)
            net.send(self.published.meet(theirs), receipt.source, _ANSWER, copy=False)
            self.num_exchanges += 1


_WORDS = torch.empty(0, dtype=torch.int64)
