"""Eager-SGD (Li et al., PPoPP 2020, https://arxiv.org/abs/1908.04207): partial all-reduces.

    pending <- pending + g
    sum     <- wait_avoiding_allreduce(pending)      what is contributed is cleared from pending
    g       <- (1/P) (all sums since the last step)

Where means are weighted by samples, pending gets n g, with n the samples of g.  A sum is divided by
the mean n of the ranks' newest gradients, of those that have made one: two more entries of it.

Legend: g this rank's gradient, P ranks, `pending` the gradients that are in no sum yet.

A round starts when the first rank arrives ("solo"), or when the rank arrives that a shared seed
draws for it ("majority"): on average half of the ranks have arrived by then.  It waits a little for
the others (`grace_s`).  A late rank takes part with what was pending; its gradient goes into its
next contribution.  No gradient is lost, and no sum either: a rank that has missed several rounds
applies all of their sums at its next step.

Differs from the paper: keeps the sums of all rounds that a rank has missed; the paper keeps only
the newest.  A round waits for ranks that are about to arrive; in the paper it does not.  A rank
that stops (to evaluate, to save, out of data) keeps what is pending, and sums that it has not
applied, for its next step; at the end they are dropped.  The metric `updates_kept` is the share of
this rank's gradients that are in a sum.

On a device, a rank arrives once the device has made its gradient.

Waits until the round has started and its sum has arrived.  Sends 2(P-1)/P |g| per step, log2 P
activations of 24 bytes and, with "majority", a request to the rank that was drawn, which
acknowledges it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import at_least, one_of
from lightning_dsgd.primitives.own_device import StreamLock, await_step
from lightning_dsgd.primitives.wait_avoiding import Grace, WaitAvoiding
from lightning_dsgd.transport import Transport

_SEED = 1


@dataclass
class EagerSGD(Algorithm):
    """Averages the gradients without waiting for late ranks; theirs join the next round."""

    name: ClassVar[str] = "eager_sgd"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks",
        sends="2(P-1)/P |g|",
        memory="4 |g|",
    )
    traits = Traits(uses_gradient=True, averages_weights=False, weighs_samples=True)

    quorum: str = one_of(
        "solo",
        "majority",
        default="majority",
        doc='which rank starts a round: the first to arrive ("solo"), or one drawn at random for '
        'each round ("majority")',
    )
    sync_period: int | None = at_least(
        1,
        default=None,
        doc="number of rounds from one average of the weights over all ranks to the next; None "
        "means never",
    )
    grace_s: float | None = at_least(
        0,
        default=None,
        doc="seconds that a started round waits for this rank before it contributes only what is "
        "pending; None means an eighth of the duration of its last step",
    )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 4.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.version = 0
        self.x = x
        self.g = x[:0]
        self.pending, self.unapplied = torch.zeros_like(x), torch.zeros_like(x)
        weighs = conditions.samples is not None
        if weighs and x.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(
                "weights must be of fp32 where eager_sgd weighs by samples, whose numbers travel "
                f'beside the gradient, got {x.dtype} with weigh_by="samples"; use mixed precision, '
                'or weigh_by="ranks"'
            )
        self.message = x.new_zeros(len(x) + 2 if weighs else len(x))
        self.total, self.samples = self.message[: len(x)], self.message[len(x) :]
        self.newest = 0 if weighs else 1  # how much this rank's newest gradient counts
        self.lock = StreamLock(x)  # of unapplied: the lane may be at the next round already
        self.num_rounds = self.num_late = 0
        self.num_gradients = self.num_contributed = 0
        self.arrived_at = -1
        self.grace = Grace(net, self.grace_s)
        self.engine = WaitAvoiding(net, self, self.grace)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        await_step(self.net, g)
        self.grace.step_ends()
        self.g, self.newest = g, self.weight
        self.engine.arrive(self.next_round())
        self.grace.step_begins()
        with self.lock:
            torch.div(self.unapplied, self.net.world_size, out=g)
            self.unapplied.zero_()

    def after_update(self, x: Tensor) -> None:
        if self.sync_period is not None and self.is_global(self.version):
            self.engine.arrive(self.next_round())
            self.grace.step_begins()

    def next_round(self) -> int:
        version, self.version = self.version, self.version + 1
        return version

    def settle(self, x: Tensor) -> None:
        self.version = self.engine.settle()
        self.grace.stand_still()

    def stop(self) -> None:
        self.engine.stop()

    def state_dict(self) -> dict[str, Any]:
        state = {"version": self.version, "pending": self.pending, "unapplied": self.unapplied}
        return state | ({"samples": self.newest} if len(self.samples) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = state.get("samples", self.newest)
        self.engine.stop()
        self.version = state["version"]
        self.pending.copy_(state["pending"])
        self.unapplied.copy_(state["unapplied"])
        net = self.net.sub("resumed")
        self.engine = WaitAvoiding(net, self, self.grace, first_version=self.version)

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        self.pending.copy_(state["pending"])
        self.newest = state.get("samples", self.newest)

    def metrics(self) -> dict[str, float]:
        if not self.num_rounds or not self.num_gradients:
            return {}
        return {
            "late_share": self.num_late / self.num_rounds,
            "updates_kept": self.num_contributed / self.num_gradients,
        }

    # ---- the member of the wait-avoiding collective; called by its lane ----

    def group(self, version: int) -> range:
        return range(self.net.world_size)

    def is_global(self, version: int) -> bool:
        """Returns whether a round sums weights, as one does after `sync_period` others."""
        return self.sync_period is not None and (version + 1) % (self.sync_period + 1) == 0

    def activator(self, version: int) -> int | None:
        if self.quorum == "solo" or self.is_global(version):
            return None
        return Random(f"{_SEED}/{version}").randrange(self.net.world_size)

    def arrived(self, version: int) -> None:
        self.arrived_at = version
        self.take_gradient(version)

    def contribute(self, version: int) -> Tensor:
        if self.is_global(version):
            return self.total.copy_(self.x)
        self.num_rounds += 1
        self.num_late += self.arrived_at < version
        self.num_contributed = self.num_gradients
        self.total.copy_(self.pending)
        self.samples[:1], self.samples[1:] = self.newest, min(self.newest, 1)
        self.pending.zero_()
        return self.message

    def reduced(self, version: int, group_size: int) -> None:
        if self.is_global(version):
            torch.div(self.total, group_size, out=self.x)
        else:
            if len(self.samples):
                self.total *= self.samples[1] / self.samples[0]
            with self.lock:
                self.unapplied += self.total

    def late(self, version: int) -> None:
        self.take_gradient(version)

    def settled(self, version: int) -> None:
        """Leaves pending and unapplied gradients for the next step."""

    def take_gradient(self, version: int) -> None:
        if not self.is_global(version):
            self.pending.add_(self.g, alpha=self.newest)
            self.num_gradients += 1
