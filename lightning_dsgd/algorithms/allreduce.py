"""Synchronous SGD: the baseline that every paper compares with.

    g <- (1/P) sum_i g_i        before every optimizer step
    g <- sum_i n_i g_i / N      where means are weighted by samples: n_i, and N of all ranks

Differs from DistributedDataParallel: by default the whole gradient is reduced once after the
backward pass, and ranks may have different numbers of batches.  A rank that has run out contributes
nothing, and the mean is over the others; it takes their weights once all have stopped.

**Rounded sums.**  With a `wire_dtype` the ranks send gradients rounded, and add what was rounded
off to their next gradient (`primitives/quantised.py`).  At the end of training the optimizer
applies what is left.  Two bits an entry are too few (docs/balanced.md, "Rounded sums").

**Overlap.**  With `overlap=True` the gradient is cut into `num_buckets` pieces of equal size.  A
lane sums a piece once the backward pass has made it, the last weights' first, as DDP does (and the
DenseOvlp of Li and Hoefler, PPoPP 2022, https://arxiv.org/abs/2201.07598).

**Delay.**  With `delay=1` the optimizer's step t applies the mean of step t - 1's gradients, so
a sum may travel during a whole step.  The first step's gradient is zero.  The last mean is applied
in the next step, at the latest at the end of training.  A parameter that has no gradient on any
rank is stepped with zero.  One rank alone has no delay.

Every rank waits for every other in every step.  Sends 2(P-1)/P |g| per step, with a `wire_dtype`
fewer, and some integers, which count the ranks that have a gradient for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import agreement
from lightning_dsgd.agreement import give_newest, num_active, take_over_newest, zeroed
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.hyperparameters import at_least, setting
from lightning_dsgd.primitives import quantised, rounding
from lightning_dsgd.primitives.pieces import Pieces
from lightning_dsgd.transport import Transport


@dataclass
class AllReduce(Algorithm):
    """Averages the gradients of all ranks in every step."""

    name: ClassVar[str] = "allreduce"
    profile: ClassVar[Profile] = Profile(
        when="every step",
        with_whom="all ranks",
        sends="2(P-1)/P |g|",
        memory="|g|; |g| more with a `wire_dtype`, |g| more where rounded sums overlap, 3 |g| more "
        "with `delay`",
    )

    wire_dtype: str = rounding.wire_dtype(of="gradient entry", least_bits=4)
    overlap: bool = setting(
        default=False, doc="whether pieces of the gradient travel during the backward pass"
    )
    num_buckets: int = at_least(
        1, default=8, doc="number of pieces into which `overlap=True` cuts the gradient"
    )
    delay: int = at_least(
        0,
        below=2,
        default=0,
        doc="number of steps after which a mean of gradients is applied; with 1 it travels during "
        "a whole step",
    )

    @property
    def traits(self) -> Traits:
        return Traits(
            uses_gradient=True,
            averages_weights=False,
            lockstep=True,
            counts_gradients=True,
            takes_pieces=self.overlap,
            holds_back=self.wire_dtype != "float32" or self.delay > 0,
            weighs_samples=True,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        copies = 1.0 + 3 * self.delay
        if self.wire_dtype != "float32":
            copies += 2 if self.overlap else 1
        return copies

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        super().check(world_size, conditions)
        if (self.overlap or self.delay) and conditions.skips_overflow:
            raise ValueError(
                "overlap and delay need gradients that are never scaled, got "
                f"overlap={self.overlap} and delay={self.delay} with a loss that is scaled for "
                'fp16; use precision="bf16-mixed", or leave both out'
            )

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.step = self.num_own = 0  # of the newest rank, and of this one
        self.num_active = 0  # the weight of all gradients in the last sum
        self.wire = self.wire_dtype if net.world_size > 1 else "float32"
        wide = torch.promote_types(x.dtype, torch.float32)
        # What was rounded off, or comes from a training with another number of ranks.
        self.residual = torch.zeros_like(x, dtype=wide) if self.traits.holds_back else None
        is_apart = (self.overlap or self.delay > 0) and net.world_size > 1
        self.background = None
        if is_apart:
            self.background = Pieces(
                net,
                x,
                self.average,
                weight=lambda: self.weight,
                num_pieces=self.num_buckets if self.overlap else 1,
                delay=self.delay,
            )

    # ---- the training thread ----

    def gradient_made(self, g: Tensor, begin: int) -> None:
        if self.background is not None:
            self.background.hand_over(g, begin)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        counts = self.conditions.gradient_counts
        if self.background is None:
            total = num_active(self.net, active=self.weight, counts=counts)
            self.average(self.net, g, slice(0, len(g)), self.weight, total)
            self.num_active = total
        else:
            self.background.hand_over(g, 0)
            self.background.take_mean(g)
            self.num_active = self.background.num_active
            self._share(counts)
        self.step += 1
        self.num_own += 1

    def _share(self, counts: Tensor | None) -> None:
        """Counts the ranks that have a gradient for each parameter, beside the background."""
        if counts is not None and self.delay:
            counts.fill_(1)
        elif counts is not None:
            self.net.all_reduce(counts).wait()

    def after_update(self, x: Tensor) -> None:
        if self.background is not None:
            self.background.check()

    def settle(self, x: Tensor) -> None:
        counts = self.conditions.gradient_counts
        if self.background is not None:
            while self.background.complete() or self.background.serve(x):
                self._share(zeroed(counts))
        else:
            while total := num_active(self.net, active=0, counts=zeroed(counts)):
                self.average(self.net, torch.zeros_like(x), slice(0, len(x)), 0, total)
        self.step = take_over_newest(self.net, x, self.step)

    def consensus(self, x: Tensor) -> Tensor:
        # All ranks hold the same, unless they took over weights while keeping their optimizer's
        # state.
        return self.net.broadcast(x.clone(), src=0).wait()

    def held_back(self) -> Tensor | None:
        mean = None
        if self.residual is not None:
            mean = self.residual.clone()
            agreement.average(self.net, mean)
        if self.background is not None and self.background.has_mean:
            assert mean is not None, "with a delay there is room for what is carried over"
            mean += self.background.mean
        return mean if mean is not None and mean.any() else None

    def finish(self, x: Tensor) -> None:
        if self.traits.holds_back:
            give_newest(self.net, x, self.num_own)  # whose optimizer has made all steps
            self.stop()
        else:
            super().finish(x)

    def stop(self) -> None:
        if self.background is not None:
            self.background.stop()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.step}
        if self.residual is not None:
            state["kept"] = self.residual.clone()
        if self.background is not None and self.background.has_mean:
            state["mean"] = self.background.mean.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if self.residual is not None and "kept" in state:
            self.residual.copy_(state["kept"])
        if self.background is not None and "mean" in state:
            self.background.restore(state["mean"])

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        if self.residual is not None:
            for name in ("kept", "mean"):
                if name in state:
                    share = self.net.world_size / num_ranks
                    self.residual.add_(state[name].to(self.residual), alpha=share)

    # ---- the training thread, or the lane where there is one ----

    def average(self, net: Transport, piece: Tensor, span: slice, weight: int, total: int) -> None:
        """Puts the mean over the ranks, by their weights, into a piece of the gradient."""
        if self.residual is not None and self.conditions.skips_overflow:
            self.overflowed = agreement.has_overflowed(net, piece)
            if self.overflowed:
                piece.fill_(torch.nan)
                return
        if self.residual is None and self.conditions.samples is None:
            net.all_reduce(piece).wait()
            piece /= total
            return
        agreement.weigh(net, piece, weight, total)
        residual = None if self.residual is None else self.residual[span]
        quantised.average(net, piece, residual, self.wire)
