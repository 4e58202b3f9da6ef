"""What sparse all-reduces share: the largest entries are sent, the rest is kept for later.

    acc_i <- e_i + g_i P / A
    u, I_i <- sparse_allreduce(acc)         I_i: the entries of acc_i that are in u
    e_i <- acc_i - acc_i[I_i]
    g_i <- u / P

Legend: e the residual, g the gradient, acc what has been accumulated (in the memory of e), u the
sum that all ranks get, n elements, k of them to be selected, P ranks, A of them still have data.

Nothing is lost and nothing counted twice: over all ranks, what was accumulated = what was applied +
the residuals.

A rank that has run out of data goes on with a gradient of zero: its residual is sent like the
others'.  A gradient counts as one of those A that were made with it, as in `allreduce`, in whatever
step it is applied; what was held back before keeps its weight.  The rank takes over the weights of
those that went on once all have stopped.

At the end of training the optimizer applies the mean of the residuals.  A checkpoint keeps them.
If it is resumed with another number of ranks, these divide them: their mean stays what it was.

With `local_steps` H above 1, or `exchanges="changes"`, what H steps have changed takes the place of
the gradient (SparseLoCo, Sarfi et al. 2025, https://arxiv.org/abs/2508.15706):

    x_i <- x after H steps of this rank's optimizer
    e_i <- e_i + (x - x_i);   u, I_i <- sparse_allreduce(e);   e_i <- e_i - e_i[I_i]
    x <- x - u / P            on all ranks, which go on from there

What ranks have changed that run out of data is sent in the first exchange that they serve.
Between two exchanges every rank has weights of its own; the consensus is their mean.  Over all
ranks, the mean of the weights = the start + the mean of all that was changed - the mean of the
residuals of which it was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.agreement import (
    average,
    give_newest,
    has_overflowed,
    num_active,
    take_over_newest,
    weigh,
    weigh_pieces,
    zeroed,
)
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Traits
from lightning_dsgd.hyperparameters import above, at_least, one_of
from lightning_dsgd.primitives import sparse, sparse_format, step_scaling
from lightning_dsgd.primitives.sparse_format import Lot
from lightning_dsgd.transport import Diverged, Transport

Selected = tuple[Tensor, Tensor]
"""Values and their ascending indices."""

NUM_MEASURED: Final = 1024
"""The least number of entries that the share of applied gradients is measured on."""


@dataclass
class ErrorFeedback(Algorithm):
    """Sends the largest entries of the accumulated gradient; subclasses say how they are summed."""

    density: float | None = above(
        0,
        at_most=1,
        default=None,
        doc="share of the gradient entries that is selected in an exchange, k / n; None means 0.01 "
        "for each of the `local_steps`, at most 1",
    )
    local_steps: int = at_least(
        1,
        default=1,
        doc="number of steps from one exchange to the next; with more than 1, what these steps "
        "have changed in the weights takes the place of the gradient",
    )
    exchanges: str | None = one_of(
        "gradients",
        "changes",
        default=None,
        doc="what is accumulated: gradients, or what steps have changed in the weights; None means "
        '"gradients" with one local step, and "changes" with more',
    )
    scale_steps: bool = step_scaling.scale_steps(
        ', but by Ok-Topk nothing where it exchanges the changes of one step with `rule="shared"`'
    )

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        if self.exchanges == "gradients" and self.local_steps > 1:
            raise ValueError(
                "several steps with weights of their own have changes to exchange, got "
                f'exchanges="gradients" with local_steps={self.local_steps}; leave exchanges out, '
                "or set local_steps=1"
            )

    @property
    def share(self) -> float:
        """The density, as it was set or as it follows from the local steps."""
        return min(1.0, 0.01 * self.local_steps) if self.density is None else self.density

    def num_selected_of(self, num_entries: int) -> int:
        """Returns k, the number of entries selected from so many entries."""
        return max(1, round(self.share * num_entries))

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged, for the optimizer, and not what it has changed."""
        return self.local_steps == 1 and self.exchanges != "changes"

    @property
    def traits(self) -> Traits:
        return Traits(
            uses_gradient=self.exchanges_gradients,
            averages_weights=not self.exchanges_gradients,
            lockstep=self.exchanges_gradients,
            exchange_period=self.local_steps,
            counts_gradients=self.exchanges_gradients,
            holds_back=True,
            weighs_samples=True,
            scales_steps=self.scale_steps,
            looks_itself=True,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 2.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.residual = torch.zeros_like(x, dtype=wide)
        sparse.prepare(self.residual, net.world_size, is_told=net.rank == 0)
        self.k = self.num_selected_of(len(x))
        self.step = self.steps_before = 0  # made among these ranks, and before another was lost
        self.round = 0  # in which this rank took p, with or without a gradient
        self.num_own = 0  # steps that this rank has made itself
        self.num_applied = 0
        self.steps_since, self.samples = 0, self.no_samples()  # the last exchange
        self.base = (
            x.clone() if not self.exchanges_gradients else x[:0]
        )  # x where local steps began
        self.num_others = 0.0  # how much the others' changes count for each unit that its own count
        self.every = max(1, len(x) // NUM_MEASURED)
        self.gradients = self.some_of(self.residual)  # all of this rank's, of some entries
        self.share_applied: float | None = None  # of all ranks' gradients, at the last consensus

    def sparse_allreduce(self, g: Tensor) -> Selected:
        """Adds g to the residual, zeroes g, and returns the entries of the sum over all ranks.

        The entries returned are taken out of the residuals.
        """
        raise NotImplementedError

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if not self.exchanges_gradients:
            self.step += 1
            if not self.steps_since:
                self.conditions.look()
            self.begin_local_steps(x)
            return
        counts = self.conditions.gradient_counts
        weigh(self.net, g, self.weight, num_active(self.net, active=self.weight, counts=counts))
        self.exchange(g)
        self.step += 1
        self.num_own += 1

    def after_update(self, x: Tensor) -> None:
        if self.exchanges_gradients:
            return
        self.steps_since += 1
        self.samples += self.weight
        if self.steps_since >= self.local_steps:  # more, if a resume made the period shorter
            self.exchange_changes(x, active=True)

    def settle(self, x: Tensor) -> None:
        if not self.exchanges_gradients:
            while self.exchange_changes(x, active=False):
                pass
            return
        counts = self.conditions.gradient_counts
        while num_active(self.net, active=0, counts=zeroed(counts)):
            self.exchange(torch.zeros_like(x))
        self.step = take_over_newest(self.net, x, self.step)

    def begin_local_steps(self, x: Tensor) -> None:
        """Copies x where local steps begin, with what was written while all ranks stood still."""
        if not self.steps_since:
            self.base.copy_(x)

    def exchange_changes(self, x: Tensor, *, active: bool) -> bool:
        """Makes one round after local steps; the memory of x holds what is exchanged.

        Returns:
            Whether there was a round: not if all ranks stand still.
        """
        total = self.samples.clone()
        num = num_active(self.net, active=active, counts=total)
        if not num:
            return False
        own, whole = (int(self.samples), int(total)) if len(total) else (int(active), num)
        self.num_others = whole / own - 1 if own else 0.0
        self.begin_local_steps(x)
        torch.sub(self.base, x, out=x)
        weigh(self.net, x, self.samples, total)
        self.exchange(x)
        torch.sub(self.base, x, out=x)
        self.steps_since = 0
        self.samples.zero_()
        return True

    def exchange(self, g: Tensor) -> None:
        """Makes one round; leaves in g what the optimizer is to apply."""
        if self.conditions.skips_overflow and self.exchanges_gradients:  # else each rank by itself
            self.overflowed = has_overflowed(self.net, g)
            if self.overflowed:
                g.fill_(torch.nan)
                return
        if self.exchanges_gradients:
            self.gradients += self.some_of(g)
        values, indices = self.sparse_allreduce(g)
        g[indices] = values.div_(self.net.world_size).to(g.dtype)
        self.round += 1
        self.num_applied = len(values)

    def consensus(self, x: Tensor) -> Tensor:
        if not self.exchanges_gradients:
            mean = x.clone()
            weigh_pieces(self.net, mean, self.samples, (0, len(x)))
            average(self.net, mean)
            return mean
        # All ranks hold the same, unless they took over weights and kept their optimizer's state.
        return self.net.broadcast(x.clone(), src=0).wait()

    def held_back(self) -> Tensor | None:
        if not self.exchanges_gradients:
            return None  # `finish` applies it
        mean = self.residual.clone()
        average(self.net, mean)
        return mean if mean.any() else None

    def finish(self, x: Tensor) -> None:
        if not self.exchanges_gradients:
            weigh_pieces(self.net, x, self.samples, (0, len(x)))
            x -= self.residual.to(x.dtype)
            average(self.net, x)
        else:
            give_newest(self.net, x, self.num_own)  # whose optimizer has made all steps
        self.stop()

    def state_dict(self) -> dict[str, Any]:
        state = {
            "step": self.step,
            "steps_before": self.steps_before,
            "round": self.round,
            "residual": self.residual,
        }
        if self.exchanges_gradients:
            state["gradients"] = self.gradients
        if self.steps_since:
            state |= {"steps_since": self.steps_since, "base": self.base}
            state |= {"samples": self.samples.clone()} if len(self.samples) else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps_since = state.get("steps_since", 0)
        if steps_since and self.exchanges_gradients:
            raise ValueError(
                "a checkpoint that was saved between two exchanges must be resumed with local "
                f"steps, got local_steps=1 and {steps_since} steps since the last exchange; set "
                "local_steps as it was then, or remove the checkpoint's folder of replicas to go "
                "on from the consensus"
            )
        self.step, self.round = state["step"], state["round"]
        self.steps_before = state.get("steps_before", 0)
        self.residual.copy_(state["residual"])
        self.gradients = self.some_of(self.residual)
        if len(known := state.get("gradients", ())) == len(self.gradients):
            self.gradients.copy_(known)
        self.steps_since = steps_since
        if len(state.get("samples", ())) == len(self.samples) > 0:
            self.samples.copy_(state["samples"])
        if steps_since:
            self.base.copy_(state["base"])

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        self.steps_before = state.get("steps_before", 0) + state["step"]
        # Where a loss broke off an exchange after local steps, the residual may have taken in their
        # changes.  The weights have them too, so with that residual they would count twice.
        if self.exchanges_gradients or state.get("steps_since", 0) < self.local_steps:
            share = self.net.world_size / num_ranks
            self.residual.add_(state["residual"].to(self.residual), alpha=share)
            self.gradients = self.some_of(self.residual)

    def metrics(self) -> dict[str, float]:
        figures = {"density": self.num_applied / max(1, len(self.residual))}
        if self.share_applied is not None:
            figures["updates_kept"] = self.share_applied
        return figures

    def measure_kept(self) -> None:
        """Measures the share of all ranks' gradients that is not held back."""
        if not self.exchanges_gradients:
            return
        means = torch.stack([self.some_of(self.residual), self.gradients])
        average(self.net, means.view(-1))
        held_back, gradients = means
        products = torch.stack([held_back @ gradients, gradients @ gradients])
        product, squares = products.tolist()
        self.share_applied = 1 - product / squares if squares != 0 else None

    def some_of(self, x: Tensor) -> Tensor:
        """Returns a sample of x in the residual's dtype."""
        return x[:: self.every].to(self.residual.dtype, copy=True)

    # ---- what this rank has to send ----

    def accumulate(self, g: Tensor) -> None:
        self.residual += g
        g.zero_()

    def local_topk(self) -> Selected:
        """Returns the k largest entries of the residual, fewer where all others are zero."""
        return self.cut(self.select(sparse.kth_magnitude(self.residual, self.k)), self.k)

    def select(self, threshold: Tensor) -> Selected:
        """Selects the residual's entries by a threshold."""
        selected = sparse.select(self.residual, threshold)
        self.require_finite(bool(selected[0].isfinite().all()))
        return selected

    def require_finite(self, is_finite: bool) -> None:
        """Raises unless what this rank has selected is finite."""
        if not is_finite:
            what, step = "weights", self.steps_before + self.step
            if self.exchanges_gradients:
                what, step = "gradients", step + 1  # which is under way
            raise Diverged(
                f"{what} must be finite, got NaN or inf on rank {self.net.job_rank} at step "
                f"{step}; look at the learning rate and the loss, or set check_finite=True, which "
                "names the parameter"
            )

    def cut(self, selected: Selected, k: int) -> Selected:
        """Returns the k largest selected entries; of equal entries, the first."""
        values, indices = selected
        if len(values) <= k:
            return selected
        keep = sparse.places(sparse.largest(values, k), k)
        return values[keep], indices[keep]

    # ---- the wire ----

    def measure(self, selected: Selected, cuts: Tensor | None = None) -> list[Lot]:
        """Returns the lots of a selection between the cuts, or the whole as one lot."""
        values, indices = selected
        if cuts is None:
            cuts = devices.integers([0, len(indices)], indices.device)
        lots, is_finite = sparse_format.measure(values, indices, cuts, len(self.residual))
        self.require_finite(is_finite)
        return lots

    def swap(
        self, selected: Selected, lots: Sequence[Lot], order: Sequence[int], wire_dtype: str
    ) -> tuple[Selected, Tensor]:
        """Sends every rank its lot of a selection.

        Args:
            selected: this rank's entries
            lots: the lot of each rank
            order: the ranks; their lots are returned in this order, this rank's own among them
            wire_dtype: what values are rounded to; a rank's own are not rounded

        Returns:
            The lots of all ranks for this one, and what was rounded off the values sent.
        """
        net, (values, indices) = self.net, selected
        own, lots = lots[net.rank], [*lots]
        lots[net.rank] = Lot(0, 0)
        kept = slice(own.begin, own.end)
        if net.world_size == 1:
            return selected, torch.zeros_like(values)
        heads = sparse_format.heads_of(lots)
        each = [sparse_format.HEAD_WORDS] * net.world_size
        theirs = sparse_format.lots_of(
            net.all_to_all(torch.empty_like(heads), heads, each, each).wait()
        )
        message, errors = sparse_format.pack(values, indices, lots, wire_dtype)
        to_each, from_each = (
            [lot.num_bytes(wire_dtype, values.dtype) for lot in ones] for ones in (lots, theirs)
        )
        into = message.new_empty(sum(from_each))
        net.all_to_all(into, message, from_each, to_each).wait()
        messages, others = torch.split(into, from_each), [r for r in order if r != net.rank]
        came = sparse_format.unpack(
            [messages[r] for r in others], [theirs[r] for r in others], self.residual, wire_dtype
        )
        place = sum(theirs[rank].count for rank in order[: order.index(net.rank)])
        all_values, all_indices = (
            torch.cat([x[:place], mine[kept], x[place:]])
            for x, mine in zip(came, selected, strict=True)
        )
        rounded_off = torch.zeros_like(values)
        if len(errors):
            rounded_off[: own.begin] = errors[: own.begin]
            rounded_off[own.end :] = errors[own.begin :]
        return (all_values, all_indices), rounded_off

    def announce(self, lot: Lot) -> list[Lot]:
        """Tells all ranks what a lot has; returns every rank's lot."""
        heads = torch.empty(sparse_format.HEAD_WORDS * self.net.world_size, dtype=torch.int64)
        each = [sparse_format.HEAD_WORDS] * self.net.world_size
        head = sparse_format.heads_of([lot])
        return sparse_format.lots_of(self.net.gather_into(heads, head, each).wait())

    def gather(
        self, selected: Selected, lots: Sequence[Lot], wire_dtype: str = "float32"
    ) -> tuple[Selected, Tensor]:
        """Gathers what all ranks have announced.

        Returns:
            The entries of all ranks, and what was rounded off this rank's values.
        """
        own = replace(lots[self.net.rank], begin=0)
        message, rounded_off = sparse_format.pack(*selected, [own], wire_dtype)
        sizes = [lot.num_bytes(wire_dtype, self.residual.dtype) for lot in lots]
        into = message.new_empty(sum(sizes))
        self.net.gather_into(into, message, sizes).wait()
        all_of_them = sparse_format.unpack(
            torch.split(into, sizes), lots, self.residual, wire_dtype
        )
        return all_of_them, rounded_off


def evenly(length: int, num_parts: int) -> list[int]:
    """Returns the bounds of lots of equal length."""
    return [length * i // num_parts for i in range(num_parts + 1)]


def downwards(rank: int, world_size: int) -> list[int]:
    """Returns all ranks, in the order in which a rank adds up what comes: its own lot first."""
    return [(rank - distance) % world_size for distance in range(world_size)]
