"""What Local SGD and DiLoCo share: an average of all ranks' weights once per period.

    D   <- (1/P) sum_j (x_j - W)         every sync_period-th step
    W   <- outer(W, D)                   an outer optimizer's step; by default W + D, the mean
    x_i <- W

Legend: x_i the weights of rank i, W the global model, P ranks.

**Fragments.**  With num_fragments = F the weights are cut into F pieces of equal size, and each is
averaged once per period, one after the other: fragment f at the steps (f + 1) sync_period / F of
each period.  So at most |x| / F is sent at once.  (Streaming DiLoCo, Douillard et al., 2025,
https://arxiv.org/abs/2501.18512.)  With DiLoCo's fragments="layers" layer l of the model is of
fragment l mod F, the paper's strided pattern, and lies beside the others of its fragment in x.

**Overlap.**  With overlap_steps = t training goes on while a sum travels: a lane forms it from a
copy h_i of the fragment, and t steps later

    x_i <- x_i + (W - h_i)

so what the rank has learned in the meantime is kept, and counted the next time.  The rank waits
only if the sum is not there by then.  That the number of steps is fixed, and not "when it is
there", makes a run repeat to the bit.  With DiLoCo's mixing = a the rule is the paper's,

    x_i <- a x_i + (1 - a) W

which drops 1 - a of what a rank has learned in the meantime.

**Claimed batches.**  Ranks that claim their batches make different numbers of steps.  Then the
first rank that is due calls the others (`called.py`).  With overlap_steps, and in a replica of
several parts, each rank counts its own steps: one could call in this part and another in that.

**A growing period.**  With LocalSGD's growing_period=True the steps to the next average grow as the
learning rate falls (`called.py`).

**Averaged momentum.**  With average_momentum=True the ranks also average what their optimizers keep
for each weight, fragment by fragment with the weights (`moments.py`).  The momentum is sent in
full, also with a wire_dtype.

**Rounded sums.**  With a wire_dtype the ranks send D's parts rounded, and send what is rounded off
the next time (`quantised.py`).

**Each update once.**  Rounds are numbered, round r is for fragment r mod F, and all ranks take part
in all of them in the same order.  A rank that stands still takes part with what it has until all
stand still.  A round adds (1/P) sum_j (x_j - W) to W, and afterwards each x_i is W and what i has
learned since it handed over: nothing is in two rounds, and nothing in none.  At any time the mean
over the ranks of

    x_i + (what a finished sum will add to it) + (what was rounded off)

is that of the starts and all updates, if the outer optimizer is the default: the consensus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd import agreement
from lightning_dsgd.agreement import num_active
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Traits
from lightning_dsgd.hyperparameters import above, at_least, setting
from lightning_dsgd.primitives import moments, outer_optimizer, quantised, rounding, step_scaling
from lightning_dsgd.primitives.called import CalledRounds, Period
from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.primitives.moments import Moments
from lightning_dsgd.primitives.outer_optimizer import OuterOptimizer
from lightning_dsgd.primitives.rounds import Rounds
from lightning_dsgd.transport import Transport

Weight = tuple[Tensor, Tensor]
"""A rank's samples in a mean, and what becomes those of all; of no element if none are counted."""


