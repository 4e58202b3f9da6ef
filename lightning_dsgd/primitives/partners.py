"""Random partners that wait for each other: who meets whom, and what a rank does that stops.

A rank's v-th exchange is with its partner of version v, in a perfect matching that all ranks draw
from a shared seed.  If P is odd, one rank has no partner.  The rank that is furthest behind waits
for nobody, so no circle of ranks can wait.  A rank that stops tells all possible partners with an
empty message; they then continue without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dsgd.agreement import largest
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import Transport

_WORDS = torch.empty(0, dtype=torch.int64)
_HELLO = 0  # a tag


class Partners:
    """Meets a partner at each version, in the training thread.

    Args:
        net: the network of all ranks
        draw: draws each rank's partner; see `topology.random_partners`
        graph: which ranks can be partners
        seed: the same on all ranks
    """

    def __init__(
        self, net: Transport, draw: Callable[..., Sequence[int]], graph: str, seed: int
    ) -> None:
        self._net, self._draw, self._graph, self._seed = net, draw, graph, seed
        self._stopped: set[int] = set()

    def at(self, version: int) -> int:
        """Returns the rank with which this rank interacts, or this rank if there is none."""
        net = self._net
        return self._draw(version, net.world_size, self._graph, self._seed)[net.rank]

    def next(self, version: int) -> int:
        """Returns the next version at which this rank has a partner, this one or a later one."""
        while self.at(version) == self._net.rank and self._net.world_size > 1:
            version += 1
        return version

    def meet(self, version: int, words: Tensor) -> tuple[int, Tensor] | None:
        """Swaps words with the partner; returns it and its words, None if it is not there."""
        partner = self.at(version)
        if partner == self._net.rank or partner in self._stopped:
            return None
        self._net.send(words, partner, _HELLO)
        theirs = self._net.recv(_WORDS, partner, _HELLO).wait()
        if len(theirs):
            return partner, theirs
        self._stopped.add(partner)
        return None

    def settle(self, version: int) -> int:
        """Stops, and waits until all have; returns the next version, agreed anew."""
        net = self._net
        graph = "ring" if self._graph == "cycle" else "complete"
        peers = topology.neighbours(graph, net.rank, net.world_size)
        for peer in peers:
            net.send(_WORDS, peer, _HELLO)
        for peer in peers:
            while peer not in self._stopped:
                if not len(net.recv(_WORDS, peer, _HELLO).wait()):
                    self._stopped.add(peer)
        self._stopped.clear()
        return largest(net, version)[0]
