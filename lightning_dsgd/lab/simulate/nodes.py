"""The links of simulated ranks that share nodes.

A message inside a node has another latency and bandwidth, and one that leaves it also passes the
node's uplink and the other node's downlink, which the ranks of a node share: each carries one
message at a time, at a rate of its own.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_dsgd.simulated.links import Links, Message


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on one node, and what is different there.

    Args:
        size: how many ranks, one after the other, are on each node
        latency_s: the latency inside a node
        bandwidth_bytes_s: the bandwidth of each rank's link inside a node, in each direction
        uplink_bytes_s: the bandwidth of a node to all other nodes, and from them
    """

    size: int
    latency_s: float
    bandwidth_bytes_s: float
    uplink_bytes_s: float = math.inf


class NodeLinks(Links):
    """The links of all ranks, and of their nodes.

    Args:
        nodes: which ranks share a node
        *args: as `Links` takes them
    """

    def __init__(self, nodes: Nodes, *args: Any) -> None:
        super().__init__(*args)
        self._nodes = nodes
        num_nodes = -(-len(self._baton.threads) // nodes.size)
        self._up_free, self._down_free = [0.0] * num_nodes, [0.0] * num_nodes

    def _is_inside(self, message: Message) -> bool:
        return message.src // self._nodes.size == message.dst // self._nodes.size

    def _rates_of(self, message: Message) -> tuple[float, float]:
        if self._is_inside(message):
            return self._nodes.latency_s, self._nodes.bandwidth_bytes_s
        return super()._rates_of(message)

    def _leave(self, message: Message, at_s: float) -> float:
        return self._pass(self._up_free, message.src, message, at_s)

    def _come(self, message: Message, at_s: float) -> float:
        return self._pass(self._down_free, message.dst, message, at_s)

    def _pass(self, free: list[float], rank: int, message: Message, at_s: float) -> float:
        """Returns when a message begins to pass the link between a rank's node and the others."""
        if self._is_inside(message):
            return at_s
        node = rank // self._nodes.size
        at_s = max(at_s, free[node])
        free[node] = at_s + message.num_bytes / self._nodes.uplink_bytes_s
        return at_s