@dataclass
class PeriodicAverage(Algorithm):
    """Averages the weights of all ranks every `sync_period` steps; subclasses set the defaults."""

    sync_period: int = at_least(1, default=2, doc="number of steps from one average to the next")
    outer_lr: float = above(
        0, default=1.0, doc="learning rate of the outer optimizer, which steps once per average"
    )
    outer_momentum: float = at_least(0, below=1, default=0.0, doc="momentum of the outer optimizer")
    outer_nesterov: bool = setting(
        default=True, doc="whether that momentum is Nesterov's, as in DiLoCo"
    )
    num_fragments: int = at_least(
        1,
        default=1,
        doc="number of pieces into which the weights are cut; each is averaged once per period, "
        "one after the other, so that fewer bytes are sent at once",
    )
    overlap_steps: int = at_least(
        0,
        default=0,
        doc="number of steps that a rank makes while a sum travels; 0 waits for the sum",
    )
    wire_dtype: str = rounding.wire_dtype()
    scale_steps: bool = step_scaling.scale_steps()
    average_momentum: bool = moments.average_momentum("takes |x| more memory during an average")
    # Behind the fields, as dataclasses keep their places where a subclass makes them fields.
    fragments: ClassVar[str] = "equal"
    """What the pieces are: of equal size, or of whole "layers"."""
    mixing: ClassVar[float | None] = None
    """The share of a rank's own weights when a sum comes; None adds what the sum changes."""
    growing_period: ClassVar[bool] = False
    """Whether the period grows as the learning rate falls."""

    @property
    def steps_per_fragment(self) -> int:
        """The number of steps from one fragment's average to the next fragment's."""
        return self.sync_period // self.num_fragments

    @property
    def traits(self) -> Traits:
        return Traits(
            exchange_period=self.steps_per_fragment,
            keeps_updates=self.mixing is None,
            follows_time=self.scale_steps,
            weighs_samples=True,
            scales_steps=self.scale_steps,
            looks_itself=True,
            num_layer_fragments=self.num_fragments if self.fragments == "layers" else 0,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        copies = 0.0
        if self.outer_lr != 1 or self.outer_momentum:
            copies = 2.0 if self.outer_momentum else 1.0
        if self.wire_dtype != "float32":
            copies = 3.0 if copies else 2.0
        if self.overlap_steps:
            copies += 2 / self.num_fragments
        if self.average_momentum:
            copies += 1
        return copies

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        if self.num_fragments > self.sync_period:
            raise ValueError(
                "num_fragments must be at most sync_period, as one fragment is averaged at a time, "
                f"got num_fragments={self.num_fragments} with sync_period={self.sync_period}; try "
                f"num_fragments={self.sync_period}, or sync_period={self.num_fragments}"
            )
        if self.overlap_steps > (most := self.steps_per_fragment):
            raise ValueError(
                "overlap_steps must be at most sync_period / num_fragments, as one sum travels at "
                f"a time, got overlap_steps={self.overlap_steps} with "
                f"sync_period={self.sync_period} and num_fragments={self.num_fragments}; try "
                f"overlap_steps={most}, or sync_period={self.overlap_steps * self.num_fragments}"
            )
        if self.average_momentum and self.overlap_steps:
            raise ValueError(
                "average_momentum is for averages that ranks wait for, got average_momentum=True "
                f"with overlap_steps={self.overlap_steps}; set overlap_steps=0"
            )
        if self.mixing is not None and not self.overlap_steps:
            raise ValueError(
                "mixing is for sums that come late, with overlap_steps of at least 1, got "
                f"mixing={self.mixing} with overlap_steps=0; leave it out, or set overlap_steps"
            )

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        if self.traits.num_layer_fragments and not conditions.fragments:
            raise ValueError(
                'fragments="layers" needs to be told where layers lie, as a `Replica` does, got '
                'nothing of them; set fragments="equal"'
            )
        self.round = 0
        self.period = Period(self.sync_period, conditions, grows=self.growing_period)
        self.steps_since_sync = 0  # since the last round
        self.pending: tuple[int, Tensor] | None = None  # where, and what a finished sum adds to x
        self.bounds = conditions.fragments or evenly(len(x), self.num_fragments)
        self.residual = quantised.residual_of(net, x, self.wire_dtype)
        self.samples = self.no_samples(self.num_fragments)
        is_plain = self.outer_lr == 1 and self.outer_momentum == 0 and self.residual is None
        self.outer = None
        if not is_plain:
            rates = self.outer_lr, self.outer_momentum
            self.outer = OuterOptimizer(*rates, nesterov=self.outer_nesterov)
        self.num_unshared = self.num_fragments  # rounds until W is known to be the same everywhere
        self.moments = Moments(conditions) if self.average_momentum else None
        self.background = _OneAtATime(net, self._change) if self.overlap_steps else None
        has_calls = conditions.claims_batches and conditions.is_whole and self.background is None
        self.calls = CalledRounds(net.sub("calls")) if has_calls else None
        outer_optimizer.warn_of_rates(net, self, "sync_period", nesterov=self.outer_nesterov)

    # ---- the training thread ----

    def before_update(self, x: Tensor, g: Tensor) -> None:
        # Until the first step and the first round, training begins with x as it is.
        is_untouched = not self.round and not self.steps_since_sync
        if self.outer is not None and (self.outer.model is None or is_untouched):
            self.conditions.look()
            self.outer.begin(x)

    def after_update(self, x: Tensor) -> None:
        self.steps_since_sync += 1
        self.samples += self.weight
        if self.background is not None:
            self.background.check()
        if self.steps_since_sync >= self.overlap_steps:
            self._merge(x)
        share = self._share_of(evenly(self.period.steps, self.num_fragments))
        is_due = self.steps_since_sync >= share.stop - share.start  # more, if a resume shortened it
        if is_due or (self.calls is not None and self.calls.is_called()):
            self._take_part(x, active=True)

    def settle(self, x: Tensor) -> None:
        if self.outer is not None and self.outer.model is None:
            self.outer.begin(x)
        self._collect()
        while self._take_part(x, active=False):
            pass

    def _share_of(self, bounds: Sequence[int]) -> slice:
        """Returns the next round's share: of the weights, or of a period's steps."""
        fragment = self.round % self.num_fragments
        return slice(*bounds[fragment : fragment + 2])

    def _take_part(self, x: Tensor, *, active: bool) -> bool:
        """Takes part in the next round; returns whether there is one: not if all stand still."""
        span, fragment = self._share_of(self.bounds), self.round % self.num_fragments
        mine = self.samples[fragment : fragment + 1]
        wish = self.period.wish()
        weight = mine.clone(), torch.cat([mine, wish if active else torch.zeros_like(wish)])
        if self.background is None:
            count = partial(num_active, self.net) if self.calls is None else self.calls.num_active
            if not count(active=active, counts=weight[1]):
                return False
            self.period.take(weight[1])
            self._merge(x)  # what a resume has brought
            self._average(self.net, x[span], span, weight)
            if self.moments is not None:
                self.moments.average(self.net, x, span, int(mine) if len(mine) else 1)
        else:
            piece = self._with_pending(x, span)
            self.background.begin(piece, span, weight, active=active)
            if not active:
                correction = self.background.wait()
                if correction is None:
                    return False
                self.period.take(weight[1])
                self._merge(x)
                self.pending = span.start, correction
        self.round += 1
        self.steps_since_sync = 0
        mine.zero_()
        return True

    def _with_pending(self, x: Tensor, span: slice) -> Tensor:
        """Returns a copy of a fragment plus the correction that is still pending."""
        piece = x[span].clone()
        if self.pending is not None:
            at, correction = self.pending
            begin, end = max(span.start, at), min(span.stop, at + len(correction))
            if begin < end:
                self._add(
                    piece[begin - span.start : end - span.start], correction[begin - at : end - at]
                )
        return piece

    def _collect(self) -> None:
        """Waits for the sum in flight."""
        if self.background is not None and self.background.is_under_way:
            correction = self.background.wait()
            assert correction is not None, "this rank was active in that round"
            self.period.take(self.background.weight[1])
            self.pending = self.background.span.start, correction

    def _merge(self, x: Tensor) -> None:
        """Waits for the sum in flight and adds its correction to x."""
        self._collect()
        self._add_pending(x)
        self.pending = None

    def _add_pending(self, x: Tensor) -> None:
        if self.pending is not None:
            begin, correction = self.pending
            self._add(x[begin : begin + len(correction)], correction)

    def _add(self, x: Tensor, correction: Tensor) -> None:
        """Adds a correction to x, or mixes the global model into x."""
        if self.mixing is None:
            x += correction
        else:
            x.lerp_(correction, 1 - self.mixing)

    def consensus(self, x: Tensor) -> Tensor:
        mean = x.clone()
        self._add_pending(mean)
        agreement.weigh_pieces(self.net, mean, self.samples, self.bounds)
        if self.residual is not None:
            mean += self.residual
        agreement.average(self.net, mean)
        return mean

    def stop(self) -> None:
        if self.background is not None:
            self.background.stop()

    def state_dict(self) -> dict[str, Any]:
        state = {"steps_since_sync": self.steps_since_sync, **self.period.state_dict()}
        if len(self.samples):
            state["samples"] = self.samples.clone()
        if self.num_fragments > 1 or self.outer is not None:
            state["round"] = self.round
        if self.outer is not None and self.outer.model is not None:
            state |= {"num_unshared": self.num_unshared, **self.outer.state_dict()}
        if self.residual is not None:
            state["kept"] = self.residual.clone()
        if self.pending is not None:
            state["pending_at"], correction = self.pending
            state["pending"] = correction.clone()
            state["mixes"] = self.mixing is not None
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_since_sync = state["steps_since_sync"]
        if len(state.get("samples", ())) == len(self.samples) > 0:
            self.samples.copy_(state["samples"])
        self.round = state.get("round", 0)
        self.period.load_state_dict(state)
        if "pending" in state and state.get("mixes", False) != (self.mixing is not None):
            raise ValueError(
                "mixing must be a number, or None, as when the checkpoint was saved: a sum was "
                f"under way, got mixing={self.mixing}; resume with the same options"
            )
        self.pending = (
            (state["pending_at"], state["pending"].clone()) if "pending" in state else None
        )
        if self.outer is not None:
            self.num_unshared = state.get("num_unshared", self.num_fragments)
            self.outer.load_state_dict(state)
        if self.residual is not None and "kept" in state:
            self.residual.copy_(state["kept"])

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        self.period.carry_over(state)

    def metrics(self) -> dict[str, float]:
        return self.period.metrics()

    # ---- the lane, with `overlap_steps`, and else the training thread ----

    def _average(self, net: Transport, piece: Tensor, span: slice, weight: Weight) -> None:
        """Turns this rank's fragment into the global model's, after the outer step.

        While a sum is in flight, the lane owns W, v and what was rounded off.
        """
        own, total = weight[0], weight[1][: len(weight[0])]  # without what a period is chosen by
        if self.outer is None:
            agreement.weigh(net, piece, own, total)
            agreement.average(net, piece)
            return
        if self.num_unshared:
            self.outer.share(net, span)
            self.num_unshared -= 1
        piece -= self.outer.model_at(span)
        agreement.weigh(net, piece, own, total)
        residual = None if self.residual is None else self.residual[span]
        quantised.average(net, piece, residual, self.wire_dtype)
        self.outer.step(piece, span)
        piece.copy_(self.outer.model_at(span))

    def _change(self, net: Transport, piece: Tensor, span: slice, weight: Weight) -> None:
        """Turns this rank's fragment into what `_add` adds or mixes."""
        handed_over = piece.clone() if self.mixing is None else None
        self._average(net, piece, span, weight)
        if handed_over is not None:
            piece -= handed_over


class _OneAtATime:
    """Sums one fragment at a time beside the training thread.

    The lane owns `piece`, `span` and `weight` from `begin` to the end of `wait`, else the training
    thread.
    """

    def __init__(
        self, net: Transport, change: Callable[[Transport, Tensor, slice, Weight], None]
    ) -> None:
        self._change = change
        self._rounds = Rounds(net, self._sum, "averager")

    # ---- the training thread ----

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun, and this rank has not waited for it."""
        return self._rounds.num_under_way > 0

    def begin(self, piece: Tensor, span: slice, weight: Weight, *, active: bool) -> None:
        """Has the lane begin a round with this piece, which the lane keeps."""
        self.piece, self.span, self.weight = piece, span, weight
        self._rounds.ask([int(active)])

    def wait(self) -> Tensor | None:
        """Returns what the sum adds to the piece; None where all ranks stand still."""
        [count] = self._rounds.wait()
        return self.piece if count else None

    def check(self) -> None:
        self._rounds.check()

    def stop(self) -> None:
        self._rounds.stop()

    # ---- the lane ----

    def _sum(self, net: Transport, words: Tensor) -> Tensor:
        """Makes a round; returns how many ranks step."""
        [active] = words.tolist()
        count = num_active(net, active=active, counts=self.weight[1])
        if count:
            self._change(net, self.piece, self.span, self.weight)
        return torch.tensor([count])
