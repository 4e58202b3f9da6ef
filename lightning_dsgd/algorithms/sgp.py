"""Stochastic Gradient Push (Assran et al., ICML 2019, https://arxiv.org/abs/1811.10792).

Algorithm 1; with an optimizer that has Nesterov's momentum, Algorithm 2:

    x <- x + U(g(z))                     the optimizer's step, taken at z, moves x
    send (p x, p w) to each out-neighbour, keep p of both
    x <- x + sum of what arrives,  w likewise
    z <- x / w                           p = 1 / (number of out-neighbours + 1)

Legend: x the biased weights, w their push weight, z the de-biased weights, g the gradient, U the
optimizer, whose state stays local.

The parameters hold z at all times.  x = w z is never stored: w is 1, to the bit, as long as every
rank receives as many shares as it sends; if not, (w - 1) z is put aside while the optimizer steps.
The sums of x and of w over ranks and messages in flight are conserved, so (sum x) / (sum w) is the
mean of the ranks' models, however late or uneven the messages are.

A rank that stops (to evaluate, to save, out of data) tells its neighbours with an empty share.
From then on they keep the shares that were meant for it and expect none from it; shares that
reached it before are added to its x and w.  Every column of the mixing matrix still sums to one.
Whether a neighbour hears of the stop before its next share or after it depends on time, and so do
results where ranks have different numbers of batches: to know it, a rank would wait for an answer.

A rank that gets nothing would give its weight away until nothing is left of it.  Its optimizer's
step moves z by U / w, so training would diverge, and z would lose in rounding what x has.  With all
messages `overlap` steps late, w is 1 / (1 + (1 - p) overlap) on every rank.  A rank that has less
than p of this keeps all, and sends a share of nothing.  So w is never below p^2 / (1 + (1 - p)
overlap), 1 / (4 + 2 overlap) with one peer.  This rule holds with `overlap`, and once a neighbour
has stopped.  Where a share of nothing comes, it holds for the receiver too.  Without these, w is 1,
or, on random graphs, as small as chance makes it.

With `average_momentum=True` a share carries (p w m) too, for each tensor m that U keeps:

    m <- (sum of p w m, the own one and what arrives) / (sum of their p w)

It is a mean in which a rank counts as its weights count in z.  U reads m at z, so m is kept as z is
and not as x: Adam's second moment stays in proportion whatever w is.  A parameter without m counts
as p w = 0 (`moments.py`).  All that a rank sends in a step leaves before it waits, so a rank waits
for no other than without.  m of an earlier step would pull U back, so it needs `overlap=0`.

Differs from the paper: any optimizer; any P; ranks may have different numbers of batches; weight
decay acts on z, where the gradient is computed, and not on x (the same if w is 1).  Not in the
paper: `wire_dtype`, `average_momentum`.  A rank keeps in its own x what it rounds off a share, so
the sum of x stays.

With `paper=True` and `overlap=tau` it is tau-OSGP as published (ICML 2019): a rank sends every tau
steps only, and in such a step waits for what was sent tau steps ago.

Waits for the messages of the step (`overlap=0`), or for those sent `overlap` steps ago, never for
an answer.  On a device a message comes once its sender's device has made it: without `overlap` the
receivers wait for a slow kernel.  Sends num_peers (|x| + 8 bytes) per step; a `wire_dtype` divides
|x| by 2, 3.88 or 7.53.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.agreement import largest
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import at_least, one_of, setting
from lightning_dsgd.primitives import moments, nodes, rounding, step_scaling, topology
from lightning_dsgd.primitives.moments import Moments
from lightning_dsgd.transport import Transport, Work


@dataclass
class SGP(Algorithm):
    """Sends a share of the weights to another rank in every step, to a different one each time.

    A message that arrives early stays in memory until its step.
    """

    name: ClassVar[str] = "sgp"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="`num_peers` other ranks, changing",
        sends="`num_peers` |x|",
        memory="2 |x|; 3 |x| with `overlap` or random graphs or different numbers of batches; "
        "|g| more with a `node_size`, |x| more with `average_momentum`, 3 |x| with Adam",
    )

    printed: ClassVar[dict[str, Any]] = {
        "wire_dtype": "float32",
        "scale_steps": False,
        "average_momentum": False,
    }

    pieces_option = nodes.PIECES_OPTION

    num_peers: int = at_least(
        1,
        default=1,
        doc="number of ranks that a rank sends to in each step; fewer where the graph has fewer",
    )
    overlap: int = at_least(
        0,
        default=0,
        doc="number of steps that a message may be late; 0 means to wait for the messages of this "
        "step",
    )
    topology: str = one_of(
        *topology.GRAPHS,
        default="exponential",
        doc=f"the graph: {', '.join(topology.GRAPHS)}",
    )
    node_size: int | str | None = nodes.node_size("exchange weights between nodes only")
    num_buckets: int | None = nodes.num_buckets()
    wire_dtype: str = rounding.wire_dtype("stays with the rank that sends")
    scale_steps: bool = step_scaling.scale_steps()
    average_momentum: bool = moments.average_momentum("needs `overlap=0` and no `node_size`")
    paper: bool = setting(
        default=False,
        doc="if True, the algorithm is as printed: with `overlap` weights are sent every `overlap` "
        "steps, not in every step",
    )

    @property
    def hierarchical(self) -> bool:
        """Whether ranks of a node make their steps together."""
        return self.node_size is not None

    @property
    def team_size(self) -> int:
        """The number of ranks on a node, which hold the same weights."""
        return self.node.size

    @property
    def period(self) -> int:
        """The number of steps from one message to the next."""
        return max(1, self.overlap) if self.paper else 1

    @property
    def traits(self) -> Traits:
        return Traits(
            uses_gradient=self.hierarchical,  # of ranks of the same node
            exchange_period=self.period,
            takes_pieces=self.hierarchical and self.num_buckets is not None,
            follows_time=self.overlap > 0 or self.scale_steps,
            scales_steps=self.scale_steps,
            looks_itself=True,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        is_held = self.overlap > 0 or self.topology.startswith("random") or is_claimed
        copies = 3.0 if is_held else 2.0
        return copies + self.hierarchical + self.average_momentum

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        nodes.check_num_buckets(self.num_buckets, is_hierarchical=self.hierarchical)
        if self.average_momentum and self.overlap:
            raise ValueError(
                "average_momentum is for messages of the same step, got average_momentum=True with "
                f"overlap={self.overlap}; set overlap=0, or average_momentum=False"
            )
        if self.average_momentum and self.hierarchical:
            raise ValueError(
                "average_momentum is for ranks that exchange their weights themselves, got "
                f"average_momentum=True with node_size={self.node_size!r}; set node_size=None, or "
                "average_momentum=False"
            )

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        super().check(world_size, conditions)
        nodes.check_never_scaled(self.num_buckets, conditions)
        if self.node_size is not None:
            nodes.check_node_size(self.node_size, world_size, conditions)

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.step = 0
        self.w = 1.0
        self.aside: Tensor | None = None
        self.lateness = [0, 0]  # messages taken, and how many steps late they were in all
        size = 1 if self.node_size is None else nodes.ranks_per_node(self.node_size, conditions)
        self.node = nodes.Node(net, size, x, self.num_buckets)
        self.moments = Moments(conditions) if self.average_momentum else None
        is_pushing = self.node.is_leader and len(x) > 0  # a shard may be empty, on all ranks alike
        self.pusher = _Pusher(net, self, size) if is_pushing else None

    def gradient_made(self, g: Tensor, begin: int) -> None:
        self.node.gradient_made(g, begin)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.hierarchical:
            self.node.average(g)
        self._put_aside(x)

    def after_update(self, x: Tensor) -> None:
        if self.hierarchical:
            self.node.give_to_leader(x)
        self._push(x)

    def settle(self, x: Tensor) -> None:
        if self.hierarchical:
            while self.node.serve(x):
                self._put_aside(x)
                self.node.give_to_leader(x)
                self._push(x)
        if self.pusher is not None:
            self._to_biased(x)
            self.w += self.pusher.drain(x, self.w)
            self._to_unbiased(x)
        if self.hierarchical:
            self._share_in_node(x)
        [self.step] = largest(self.net, self.step)  # whose graph comes next is agreed anew

    def _put_aside(self, x: Tensor) -> None:
        """Keeps (w - 1) z aside: x after the update is that plus z after the update."""
        if self.w != 1 and self.pusher is not None:
            self.conditions.look()
            self.aside = torch.empty_like(x) if self.aside is None else self.aside
            torch.mul(x, self.w - 1, out=self.aside)

    def _push(self, x: Tensor) -> None:
        """Makes one step of PushSum, from and to the de-biased weights."""
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

    def stop(self) -> None:
        self.node.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "push_weight": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.w = state["step"], state["push_weight"]

    def metrics(self) -> dict[str, float]:
        taken, late = self.lateness
        return {"push_weight": self.w} | ({"staleness": late / taken} if taken else {})


class _Pusher:
    """Runs PushSum on biased weights: sends shares, expects shares and takes them.

    An empty share says that its sender has stopped.  The weight of any other is a message of its
    own, sent before the share.  The optimizer's tensors follow it, if they are averaged.
    """

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
        """Starts anew: all neighbours make steps."""
        self.stopped: set[int] = set()
        self.has_got_nothing = False  # in a share
        self.expected: deque[tuple[int, int]] = deque()  # (step, from whom)
        self.next: dict[int, Work[Tensor]] = {}  # asked for, one for each neighbour looked at
        self.momentum: list[Tensor] = []  # what has come of p w m and p w, summed

    def _may_give(self, w: float, p: float) -> bool:
        """Returns whether a rank that keeps p of its weight w has enough to give the rest away."""
        overlap = self.algorithm.overlap
        may_starve = overlap or self.stopped or self.has_got_nothing
        if self.algorithm.paper or not may_starve:
            return True
        return w >= p / (1 + (1 - p) * overlap)

    def push(self, x: Tensor, w: float, step: int) -> float:
        """Sends shares, adds the shares that have come to x, and returns the new w."""
        a = self.algorithm
        if step % a.period:
            return w + self._take(x, step)
        at = step // a.period
        arguments = (a.topology, at, self.place, self.num_places, a.num_peers)
        receivers = self._ranks(topology.out_peers(*arguments))
        p = 1 / (len(receivers) + 1)
        going = [peer for peer in receivers if not self._has_stopped(peer, x)]
        if going:
            gives = self._may_give(w, p)
            share = x * (p if gives else 0.0)
            message = rounding.encode(share, a.wire_dtype)
            weight = torch.tensor([w * p if gives else 0.0], dtype=torch.float64)
            momentum = a.moments.message(x, float(weight)) if a.moments is not None else []
            for peer in going:
                self.net.send(weight, peer)
                self.net.push(message, peer)
                if a.moments is not None:
                    a.moments.send(self.net, momentum, peer)
            kept = p * (len(receivers) + 1 - len(going)) if gives else 1.0
            x *= kept
            w *= kept
            if message is not share:  # what is rounded off stays here
                x.add_(share - rounding.decode(message, like=share), alpha=len(going))
        self.expected.extend((step, peer) for peer in self._ranks(topology.in_peers(*arguments)))
        taken = self._take(x, step)
        self._merge_momentum(w)
        return w + taken

    def _take(self, x: Tensor, step: int) -> float:
        """Adds what has come to x, waits for what is due; returns the weight of both."""
        weight, still_expected, overtaken = 0.0, deque[tuple[int, int]](), set[int]()
        for _, peer in self.expected:  # all are asked for before one is waited for
            self._has_stopped(peer, x)
        for sent_at, peer in self.expected:
            is_due = sent_at <= step - self.algorithm.overlap
            if peer in self.stopped:
                continue
            if not is_due and (peer in overtaken or not self._next(peer, x).done()):
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
        """Adds a rank's next share to x; returns its weight, or 0 if the rank has stopped."""
        share = self._next(peer, x).wait()
        if not len(share):
            self.stopped.add(peer)
            return 0.0
        x += rounding.decode(share, like=x)
        del self.next[peer]
        weight = float(self.net.recv(_FLOAT64, peer).wait())
        self.has_got_nothing = self.has_got_nothing or weight == 0
        if self.algorithm.moments is not None:
            came = self.algorithm.moments.receive(self.net, x, peer)
            for total, part in zip(self.momentum, came, strict=True) if self.momentum else ():
                total += part
            self.momentum = self.momentum or came
        return weight

    def _merge_momentum(self, w: float) -> None:
        """Averages what has come of the optimizer's tensors with this rank's, which counts w."""
        if self.algorithm.moments is not None and self.momentum:
            self.algorithm.moments.merge(w, self.momentum)
        self.momentum = []

    def _next(self, peer: int, x: Tensor) -> Work[Tensor]:
        """Asks for a rank's next share, if it is not asked for yet."""
        if peer not in self.next:
            self.next[peer] = self.net.pull(self._nothing(x), peer)
        return self.next[peer]

    def _nothing(self, x: Tensor) -> Tensor:
        return rounding.encode(x[:0], self.algorithm.wire_dtype)

    def _has_stopped(self, peer: int, x: Tensor) -> bool:
        if peer not in self.stopped:
            share = self._next(peer, x)
            if share.done() and not len(share.wait()):
                self.stopped.add(peer)
        return peer in self.stopped

    def drain(self, x: Tensor, w: float) -> float:
        """Adds all shares under way, until every neighbour has stopped; returns their weight.

        Args:
            x: the biased weights
            w: their push weight
        """
        for peer in self.neighbours:
            self.net.push(self._nothing(x), peer)
        weight = 0.0
        for peer in self.neighbours:
            while peer not in self.stopped:
                weight += self._take_from(peer, x)
        self._merge_momentum(w)
        self.begin()
        return weight

    def _ranks(self, places: list[int]) -> list[int]:
        return [place * self.node_size for place in places]


_FLOAT64 = torch.empty(0, dtype=torch.float64)
