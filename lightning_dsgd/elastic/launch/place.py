"""Where a node stands among all nodes of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Places this node among all nodes.

    Args:
        ranks: how many ranks each node has
        nodes: how many nodes there are
        node: the number of this node
        host: where the ranks meet
        port: the port where the ranks meet; 0: any free port, on one node
        joins: whether the node's ranks join a training that goes on; `nodes` is 1 then, whatever
            the number of nodes of that training
    """

    ranks: int
    nodes: int
    node: int
    host: str
    port: int
    joins: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("nodes", 1), ("node", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"--{name} must be at least {least}, got {getattr(self, name)}; try "
                    f"--{name} {least}"
                )
        if self.node >= self.nodes:
            raise ValueError(
                f"--node must be below --nodes, got --node {self.node} with --nodes {self.nodes}; "
                "nodes are counted from 0"
            )
        if self.joins and (self.nodes > 1 or not self.port):
            raise ValueError(
                "ranks that join must be told where the others meet, and no nodes, got "
                f"--rendezvous {self.host}:{self.port} and --nodes {self.nodes}; give --join the "
                "--rendezvous of the training, as in --rendezvous node0:29500"
            )
        if self.nodes > 1 and not self.port:
            raise ValueError(
                "several nodes must know where the ranks meet, got no --rendezvous; give all nodes "
                "the address of node 0 and a free port there, as in --rendezvous node0:29500"
            )
