"""Stochastic Gradient Push (Assran et al., ICML 2019, https://arxiv.org/abs/1811.10792).

Algorithm 1; with an optimizer that has Nesterov's momentum, Algorithm 2:

    x <- x + U(g(z))                     the optimizer's step, taken at z, moves x
    send (p x, p w) to each out-neighbour, keep p of both
    x <- x + sum of what arrives,  w likewise
    z <- x / w                           p = 1 / (number of out-neighbours + 1)

Legend: x the biased weights, w their push weight, z the de-biased weights, g the gradient, U the
optimizer with all its state, which stays local.

The parameters hold z at all times.  x = w z is never stored: w is 1, to the bit, as long as every
rank takes as many shares as it sends; where it is not, (w - 1) z is put aside while the optimizer
works.
The sums of x and of w over ranks and messages under way are conserved, so (sum x) / (sum w) is the
mean of the ranks' models, however late or uneven the messages are.

A rank that stops (to evaluate, to save, out of data) says so to its neighbours by an empty message.
From then on they keep the shares that were meant for it and expect none from it; what reached it
before is added to its x and w.  Every column of the mixing matrix still sums to one.

Differs from the paper: any optimizer; any P; ranks may have different numbers of batches; weight
decay acts on z, where the gradient is taken, and not on x (the same where w is 1).

Waits for the messages of the step (`overlap=0`), or for those sent `overlap` steps ago, never for
an answer.  Sends num_peers (|x| + 8 bytes) a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.transport import Receipt, Transport

_WEIGHT, _WEIGHTS = 0, 1  # tags: w, an empty one says that its sender has stopped; x


@dataclass
class SGP(Algorithm):
    """Pushes shares of the weights along a directed graph that changes with every step.

    Memory above plain training: 2 |x| (the share that is sent, and what arrives, while it is
    added), and one |x| more once w differs from 1 (with `overlap`, random graphs, or uneven data).
    With `hierarchical`, |g| too.  A message that came early lies in its mailbox until it is due.

    Args:
        num_peers: to how many ranks a rank sends in each step, fewer where the graph has fewer
        overlap: how many steps late a message may be taken; 0 waits for those of the step
        hierarchical: whether gradients are averaged inside a node, and nodes, not ranks, push
        topology: the graph, one of `topology.GRAPHS`
        node_size: how many ranks a node has, with `hierarchical`; neighbours in rank
    """

    name: ClassVar[str] = "sgp"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="`num_peers` other ranks, changing",
        sends="`num_peers` |x|",
        suits="many nodes or slow networks: one message a step, whatever P is",
    )

    num_peers: int = 1
    overlap: int = 0
    hierarchical: bool = False
    topology: str = "exponential"
    node_size: int | None = None

    @property
    def uses_gradient(self) -> bool:  # type: ignore[override]
        """Only inside a node are gradients communicated."""
        return self.hierarchical

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.num_peers < 1:
            raise ValueError(
                f"num_peers must be at least 1, got num_peers={self.num_peers}; try num_peers=1"
            )
        if self.overlap < 0:
            raise ValueError(
                f"overlap must not be negative, got overlap={self.overlap}; try overlap=1"
            )
        if self.topology not in topology.GRAPHS:
            raise ValueError(
                f"topology must be one of {', '.join(topology.GRAPHS)}, "
                f'got topology={self.topology!r}; try topology="exponential"'
            )
        size = self.node_size
        if self.hierarchical and (size is None or size < 1 or world_size % size):
            raise ValueError(
                "with hierarchical=True, node_size must divide world_size, got "
                f"node_size={size} with world_size={world_size}; set node_size to the number of "
                "ranks on each node"
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.step = 0
        self.w = 1.0
        self.aside: Tensor | None = None
        self.lateness = [0, 0]  # messages taken, and how many steps late they were in all
        size = self.node_size if self.hierarchical else None
        self.node = _Node(net, size or 1)
        self.pusher = _Pusher(net, self, size or 1) if self.node.is_leader else None

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.hierarchical:
            g /= self.node.sum_of_active(g, active=True)
        self._put_aside(x)

    def after_update(self, x: Tensor) -> None:
        if self.hierarchical:
            self.node.give_to_leader(x)
        self._push(x)

    def settle(self, x: Tensor) -> None:
        if self.hierarchical:
            zeros = torch.zeros_like(x)
            while self.node.sum_of_active(zeros, active=False):
                self._put_aside(x)
                self.node.give_to_leader(x)
                self._push(x)
                zeros.zero_()
        if self.pusher is not None:
            self._to_biased(x)
            self.w += self.pusher.drain(x)
            self._to_unbiased(x)
        if self.hierarchical:
            self._share_in_node(x)
        steps = self.net.all_gather(torch.tensor([self.step])).wait()
        self.step = max(int(step) for step in steps)  # whose graph comes next is agreed anew

    def _put_aside(self, x: Tensor) -> None:
        """Keeps (w - 1) z: x after the update is z after the update and that."""
        if self.w != 1 and self.pusher is not None:
            self.aside = torch.empty_like(x) if self.aside is None else self.aside
            torch.mul(x, self.w - 1, out=self.aside)

    def _push(self, x: Tensor) -> None:
        """One step of PushSum, from and to the de-biased weights."""
        if self.pusher is not None:
            if self.w != 1:
                assert self.aside is not None
                x += self.aside
            self.w = self.pusher.push(x, self.w, self.step)
            self._to_unbiased(x)
        self.step += 1
        if self.hierarchical:
            self._share_in_node(x)

    def _to_biased(self, x: Tensor) -> None:
        if self.w != 1:
            x *= self.w

    def _to_unbiased(self, x: Tensor) -> None:
        if self.w != 1:
            x /= self.w

    def _share_in_node(self, x: Tensor) -> None:
        self.w = self.node.share(x, self.w)

    def consensus(self, x: Tensor) -> Tensor:
        total, weight = x * self.w, torch.tensor([self.w], dtype=torch.float64)
        self.net.all_reduce(weight).wait()
        self.net.all_reduce(total).wait()
        total /= float(weight)
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "push_weight": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.w = state["step"], state["push_weight"]

    def metrics(self) -> dict[str, float]:
        taken, late = self.lateness
        return {"push_weight": self.w} | ({"staleness": late / taken} if taken else {})


class _Pusher:
    """PushSum on biased weights: what a rank sends, expects and takes."""

    def __init__(self, net: Transport, algorithm: SGP, node_size: int) -> None:
        self.net = net
        self.algorithm = algorithm
        self.node_size = node_size
        self.place = net.rank // node_size
        self.num_places = net.world_size // node_size
        self.neighbours = self._ranks(
            topology.neighbours(algorithm.topology, self.place, self.num_places)
        )
        self.begin()

    def begin(self) -> None:
        """All neighbours step (again)."""
        self.stopped: set[int] = set()
        self.expected: deque[tuple[int, int]] = deque()  # (step, from whom)
        self.next_weight: dict[int, Receipt] = {}  # posted ahead, one for each neighbour looked at

    def push(self, x: Tensor, w: float, step: int) -> float:
        """Sends shares, adds to x what has come; gives the new w."""
        a = self.algorithm
        arguments = (a.topology, step, self.place, self.num_places, a.num_peers)
        receivers = self._ranks(topology.out_peers(*arguments))
        p = 1 / (len(receivers) + 1)
        going = [peer for peer in receivers if not self._has_stopped(peer)]
        if going:
            share = x * p
            weight = torch.tensor([w * p], dtype=torch.float64)
            for peer in going:
                self.net.send(share, peer, _WEIGHTS, copy=False)
                self.net.send(weight, peer, _WEIGHT)  # last: where it is, the share is too
            kept = p * (len(receivers) + 1 - len(going))
            x *= kept
            w *= kept
        self.expected.extend((step, peer) for peer in self._ranks(topology.in_peers(*arguments)))
        return w + self._take(x, step)

    def _take(self, x: Tensor, step: int) -> float:
        """Adds what has arrived to x, waiting for what is due; gives its weight."""
        weight, still_expected, overtaken = 0.0, deque[tuple[int, int]](), set[int]()
        for sent_at, peer in self.expected:
            is_due = sent_at <= step - self.algorithm.overlap
            if peer in self.stopped:
                continue
            if not is_due and (peer in overtaken or not self._receipt(peer).done()):
                overtaken.add(peer)  # messages of one rank are taken in order
                still_expected.append((sent_at, peer))
                continue
            weight += self._take_from(peer, x)
            if peer not in self.stopped:
                self.algorithm.lateness[0] += 1
                self.algorithm.lateness[1] += step - sent_at
        self.expected = still_expected
        return weight

    def _take_from(self, peer: int, x: Tensor) -> float:
        """The next message of a rank; 0 if it says that the rank has stopped."""
        weight = self._receipt(peer).wait()
        if not len(weight):
            self.stopped.add(peer)
            return 0.0
        del self.next_weight[peer]
        x += self.net.recv(x, peer, _WEIGHTS).wait()
        return float(weight)

    def _receipt(self, peer: int) -> Receipt:
        if peer not in self.next_weight:
            self.next_weight[peer] = self.net.recv(_FLOAT64, peer, _WEIGHT)
        return self.next_weight[peer]

    def _has_stopped(self, peer: int) -> bool:
        if peer in self.stopped:
            return True
        receipt = self._receipt(peer)
        if receipt.done() and not len(receipt.wait()):
            self.stopped.add(peer)
        return peer in self.stopped

    def drain(self, x: Tensor) -> float:
        """Adds all that is under way, until every neighbour has stopped; gives its weight."""
        for peer in self.neighbours:
            self.net.send(_FLOAT64, peer, _WEIGHT)
        weight = 0.0
        for peer in self.neighbours:
            while peer not in self.stopped:
                weight += self._take_from(peer, x)
        self.begin()
        return weight

    def _ranks(self, places: list[int]) -> list[int]:
        return [place * self.node_size for place in places]


class _Node:
    """The ranks of one node, which hold the same weights; the first of them pushes."""

    def __init__(self, net: Transport, size: int) -> None:
        self.net = net.sub("node")
        self.leader = net.rank // size * size
        self.members = range(self.leader, self.leader + size)
        self.is_leader = net.rank == self.leader
        self.first_active = self.leader

    def sum_of_active(self, g: Tensor, *, active: bool) -> int:
        """Sums g over the node; gives how many of its ranks step (who does not, brings zeros)."""
        flags = self.net.all_gather(torch.tensor([int(active)]), self.members).wait()
        stepping = [rank for rank, flag in zip(self.members, flags, strict=True) if flag]
        if stepping:
            self.first_active = stepping[0]
            self.net.all_reduce(g, self.members).wait()
        return len(stepping)

    def give_to_leader(self, x: Tensor) -> None:
        """A leader that has run out of data pushes what the others have computed."""
        if self.first_active != self.leader:
            if self.net.rank == self.first_active:
                self.net.send(x, self.leader)
            elif self.is_leader:
                x.copy_(self.net.recv(x, self.first_active).wait())

    def share(self, x: Tensor, w: float) -> float:
        """Gives the leader's weights to the whole node."""
        weight = torch.tensor([w], dtype=torch.float64)
        self.net.broadcast(weight, self.leader, self.members).wait()
        self.net.broadcast(x, self.leader, self.members).wait()
        return float(weight)


_FLOAT64 = torch.empty(0, dtype=torch.float64)
