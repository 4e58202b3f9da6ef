"""PopSGD (Nadiradze et al., 2019, https://arxiv.org/abs/1910.12308), Algorithm 1; SwarmSGD.

    x_i <- x_i - lr * g(x_i),  x_j <- x_j - lr * g(x_j)       local_steps times
    x_i, x_j <- (x_i + x_j) / 2                               j: a random partner

Legend: x the weights, g the gradient.  Two-sided: the mean over all ranks is conserved.

Partners come from perfect matchings (`partners.py`).  Ranks may be any number of versions apart.

Phase clock (section 3): of two partners, the one with the lower tick increases it by one, so all
ticks stay near the number of interactions divided by P.  It is for learning rate schedules.

A rank averages with the weights that its partner published last, and does not wait for it.  A lane
executes all versions in order, each as soon as one of the two partners arrives at it; the other's
lane answers for it.  The result is added to x at the next interaction (`published.py`).  A rank
waits only while its own lane has not finished the previous interaction, for example if the partner
has not begun to train.  On a device, a rank arrives once the device has made its steps, and is a
step ahead of it at most.  With `blocking=True` it waits for its partner, as in the paper's
Algorithm 1, and both hold the same mean.

`wire_dtype="bfloat16"` sends q(x), rounded, and still conserves the mean:

    x_i <- x_i + (q(x_j) - q(x_i)) / 2

`wire_dtype="int8"` sends q(x) = s round(x / s) modulo 256 s, which a receiver whose own weights are
less than 128 s away can tell from those (Davies et al., ICLR 2021,
https://arxiv.org/abs/2002.09268; the later SwarmSGD does the same).  s, a power of two, is twice
what the distances that the two have seen last would need.  Hashes of round(x / s) are sent with
it: of every 256th entry the sum, weighted by place, modulo 2^64.  If they do not match what was
decoded, both send their weights in full, as they do at a first interaction.  A wrong entry is
always found if it is the only one in its hash; several hide each other with a chance of about
2^-56.  One side adds what the other subtracts, even if it was decoded wrongly, so the mean over all
ranks is conserved up to the rounding of that addition; the partners are up to s apart afterwards.

With `average_momentum=True` two partners also average what their optimizers keep for each weight
(`moments.py`), in full whatever the `wire_dtype`.  This needs `blocking=True`: half of a difference
that comes late can make a second moment negative.

Differs from the paper: matchings instead of independent pairs, so that each rank interacts equally
often, and never with itself; any optimizer; the published code is one-sided and changes the mean.
Not in the paper: `wire_dtype`, `average_momentum`.  With `paper=True` the pairs are independent,
each drawn uniformly from all pairs of ranks (or of neighbours); both wait for each other, and send
their weights unchanged.  The pairs of a rank come in an order that all ranks know, so of all pairs
that are due the first one never waits for another.

Waits for nobody, with `blocking` for one partner every local_steps steps.  Sends (|x| + 32 bytes) /
local_steps per step, 16 bytes instead of the 32 with `blocking`; one byte per element and 2 KB with
"int8".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd.agreement import largest
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import at_least, one_of, setting
from lightning_dsgd.primitives import moments, step_scaling, topology
from lightning_dsgd.primitives.moments import Moments
from lightning_dsgd.primitives.partners import Partners
from lightning_dsgd.primitives.published import publication_of
from lightning_dsgd.primitives.rounds import Background
from lightning_dsgd.transport import ANY, Transport

_CONTROL = 0  # a lane's tag
_ARRIVED, _OFFER = range(2)

UNKNOWN: Final = 1 << 30
"""Stands for an exponent where the weights are to be sent in full."""
NUM_HASHES: Final = 256
ROWS_AT_ONCE: Final = 512
"""The number of rows that are hashed together: a piece of 1 MB."""


@dataclass
class PopSGD(Algorithm):
    """Averages the weights of random pairs of ranks; no rank waits for another."""

    name: ClassVar[str] = "popsgd"
    profile: ClassVar[Profile] = Profile(
        when="every `local_steps` steps",
        with_whom="a random partner",
        sends="|x| / `local_steps`",
        memory="2 |x|, 5 |x| during an exchange, on a device 3 |x| and 4 |x|; |x| with `blocking`; "
        "|x| more with a `wire_dtype`, |x| more with `average_momentum`, 3 |x| with Adam",
    )

    printed: ClassVar[dict[str, Any]] = {
        "blocking": True,
        "wire_dtype": "float32",
        "scale_steps": False,
        "average_momentum": False,
    }

    local_steps: int = at_least(1, default=1, doc="number of steps from one exchange to the next")
    blocking: bool | None = setting(
        default=None,
        doc="if True, wait for the partner; if False, use the weights that it published last; None "
        "means False, or True with `paper=True`",
    )
    topology: str = one_of(
        "complete",
        "cycle",
        default="complete",
        doc='which ranks can be partners: any two ("complete"), or neighbours on a ring ("cycle")',
    )
    wire_dtype: str = one_of(
        "float32",
        "bfloat16",
        "int8",
        default="float32",
        doc='data type of the weights that are sent; "float32" sends them unchanged, "bfloat16" '
        'rounded, "int8" as one byte per weight, relative to the receiver\'s',
    )
    seed: int = setting(default=0, doc="seed of the random pairs")
    scale_steps: bool = step_scaling.scale_steps()
    average_momentum: bool = moments.average_momentum("needs `blocking=True`")
    paper: bool = setting(
        default=False,
        doc="if True, the algorithm is as printed: pairs are independent, and wait for each other",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocking = self.blocking or False

    @property
    def traits(self) -> Traits:
        return Traits(
            exchange_period=self.local_steps,
            scales_steps=self.scale_steps,
            looks_itself=True,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        copies = 1.0
        if not self.blocking:
            copies = 4.0 if on_device else 5.0  # during an exchange
        copies += self.wire_dtype != "float32"
        return copies + self.average_momentum

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        if self.average_momentum and not self.blocking:
            raise ValueError(
                "average_momentum is for exchanges that ranks wait for, got average_momentum=True "
                "with blocking=False; set blocking=True, or average_momentum=False"
            )

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.steps_since = 0
        self.version = 0
        self.clock = 0
        self.exponent = UNKNOWN  # of the s that this rank needs
        draw = topology.random_pair if self.paper else topology.random_partners
        self.partners = Partners(net, draw, self.topology, self.seed)
        self.moments = Moments(conditions) if self.average_momentum else None
        self.lane: _Averager | None = None

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self._begin(x)

    def after_update(self, x: Tensor) -> None:
        self.steps_since += 1
        if self.steps_since < self.local_steps:
            return
        self.steps_since = 0
        version = self.partners.next(self.version) if self.paper else self.version
        self.version = version + 1
        if self.lane is not None:
            self.lane.arrive(version, x)
        elif self.blocking:
            met = self.partners.meet(version, torch.tensor([self.clock, self.exponent]))
            if met is not None:
                self._interact(x, met[0], *met[1].tolist())

    def _interact(self, x: Tensor, partner: int, clock: int, exponent: int) -> None:
        if self.wire_dtype == "int8":
            x += self.decoded_difference(self.net, partner, x, exponent)
        elif self.wire_dtype == "float32":
            x.add_(self.net.exchange(x, partner).wait()).mul_(0.5)
        else:
            mine = self.on_wire(x)
            x += half_difference(self.net.exchange(mine, partner).wait(), mine, x)
        if self.moments is not None:
            self.moments.send(self.net, self.moments.message(x, 1), partner)
            self.moments.merge(1, self.moments.receive(self.net, x, partner))
        self.tick(partner, clock)

    def on_wire(self, x: Tensor) -> Tensor:
        """Returns the weights in the form in which they are sent."""
        return x.to(torch.bfloat16) if self.wire_dtype == "bfloat16" else x

    def decoded_difference(
        self,
        net: Transport,
        partner: int,
        x: Tensor,
        exponent: int,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Returns half the partner's lead over x, from one byte an entry; adapts the exponent."""
        d, distance = None, 0.0
        if max(self.exponent, exponent) != UNKNOWN:
            s = 2.0 ** max(self.exponent, exponent)
            k = (x / s).round_()
            mine = hashes_of(k)
            if len(k) and not k.norm(torch.inf) < 2.0**62:  # it has no hash: equal to no partner's
                mine[-1] = ~net.rank
            code = k.remainder_(256).to(torch.uint8)
            del k
            codes, hashes = net.exchange(code, partner), net.exchange(mine, partner)
            ahead = (codes.wait(timeout_s) - code).view(torch.int8)
            ahead[ahead == -128] = 0  # else both partners would go the same way
            decoded = mine + hashes_of(ahead)
            if torch.equal(decoded, hashes.wait(timeout_s)):
                distance = s * max(0.5, float(ahead.abs().max())) if len(x) else 0.0
                d = ahead.to(x.dtype).mul_(0.5 * s)
        if d is None:  # and, as all above is the same with the opposite sign there, on both sides
            d = half_difference(net.exchange(x, partner).wait(timeout_s), x, x)
            distance = 2 * float(d.abs().max()) if len(x) else 0.0
        is_known = 0 < distance < math.inf
        self.exponent = max(-100, math.ceil(math.log2(distance / 63))) if is_known else UNKNOWN
        return d

    def tick(self, partner: int, clock: int) -> None:
        """Moves the clock on where it is the lower of two, or equal and of the lower rank."""
        if (self.clock, self.net.rank) < (clock, partner):
            self.clock += 1

    def settle(self, x: Tensor) -> None:
        self._begin(x)
        if self.lane is not None:
            self.version = self.lane.settle(self.version, x)
        elif self.blocking:
            self.version = self.partners.settle(self.version)

    def _begin(self, x: Tensor) -> None:
        """Publishes the first weights, after a resume has restored its state."""
        if self.lane is None and not self.blocking and self.net.world_size > 1:
            self.conditions.look()
            self.lane = _Averager(self, x)

    def stop(self) -> None:
        if self.lane is not None:
            self.lane.stop()

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps_since": self.steps_since,
            "clock": self.clock,
            "exponent": self.exponent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.clock = state["version"], state["clock"]
        self.steps_since, self.exponent = state["steps_since"], state["exponent"]
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
        self.published = publication_of(algorithm.net, x)
        self.x = x
        self.me = algorithm.net.rank
        self.begin_with(algorithm.version)
        self.arrived = -1  # the version that the training thread has arrived at, unanswered
        self.offers: dict[int, tuple[int, int]] = {}  # clock and exponent of partners, by version
        self.is_answer_due = False
        self.lane = Background(algorithm.net, self.serve, "averager")

    # ---- the training thread ----

    def begin_with(self, version: int) -> None:
        """Sets the next version, with no version under way."""
        self.next_version = version
        self.due = version - 1  # up to which version somebody has arrived

    def arrive(self, version: int, x: Tensor) -> None:
        self.catch_up()
        self.published.publish(x)
        self.lane.check()
        self.lane.tell([_ARRIVED, version, 0, 0], _CONTROL)
        self.is_answer_due = True

    def catch_up(self) -> None:
        """Waits until the lane has executed the version at which this rank arrived last."""
        if self.is_answer_due:
            self.lane.expect().wait()
            self.is_answer_due = False

    def settle(self, version: int, x: Tensor) -> int:
        """Executes all versions at which a rank has arrived; returns the next one of all ranks."""
        self.catch_up()
        [last] = largest(self.lane.home, version)
        if last:
            self.arrive(last - 1, x)
            self.catch_up()
        self.lane.home.barrier().wait()  # no rank arrives at the next one before all are here
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
        algorithm, partner = self.algorithm, self.algorithm.partners.at(version)
        if partner == self.me:
            return
        offer = torch.tensor([_OFFER, version, algorithm.clock, algorithm.exponent])
        net.send(offer, partner, _CONTROL)
        # Both send at the same time: what is sent to a partner that is behind would still be on the
        # link when this rank sends to the next one.
        while version not in self.offers:
            self.hear(net)
        clock, exponent = self.offers.pop(version)
        x = self.published.snapshot()
        if algorithm.wire_dtype == "int8":
            d = algorithm.decoded_difference(net, partner, x, exponent, math.inf)
        else:
            mine = algorithm.on_wire(x)
            d = half_difference(net.exchange(mine, partner).wait(math.inf), mine, self.x)
        self.published.correct(d)
        algorithm.tick(partner, clock)

    def hear(self, net: Transport) -> None:
        kind, version, clock, exponent = net.recv(_WORDS, ANY, _CONTROL).wait(math.inf).tolist()
        self.due = max(self.due, version)
        if kind == _ARRIVED:
            self.arrived = version
            self.answer_if_executed()
        else:
            self.offers[version] = clock, exponent

    def answer_if_executed(self) -> None:
        if 0 <= self.arrived < self.next_version:
            self.arrived = -1
            self.lane.answer()


