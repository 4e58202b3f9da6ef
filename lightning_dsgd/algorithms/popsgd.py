"""PopSGD (Nadiradze et al., 2019, https://arxiv.org/abs/1910.12308), Algorithm 1; SwarmSGD.

    x_i <- x_i - lr * g(x_i),  x_j <- x_j - lr * g(x_j)       local_steps times
    x_i, x_j <- (x_i + x_j) / 2                               j: a random partner

Legend: x the weights, g the gradient.  Two-sided: both partners hold the mean afterwards, the same
to the bit, and the mean over all ranks is conserved.

Partners are drawn from a shared seed, a perfect matching for each version: a rank's v-th
interaction is with its partner of version v.  Nobody waits for anyone but its partner, and ranks
may be any number of versions apart.  Where P is odd, one rank has no partner.

Phase clock (section 3): of two that meet, the one with the lower tick moves on by one, so all
ticks stay near the number of interactions divided by P, for schedules of the learning rate.

`blocking=False` averages with what the partner published last.  A lane executes all versions in
order, each as soon as one of the two partners arrives at it; the other's lane answers in its place.
What they exchange is worked into x at the next interaction (`published.py`); a rank waits only
while its own lane has not finished the interaction before, as it does if the partner has not begun
to train.

`wire_dtype="bfloat16"` sends q(x), rounded, and conserves the mean nevertheless:

    x_i <- x_i + (q(x_j) - q(x_i)) / 2

A rank that stops tells all possible partners, by an empty message; they then go on without it.

Differs from the paper: matchings instead of independent pairs, so that each rank interacts equally
often, and never with itself; any optimizer; the published code is one-sided and loses the mean.
Ours: `wire_dtype`.

Waits for one partner every local_steps steps.  Sends (|x| + 8 bytes) / local_steps a step,
24 bytes in place of the 8 with `blocking=False`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.published import Published
from lightning_dsgd.transport import ANY, Lane, Transport

_MODEL, _CLOCK = 0, 1  # tags; of a lane: _MODEL, _CONTROL
_CONTROL = 1
_ARRIVED, _OFFER = range(2)
_WIRE = {None: None, "bfloat16": torch.bfloat16}


@dataclass
class PopSGD(Algorithm):
    """Averages the weights in random pairs that nobody else waits for.

    Memory above plain training: |x| (the partner's weights, while they are added); with
    `blocking=False` 2 |x|, and 3 |x| more during an interaction.  With `wire_dtype`, |x| more.

    Args:
        local_steps: how many steps lie between two interactions
        blocking: whether to wait for the partner, and average with what it has by then
        topology: "complete", anyone may meet anyone, or "cycle"
        wire_dtype: None sends the weights as they are, "bfloat16" rounded
        seed: of the pairs
    """

    name: ClassVar[str] = "popsgd"
    profile: ClassVar[Profile] = Profile(
        when="every `local_steps` steps",
        with_whom="a random partner",
        sends="|x| / `local_steps`",
        suits="many nodes of uneven speed: at most one partner is waited for",
    )

    local_steps: int = 1
    blocking: bool = True
    topology: str = "complete"
    wire_dtype: str | None = None
    seed: int = 0

    def check(self, world_size: int) -> None:
        if self.local_steps < 1:
            raise ValueError(
                "local_steps must be at least 1, got "
                f"local_steps={self.local_steps}; try local_steps=1"
            )
        if self.topology not in ("complete", "cycle"):
            raise ValueError(
                f'topology must be "complete" or "cycle", got topology={self.topology!r}'
            )
        if self.wire_dtype not in _WIRE:
            raise ValueError(
                f'wire_dtype must be None or "bfloat16", got wire_dtype={self.wire_dtype!r}'
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.steps_since = 0
        self.version = 0
        self.clock = 0
        self.stopped: set[int] = set()
        self.lane: _Averager | None = None

    def partner(self, version: int) -> int:
        """With whom this rank interacts; itself: with nobody."""
        partners = topology.random_partners(version, self.net.world_size, self.topology, self.seed)
        return partners[self.net.rank]

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self._begin(x)

    def after_update(self, x: Tensor) -> None:
        self.steps_since += 1
        if self.steps_since < self.local_steps:
            return
        self.steps_since = 0
        version, self.version = self.version, self.version + 1
        if self.lane is not None:
            self.lane.arrive(version, x)
        elif self.blocking:
            partner = self.partner(version)
            if partner != self.net.rank and partner not in self.stopped:
                self._interact(x, partner)

    def _interact(self, x: Tensor, partner: int) -> None:
        mine = self.on_wire(x)
        self.net.send(mine, partner, _MODEL)
        self.net.send(torch.tensor([self.clock]), partner, _CLOCK)
        theirs = self.net.recv(mine, partner, _MODEL).wait()
        if not len(theirs):
            self.stopped.add(partner)
            return
        if self.wire_dtype is None:
            x.add_(theirs).mul_(0.5)
        else:
            x += half_difference(theirs, mine, x)
        self.tick(partner, int(self.net.recv(_WORDS, partner, _CLOCK).wait()))

    def on_wire(self, x: Tensor) -> Tensor:
        """The weights as they are sent."""
        return x if self.wire_dtype is None else x.to(_WIRE[self.wire_dtype])

    def tick(self, partner: int, clock: int) -> None:
        """The lower of the two ticks moves on; of equal ones that of the lower rank."""
        if (self.clock, self.net.rank) < (clock, partner):
            self.clock += 1

    def settle(self, x: Tensor) -> None:
        self._begin(x)
        if self.lane is not None:
            self.version = self.lane.settle(self.version, x)
        elif self.blocking:
            self._drain(x)
            versions = self.net.all_gather(torch.tensor([self.version])).wait()
            self.version = max(
                int(version) for version in versions
            )  # who meets whom is agreed anew

    def _drain(self, x: Tensor) -> None:
        """Tells all who may come that this rank has stopped, and takes in what they sent before."""
        net = self.net
        everyone = [rank for rank in range(net.world_size) if rank != net.rank]
        peers = topology.ring(net.rank, net.world_size) if self.topology == "cycle" else everyone
        nothing = self.on_wire(x[:0])
        for peer in peers:
            net.send(nothing, peer, _MODEL)
        for peer in peers:
            while peer not in self.stopped:
                if len(net.recv(nothing, peer, _MODEL).wait()):
                    net.recv(_WORDS, peer, _CLOCK).wait()  # it has gone on without us
                else:
                    self.stopped.add(peer)
        self.stopped.clear()

    def _begin(self, x: Tensor) -> None:
        """Publishes the first weights; what a resume restores has come by now."""
        if self.lane is None and not self.blocking and self.net.world_size > 1:
            self.lane = _Averager(self, x)

    def stop(self) -> None:
        if self.lane is not None:
            self.lane.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "steps_since": self.steps_since, "clock": self.clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.clock = state["version"], state["clock"]
        self.steps_since = state["steps_since"]
        if self.lane is not None:
            self.lane.begin_with(self.version)

    def metrics(self) -> dict[str, float]:
        return {"phase_clock": float(self.clock)}


class _Averager:
    """Executes the versions beside the training thread, in order: no cycle of lanes can wait.

    The lane that is furthest behind waits for a partner that has executed all versions before, and
    that answers as soon as it is asked.
    """

    def __init__(self, algorithm: PopSGD, x: Tensor) -> None:
        self.algorithm = algorithm
        self.published = Published(x)
        self.x = x
        self.me = algorithm.net.rank
        self.home = algorithm.net.sub("home")  # where the training thread is answered
        self.begin_with(algorithm.version)
        self.arrived = -1  # the version that the training thread has arrived at, unanswered
        self.clocks: dict[int, int] = {}  # the partners', by version
        self.is_answer_due = False
        self.lane: Lane = algorithm.net.spawn_lane(self.serve, "averager")

    # ---- the training thread ----

    def begin_with(self, version: int) -> None:
        """Nothing is under way."""
        self.next_version = version
        self.due = version - 1  # up to which version somebody has arrived

    def arrive(self, version: int, x: Tensor) -> None:
        self.catch_up()
        self.published.publish(x)
        self.lane.check()
        self.lane.net.send(torch.tensor([_ARRIVED, version, 0]), self.me, _CONTROL)
        self.is_answer_due = True

    def catch_up(self) -> None:
        """Waits until the lane has executed the version arrived at last."""
        if self.is_answer_due:
            self.home.recv(_WORDS, self.me).wait()
            self.is_answer_due = False

    def settle(self, version: int, x: Tensor) -> int:
        """Executes what anyone has arrived at; gives the next version of all ranks."""
        self.catch_up()
        last = max(int(v) for v in self.home.all_gather(torch.tensor([version])).wait())
        if last:
            self.arrive(last - 1, x)
            self.catch_up()
        self.home.barrier().wait()  # nobody arrives at the next version before all are here
        self.published.publish(x)
        return last

    def stop(self) -> None:
        self.lane.stop()

    # ---- the lane ----

    def serve(self, net: Transport) -> None:
        while True:
            while self.next_version > self.due:
                self.hear(net)
            self.execute(net)
            self.next_version += 1
            self.answer_if_executed()

    def execute(self, net: Transport) -> None:
        version = self.next_version
        algorithm, partner = self.algorithm, self.algorithm.partner(version)
        if partner == self.me:
            return
        mine = algorithm.on_wire(self.published.snapshot())
        net.send(torch.tensor([_OFFER, version, algorithm.clock]), partner, _CONTROL)
        net.send(mine, partner, _MODEL)
        theirs = net.recv(mine, partner, _MODEL).wait(math.inf)
        self.published.correct(half_difference(theirs, mine, self.x))
        while version not in self.clocks:
            self.hear(net)
        algorithm.tick(partner, self.clocks.pop(version))

    def hear(self, net: Transport) -> None:
        kind, version, clock = net.recv(_WORDS, ANY, _CONTROL).wait(math.inf).tolist()
        self.due = max(self.due, version)
        if kind == _ARRIVED:
            self.arrived = version
            self.answer_if_executed()
        else:
            self.clocks[version] = clock

    def answer_if_executed(self) -> None:
        if 0 <= self.arrived < self.next_version:
            self.arrived = -1
            self.home.send(_WORDS, self.me)


def half_difference(theirs: Tensor, mine: Tensor, like: Tensor) -> Tensor:
    """What to add on this side; on the other side it is the same with the opposite sign."""
    return (theirs.to(like.dtype) - mine.to(like.dtype)).mul_(0.5)


_WORDS = torch.empty(0, dtype=torch.int64)
