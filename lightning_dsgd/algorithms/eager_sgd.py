"""Eager-SGD (Li et al., PPoPP 2020, https://arxiv.org/abs/1908.04207): partial all-reduces.

    pending <- pending + g
    sum     <- wait_avoiding_allreduce(pending)      what is contributed is cleared from pending
    g       <- (1/P) (all sums since the last step)

Legend: g this rank's gradient, P ranks, `pending` what no sum holds yet.

A round fires with the first rank to arrive ("solo"), or when the rank that a shared seed draws for
it arrives, by when half of the ranks have on average ("majority").  A rank that comes too late has
taken part with what was pending; its gradient goes into its next contribution.  None is lost, and
no sum either: a rank that was away for several rounds applies all of theirs at its next step.

Differs from the paper: keeps the sums of all rounds that a rank has missed, where the paper keeps
the newest.  A rank that stops (to evaluate, to save, out of data) leaves what is pending for its
next step; at the end it is dropped.

Waits for the round to fire and to be answered.  Sends 2(P-1)/P |g| a step, and log2 P activations
of 24 bytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.transport import Transport
from lightning_dsgd.wait_avoiding import WaitAvoiding

_SEED = 1


@dataclass
class EagerSGD(Algorithm):
    """Averages the gradients of those ranks that are there, without waiting for the last ones.

    Memory above plain training: 4 |g|: the gradient, what is pending, the sum, and the sums not
    applied yet.

    Args:
        quorum: "solo" fires with the first rank, "majority" with one drawn at random for each round
        sync_period: after how many rounds the weights are averaged over all ranks; None: never
    """

    name: ClassVar[str] = "eager_sgd"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks; the late ones in the next round",
        sends="2(P-1)/P |g|",
        suits="stragglers, where gradients are to be averaged",
    )
    uses_gradient: ClassVar[bool] = True

    quorum: str = "majority"
    sync_period: int | None = None

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.quorum not in ("solo", "majority"):
            raise ValueError(f'quorum must be "solo" or "majority", got quorum={self.quorum!r}')
        if self.sync_period is not None and self.sync_period < 1:
            raise ValueError(
                "sync_period must be at least 1, or None for never, got "
                f"sync_period={self.sync_period}; try sync_period=100"
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.version = 0
        self.x = x
        self.g = x[:0]
        self.pending, self.unapplied = torch.zeros_like(x), torch.zeros_like(x)
        self.total = torch.empty_like(x)
        self.lock = threading.Lock()  # of unapplied: the lane may be at the next round already
        self.num_rounds = self.num_late = 0
        self.arrived_at = -1
        self.engine = WaitAvoiding(net, self)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self.g = g
        self.engine.arrive(self.next_round())
        with self.lock:
            torch.div(self.unapplied, self.net.world_size, out=g)
            self.unapplied.zero_()

    def after_update(self, x: Tensor) -> None:
        if self.sync_period is not None and self.is_global(self.version):
            self.engine.arrive(self.next_round())

    def next_round(self) -> int:
        version, self.version = self.version, self.version + 1
        return version

    def settle(self, x: Tensor) -> None:
        self.version = self.engine.settle()

    def stop(self) -> None:
        self.engine.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "pending": self.pending, "unapplied": self.unapplied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.stop()
        self.version = state["version"]
        self.pending.copy_(state["pending"])
        self.unapplied.copy_(state["unapplied"])
        net = self.net.sub("resumed")
        self.engine = WaitAvoiding(net, self, first_version=self.version)

    def metrics(self) -> dict[str, float]:
        return {"late_share": self.num_late / self.num_rounds} if self.num_rounds else {}

    # ---- the member of the wait-avoiding collective; called by its lane ----

    def group(self, version: int) -> range:
        return range(self.net.world_size)

    def is_global(self, version: int) -> bool:
        """Rounds of gradients and, after every `sync_period` of them, one of weights."""
        return self.sync_period is not None and (version + 1) % (self.sync_period + 1) == 0

    def activator(self, version: int) -> int | None:
        if self.quorum == "solo" or self.is_global(version):
            return None
        return Random(f"{_SEED}/{version}").randrange(self.net.world_size)

    def arrived(self, version: int) -> None:
        self.arrived_at = version
        self.take_gradient(version)

    def is_stale(self, version: int) -> bool:
        return False

    def renew(self) -> None:
        pass

    def contribute(self, version: int) -> Tensor:
        if self.is_global(version):
            return self.total.copy_(self.x)
        self.num_rounds += 1
        self.num_late += self.arrived_at < version
        self.total.copy_(self.pending)
        self.pending.zero_()
        return self.total

    def reduced(self, version: int, group_size: int) -> None:
        if self.is_global(version):
            torch.div(self.total, group_size, out=self.x)
        else:
            with self.lock:
                self.unapplied += self.total

    def late(self, version: int) -> None:
        self.take_gradient(version)

    def take_gradient(self, version: int) -> None:
        if not self.is_global(version):
            self.pending += self.g