def half_difference(theirs: Tensor, mine: Tensor, like: Tensor) -> Tensor:
    """Returns what to add on this side; the other side adds the same with the opposite sign.

    The message that has come is overwritten: memory that is new takes longer to touch than to fill.
    """
    return theirs.to(like.dtype).sub_(mine).mul_(0.5)


def hashes_of(k: Tensor) -> Tensor:
    """Returns hashes of every 256th entry, then 0; hashes of k + d add up modulo 2^64.

    Weights are odd, so a difference of 256 times less than 2^56 in one entry changes its hash.
    """
    num_rows = len(k) // NUM_HASHES
    whole = num_rows * NUM_HASHES
    weights = torch.arange(1, num_rows + 2, device=k.device) * _MIX[0]
    weights = (weights ^ (weights >> 32)) * _MIX[1] | 1  # as of a random place, as a hash is made
    hashes = torch.zeros(NUM_HASHES + 1, dtype=torch.int64, device=k.device)
    rows = k[:whole].view(-1, NUM_HASHES)
    for piece, weight in zip(
        torch.split(rows, ROWS_AT_ONCE), torch.split(weights[:-1], ROWS_AT_ONCE), strict=True
    ):
        hashes[:-1] += (piece.to(torch.int64) * weight[:, None]).sum(0)
    hashes[: len(k) - whole] += k[whole:].to(torch.int64) * weights[-1]
    return hashes


_MIX: Final = -7046029254386353131, -4658895280553007687
"""Odd numbers whose products mix all bits (splitmix64 uses them)."""
_WORDS = torch.empty(0, dtype=torch.int64)
