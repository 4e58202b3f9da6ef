"""D-PSGD (Lian et al., NeurIPS 2017, https://arxiv.org/abs/1705.09056), Algorithm 1.

    x_i <- sum_j W_ij x_j - lr * g_i(x_i)      W: mixing weights of the ring

A rank that stops (to evaluate, to save, out of data) sends each neighbour an empty message instead
of its weights.  The neighbours then leave it out and keep its share of W themselves: W stays
symmetric and doubly stochastic, so the mean over the ranks is conserved.

Differs from the paper: with an optimizer other than plain SGD, its update replaces lr * g.

Every rank waits for its two neighbours in every step.  Sends 2 |x| per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import one_of
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import Transport


@dataclass
class DPSGD(Algorithm):
    """Averages the weights with the two neighbours on a ring in every step."""

    name: ClassVar[str] = "dpsgd"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="two neighbours on a ring",
        sends="2 |x|",
        memory="2 |x|",
    )
    traits = Traits(follows_time=False)

    topology: str = one_of("ring", default="ring", doc="the communication graph, as in the paper")

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 2.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        # A shard may be empty, on all ranks alike; an empty message says that its sender stops.
        self.peers = topology.neighbours("ring", net.rank, net.world_size) if len(x) else []
        self.stepping = list(self.peers)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        works = [self.net.exchange(x, peer) for peer in self.stepping]
        theirs = [work.wait() for work in works]
        self.stepping = [p for p, y in zip(self.stepping, theirs, strict=True) if len(y)]
        weight = 1 / (len(self.peers) + 1)
        x *= 1 - weight * len(self.stepping)
        for y in theirs:
            if len(y):
                x.add_(y, alpha=weight)

    def settle(self, x: Tensor) -> None:
        works = [self.net.exchange(x[:0], peer) for peer in self.peers]
        for peer, work in zip(self.peers, works, strict=True):
            while len(work.wait()):  # the neighbour has left this rank out of that step too
                work = self.net.exchange(x[:0], peer)
        self.stepping = list(self.peers)
