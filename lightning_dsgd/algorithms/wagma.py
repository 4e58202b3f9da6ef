"""WAGMA-SGD (Li et al., TPDS 2021, https://arxiv.org/abs/2005.00124), Algorithm 2.

    W' <- W + U(G(W))                              the optimizer's step
    sum <- wait_avoiding_group_allreduce(W', t)    t + 1 not a multiple of tau
    W <- sum / S            if this rank's W' is in the sum
    W <- (sum + W') / (S + 1)      if it came too late and an older W' is in it
    W <- (1/P) allreduce(W')                       t + 1 a multiple of tau

Legend: W weights (x), G gradient, U the optimizer, t the step, P ranks, S group_size,
tau sync_period.

Differs from the paper: any P and S (`topology.groups`); a late rank takes the newest sum that it
has executed, each sum once; a rank that has run out of data goes on contributing its last W'; ranks
may wait a little for one another before they contribute what is stale (`grace_s`).  Ours: with
`overlap`, nobody waits for its group either.  The sum of step t is worked in when it is there, as
the correction

    W <- W + sum / S - W'_t        W'_t: what this rank had contributed

that of the global average at the latest when the next one is due, so a contribution is less than 2
tau steps old.

Waits for the group's answer (`overlap=False`) and, every tau steps, for every rank.  Sends
2(S-1)/S |x| a step, 2(P-1)/P |x| at a global one, and log2 P activations of 24 bytes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.transport import Transport
from lightning_dsgd.wait_avoiding import WaitAvoiding

GRACE_SHARE = 0.125
"""Of the time of a local step: how long a round waits for a rank by default."""


@dataclass
class WAGMA(Algorithm):
    """Averages weights in small, changing groups that nobody waits for, and sometimes globally.

    Memory above plain training: 2 |x|, what was published last and the sum.  Passes a step: W' is
    published (one), contributed (one), and the sum scaled into W (one).

    Args:
        group_size: S; None takes the power of two nearest sqrt(P)
        sync_period: tau, how many steps lie between two global averages
        wait_avoiding: False waits for every rank of the group instead of contributing what is stale
        dynamic_groups: False keeps the groups of the first step
        grace_s: how long an activated round waits for this rank before it contributes what is
            stale; None takes a share of the time of its last step
        overlap: whether training goes on before the sum is there
    """

    name: ClassVar[str] = "wagma"
    profile: ClassVar[Profile] = Profile(
        when="every step; globally every `sync_period` steps",
        with_whom="a group of `group_size` ranks, changing",
        sends="2(S-1)/S |x|",
        suits="random stragglers and many ranks: the one to try first",
    )

    group_size: int | None = None
    sync_period: int = 10
    wait_avoiding: bool = True
    dynamic_groups: bool = True
    grace_s: float | None = None
    overlap: bool = False

    def check(self, world_size: int) -> None:
        super().check(world_size)
        size = self.group_size
        if size is not None and not 1 <= size <= world_size:
            raise ValueError(
                "group_size must be at least 1 and no larger than world_size, got "
                f"group_size={size} with world_size={world_size}; "
                f"try group_size={topology.near_sqrt(world_size)}"
            )
        if self.sync_period < 1:
            raise ValueError(
                "sync_period must be at least 1, got "
                f"sync_period={self.sync_period}; try sync_period=10"
            )
        if self.grace_s is not None and self.grace_s < 0:
            raise ValueError(f"grace_s must not be negative, got grace_s={self.grace_s}; try 0.02")

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        self.size = self.group_size or topology.near_sqrt(net.world_size)
        self.version = 0
        self.last_global = -1
        self.x = x
        self.published = x.clone()
        self.total = torch.empty_like(x)
        self.published_at = self.contributed_at = -1
        self.sum_size = 0  # of the sum that has not been worked in yet; 0: there is none
        self.is_summing = False
        self.staleness: Counter[int] = Counter()
        self.left_at = net.now()
        self.lock = threading.Lock()  # with overlap, the training thread does not wait for the lane
        grace_s = (self.grace_s or 0.0) if self.wait_avoiding else math.inf  # None: measured below
        self.engine = WaitAvoiding(net, self, grace_s)

    def after_update(self, x: Tensor) -> None:
        version, self.version = self.version, self.version + 1
        if self.wait_avoiding and self.grace_s is None:
            self.engine.grace_s = GRACE_SHARE * (self.net.now() - self.left_at)
        if not self.overlap:
            self.engine.arrive(version)
        else:
            self.correct_and_publish(version)
            self.engine.arrive(
                version, wait_for=self.last_global if self.is_global(version) else -1
            )
            if self.is_global(version):
                self.last_global = version
        self.left_at = self.net.now()

    def settle(self, x: Tensor) -> None:
        self.version = self.engine.settle()
        if self.overlap:
            self.correct_and_publish(self.version - 1)
        self.restart_from_here()

    def stop(self) -> None:
        self.engine.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.stop()
        self.version = state["version"]
        self.engine = WaitAvoiding(
            self.net.sub("resumed"), self, self.engine.grace_s, first_version=self.version
        )
        self.restart_from_here()

    def restart_from_here(self) -> None:
        """All ranks stand at the same version, and no sum is left to be worked in."""
        self.published.copy_(self.x)
        self.published_at = self.version - 1
        self.last_global = -1
        self.sum_size = 0

    def metrics(self) -> dict[str, float]:
        contributions = sum(self.staleness.values())
        if not contributions:
            return {}
        return {
            "staleness": sum(k * n for k, n in self.staleness.items()) / contributions,
            "staleness_max": float(max(self.staleness)),
            "late_share": 1 - self.staleness[0] / contributions,
        }

    # ---- the member of the wait-avoiding collective; called by its lane ----

    def group(self, version: int) -> Sequence[int]:
        if self.is_global(version):
            return range(self.net.world_size)
        at = version if self.dynamic_groups else 0
        return topology.group_of(self.net.rank, at, self.net.world_size, self.size)

    def is_global(self, version: int) -> bool:
        return (version + 1) % self.sync_period == 0

    def activator(self, version: int) -> int | None:
        return None

    def arrived(self, version: int) -> None:
        if not self.overlap:
            self.publish(version)

    def is_stale(self, version: int) -> bool:
        """With overlap, W' is not published while it is needed for a correction."""
        return self.overlap and version - self.published_at >= 2 * self.sync_period

    def renew(self) -> None:
        if self.overlap:
            self.correct_and_publish(self.version - 1)

    def contribute(self, version: int) -> Tensor:
        with self.lock:
            self.is_summing = True
            self.total.copy_(self.published)
            self.contributed_at = self.published_at
        self.staleness[version - self.contributed_at] += 1
        return self.total

    def reduced(self, version: int, group_size: int) -> None:
        with self.lock:
            self.is_summing = False
            self.sum_size = group_size if group_size > 1 else 0  # alone, there is nothing to learn
        in_time = self.contributed_at == version
        if not self.overlap and (in_time or self.is_global(version)):
            torch.div(self.total, group_size, out=self.x)
            self.sum_size = 0

    def late(self, version: int) -> None:
        if self.overlap:
            return
        self.publish(version)
        if self.sum_size:
            self.x.add_(self.total).div_(self.sum_size + 1)
            self.sum_size = 0

    def publish(self, version: int) -> None:
        self.published.copy_(self.x)
        self.published_at = version

    def correct_and_publish(self, version: int) -> None:
        """Works the newest sum in; does nothing while the next one is being made."""
        with self.lock:
            if self.is_summing:
                return
            if self.sum_size:
                self.x.add_(self.total, alpha=1 / self.sum_size).sub_(self.published)
                self.sum_size = 0
            self.publish(version)
