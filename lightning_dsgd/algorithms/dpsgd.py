"""D-PSGD (Lian et al., NeurIPS 2017, https://arxiv.org/abs/1705.09056), Algorithm 1.

    x_i <- sum_j W_ij x_j - lr * g_i(x_i)      W: mixing weights of the ring

A rank that stops (to evaluate, to save, out of data) sends each neighbour an empty message in place
of its weights.  The neighbours then leave it out, giving its share of W to themselves: W stays
symmetric and doubly stochastic, so the mean over the ranks is conserved.

Differs from the paper: with an optimizer other than plain SGD, its update takes the place of lr *
g. Every rank waits for its two neighbours in every step.  Sends 2 |x| a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.transport import Transport


@dataclass
class DPSGD(Algorithm):
    """Averages the weights with those of the two neighbours on a ring, in every step.

    Memory above plain training: 2 |x| (the neighbours' weights, while they are added).

    Args:
        topology: "ring", the one of the paper
    """

    name: ClassVar[str] = "dpsgd"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="two neighbours on a ring",
        sends="2 |x|",
        suits="comparison: the ancestor of the gossip strategies",
    )

    topology: str = "ring"

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.topology != "ring":
            raise ValueError(f'topology must be "ring", got topology={self.topology!r}')

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.peers = topology.ring(net.rank, net.world_size)
        self.stepping = list(self.peers)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        sent = [self.net.send(x, peer, copy=False) for peer in self.stepping]
        theirs = [self.net.recv(x, peer).wait() for peer in self.stepping]
        self.stepping = [p for p, y in zip(self.stepping, theirs, strict=True) if len(y)]
        weight = 1 / (len(self.peers) + 1)
        for work in sent:
            work.wait()
        x *= 1 - weight * len(self.stepping)
        for y in theirs:
            if len(y):
                x.add_(y, alpha=weight)

    def settle(self, x: Tensor) -> None:
        for peer in self.peers:
            self.net.send(x[:0], peer)
        for peer in self.stepping:
            while len(self.net.recv(x, peer).wait()):
                pass  # its neighbour has left it out of that step too
        self.stepping = list(self.peers)
