"""Ranks of one node that hold the same weights, and talk to the other nodes together.

    g    the mean over the ranks of the node, so that all of them make the same step
    x    either the node's first rank exchanges it, and gives the result to the others;
         or each rank exchanges one shard of it with the ranks of its place on other nodes

A rank that has run out of data brings zeros, and takes over the step of those that have not.

With `num_buckets` a lane makes the mean in pieces, during the backward pass (`pieces`).  After it
the training threads ask who steps, unless all stand still, which all ranks of the node know from
the lane, so none asks alone.  A rank that has handed over pieces and makes no step counts in that
mean, with zeros for the rest, and takes over the step of the others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.hyperparameters import at_least
from lightning_dsgd.primitives.own_device import await_step
from lightning_dsgd.primitives.pieces import Pieces
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.view import View

AUTO: Final = "auto"
"""The node size with which a node has as many ranks as the launch has started on it."""


def node_size(what: str) -> Any:
    """Makes the hyperparameter `node_size`; the text says what else the ranks of a node do."""
    return at_least(
        1,
        default=None,
        word=AUTO,
        doc=f"number of consecutive ranks that average their gradients in every step, and {what}; "
        f'"{AUTO}" means the ranks of a node, as the launch tells it; None: no ranks do',
    )


def num_buckets() -> Any:
    """Makes the hyperparameter `num_buckets`."""
    return at_least(
        1,
        default=None,
        doc="with `node_size`: number of pieces of equal size in which a node averages its "
        "gradients, during the backward pass; None: all at once, after it",
    )


PIECES_OPTION: Final = "num_buckets", "num_buckets=None"
"""What has a node average gradients during the backward pass, and what does not."""


def check_num_buckets(num: int | None, *, is_hierarchical: bool) -> None:
    """Raises where there is no node whose gradients could be cut into pieces."""
    if num is not None and not is_hierarchical:
        raise ValueError(
            "num_buckets cuts the gradients that the ranks of a node average, got "
            f"num_buckets={num} without node_size; set node_size, or leave num_buckets out"
        )


def check_never_scaled(num_buckets: int | None, conditions: Conditions) -> None:
    """Raises where gradients would be summed before it is known whether their loss overflowed."""
    if num_buckets is not None and conditions.skips_overflow:
        raise ValueError(
            "num_buckets needs gradients that are never scaled, got "
            f"num_buckets={num_buckets} with a loss that is scaled for fp16; use "
            'precision="bf16-mixed", or leave num_buckets out'
        )


def check_node_size(size: int | str, world_size: int, conditions: Conditions) -> None:
    """Raises unless all nodes have the same number of ranks."""
    known = conditions.ranks_per_node if size == AUTO else size
    if known is None or world_size % int(known):
        told = "" if size != AUTO else f" (by the launch: {known or 'not known'})"
        raise ValueError(
            f"node_size must divide world_size, got node_size={size!r}{told} with "
            f"world_size={world_size}; set node_size to the number of ranks on each node"
        )


def ranks_per_node(size: int | str, conditions: Conditions) -> int:
    """Returns the node size that was set, or the one that the launch tells."""
    return conditions.ranks_per_node or 1 if isinstance(size, str) else size


class Node:
    """Holds the ranks of this rank's node together.

    Args:
        net: the network of all ranks
        size: how many ranks a node has
        x: the weights, like which gradients are laid out
        num_buckets: in how many pieces the node averages its gradients; None: after the backward
            pass
    """

    def __init__(self, net: Transport, size: int, x: Tensor, num_buckets: int | None) -> None:
        self.net = net.sub("node")
        self.size = size
        self.place = net.rank % size
        self.leader = net.rank - self.place
        self.members = range(self.leader, self.leader + size)
        self.is_leader = net.rank == self.leader
        self.first_active = self.leader
        self._pieces = None
        if num_buckets is not None and size > 1:
            assert isinstance(net, Endpoint)
            firsts = range(0, net.world_size, size)
            node = View.one_of(net.sub("pieces"), [range(each, each + size) for each in firsts])
            self._pieces = Pieces(node, x, _average, weight=lambda: 1, num_pieces=num_buckets)

    def gradient_made(self, g: Tensor, begin: int) -> None:
        """Hands over what the backward pass has made of a gradient."""
        if self._pieces is not None:
            self._pieces.hand_over(g, begin)

    def average(self, g: Tensor) -> int:
        """Puts the mean of the gradients of the ranks that step into g; returns their number."""
        if self._pieces is None:
            num_active = self._sum(g, active=True)
            g /= num_active
            return num_active
        self._pieces.check()
        self._pieces.hand_over(g, 0)
        self._pieces.take_mean(g)
        return self._gather_who_steps(active=True)

    def serve(self, x: Tensor) -> int:
        """Takes part in a mean with a gradient of zero; returns how many ranks step.

        That is 1 where none does, but some have handed over pieces: there is another round.
        """
        if self._pieces is None:
            return self._sum(torch.zeros_like(x), active=False)
        if not self._pieces.complete():
            self._pieces.serve(x)
        if not self._pieces.num_active:
            return 0
        return self._gather_who_steps(active=False) or 1

    def stop(self) -> None:
        """Ends the lane; never waits for another rank."""
        if self._pieces is not None:
            self._pieces.stop()

    def _sum(self, g: Tensor, *, active: bool) -> int:
        """Sums g over the node; returns how many of its ranks step."""
        await_step(self.net, g)  # else a sum of the node would hold up those of the lane
        num_active = self._gather_who_steps(active=active)
        if num_active:
            self.net.all_reduce(g, self.members).wait()
        return num_active

    def _gather_who_steps(self, *, active: bool) -> int:
        flags = self.net.all_gather(torch.tensor([int(active)]), self.members).wait()
        stepping = [rank for rank, flag in zip(self.members, flags, strict=True) if flag]
        self.first_active = stepping[0] if stepping else self.leader
        return len(stepping)

    def give_to_leader(self, x: Tensor) -> None:
        """Gives the other ranks' result to a leader that has run out of data."""
        if self.first_active != self.leader:
            if self.net.rank == self.first_active:
                self.net.send(x, self.leader)
            elif self.is_leader:
                x.copy_(self.net.recv(x, self.first_active).wait())

    def share(self, x: Tensor, w: float) -> float:
        """Gives the leader's weights to the whole node; returns the leader's push weight."""
        weight = torch.tensor([w], dtype=torch.float64)
        self.net.broadcast(weight, self.leader, self.members).wait()
        self.net.broadcast(x, self.leader, self.members).wait()
        return float(weight)

    # ---- where each rank of the node exchanges a shard ----

    def across(self, net: Transport) -> View:
        """Returns the network of the ranks that have this rank's place on their nodes."""
        assert isinstance(net, Endpoint)
        places = [range(place, net.world_size, self.size) for place in range(self.size)]
        return View.one_of(net.sub("places"), places)

    def shard(self, x: Tensor) -> Tensor:
        """Returns this rank's shard of x, in the same memory."""
        return torch.split(x, self._sizes(len(x)))[self.place]

    def _sizes(self, length: int) -> list[int]:
        bounds = [length * place // self.size for place in range(self.size + 1)]
        return [end - begin for begin, end in pairwise(bounds)]

    def give_to_idle(self, x: Tensor, num_active: int) -> None:
        """Gives the step that the others have made to ranks that have run out of data."""
        if num_active < self.size:
            self.net.broadcast(x, self.first_active, self.members).wait()

    def gather(self, x: Tensor) -> None:
        """Puts every rank's shard into x."""
        self.net.gather_into(x, self.shard(x), self._sizes(len(x)), self.members).wait()


def _average(net: Transport, piece: Tensor, _: slice, weight: int, total: int) -> None:
    """Puts the mean over the ranks that step into a piece of the gradient, in the lane."""
    net.all_reduce(piece).wait()
    piece /= total
