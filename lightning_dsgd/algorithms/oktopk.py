"""Ok-Topk (Li & Hoefler, PPoPP 2022, https://arxiv.org/abs/2201.07598), Algorithms 1 and 2.

    acc_i <- e_i + g_i P / A
    u <- Topk(sum_i Topk(acc_i))
    e_i <- acc_i, but 0 where it has contributed to u
    g_i <- u / P

Legend: g gradient, e residual, acc the accumulated gradient, k = density n entries of n are
selected, P ranks, of which A still have data (P, in the paper), tau' threshold_period, tau
repartition_period.

Every rank owns a region of the gradient: it sums the entries that the ranks have selected there and
selects from the sums.  The selected sums are then all-gathered.

Differs from the paper:
- Algorithm 2 accumulates lr * g and subtracts u / P from the weights.  Here gradients are
  accumulated and the optimizer comes afterwards, as in the paper's runs with Adam; with plain SGD
  and a constant lr the two are the same.  When the lr changes, the residual is applied with the new
  one.
- A step with an exact threshold selects exactly k entries; of equal ones, the first.  In between,
  the thresholds are corrected a little in each step according to their counts.  A threshold that
  fewer than 3k/4 or more than 5k/4 entries reach is evaluated again at once, so that no step sends
  almost nothing, and none more than the volume below.
- The exact global threshold is found by counting digits, in four all-reduces of 1 KB; the paper
  gathers all sums on all ranks, up to P k of them.
- Any P: the all-gather is Bruck's, which is recursive doubling where P is a power of two.
- Indices are packed (`sparse_wire`), not sent as coordinates of 4 bytes.
- All destinations are one bucket: the sums of a region are made once all its entries are there, in
  as many operations for any P.  On a GPU they are added in any order, unless
  `torch.use_deterministic_algorithms` is on.
- A rank that has run out of data continues with its residual, and all residuals are applied at the
  end of training (`error_feedback`).
- Not in the paper: `wire_dtype` (`rounding`; what a rank rounds off, of its values or of the sums
  that it sends to all, stays in its residual); `local_steps`, which sums what several steps have
  changed (`error_feedback`).  The periods then count exchanges.

Every rank waits for every other in every exchange, once in `local_steps` steps.  Sends about 2k
(P-1)/P values with their indices per exchange, 5.1 bytes each at a density of 1%: about 10k (P-1)/P
bytes.  The paper's bound is 6k (P-1)/P numbers of 4 bytes.  It also holds for unfavourable
positions of the entries, if k is large compared with the headers and counts (64 P bytes per
exchange) and, with two ranks, not all entries lie in the other's region in both phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.algorithm import ORDINARY, Conditions, Profile
from lightning_dsgd.hyperparameters import at_least
from lightning_dsgd.primitives import rounding, sparse
from lightning_dsgd.primitives.error_feedback import ErrorFeedback, Selected, downwards, evenly
from lightning_dsgd.primitives.sparse_wire import Part
from lightning_dsgd.transport import Transport

DIGIT_BITS: Final = 8
FEW: Final = 4096
"""A smaller k has digits of half as many bits: twice the exchanges, an eighth of the bytes."""


@dataclass
class OkTopk(ErrorFeedback):
    """All-reduces only the k largest gradient entries; the bytes sent hardly grow with P.

    The rest of the gradient is kept in a residual, in fp32 or wider, and added to the next one.
    """

    name: ClassVar[str] = "oktopk"
    profile: ClassVar[Profile] = Profile(
        when="every step, or every `local_steps` steps",
        with_whom="all ranks",
        sends="about 10k (P-1)/P / `local_steps` at a density of 1%, at most 24k (P-1)/P / "
        "`local_steps`",
        memory="2 |g|; at most |g| more for the region, 1 byte per element more",
        suits="slow networks and large models, ranks of equal speed",
    )

    threshold_period: int = at_least(
        1, default=32, doc="number of exchanges from one exact threshold to the next"
    )
    repartition_period: int = at_least(
        1, default=64, doc="number of exchanges after which the regions are divided again"
    )
    balance_ratio: float = at_least(
        1,
        default=4.0,
        doc="entries are spread evenly over the ranks before the all-gather if one rank has more "
        "than this many times the mean",
    )
    warmup_steps: int = at_least(
        0, default=0, doc="number of steps at the start whose exchanges are dense"
    )
    wire_dtype: str = rounding.wire_dtype("stays in the residual", of="value")

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.local_threshold = self.residual.new_zeros(())
        self.global_threshold = self.residual.new_zeros(())
        self.divide(evenly(len(x), net.world_size))
        self.marks = torch.zeros_like(x, dtype=torch.bool)  # local entries; none between two steps
        self.room = self.residual.new_zeros(0)  # for the region; zeros between two steps
        self.num_dense = math.ceil(self.warmup_steps / self.local_steps)  # exchanges of the warm-up
        self.num_selected = 0

    def exchange(self, g: Tensor) -> None:
        if self.round >= self.num_dense:
            super().exchange(g)
            return
        sample = self.some_of(g)
        self.gradients += torch.where(sample.isfinite().all(), sample, 0.0)
        self.net.all_reduce(g).wait()
        g /= self.net.world_size
        self.round += 1
        self.num_selected = self.num_applied = len(g)

    def sparse_allreduce(self, g: Tensor) -> Selected:
        """Runs one step of the paper's Algorithm 1."""
        t = self.round - self.num_dense
        is_exact = t % self.threshold_period == 0
        if is_exact:
            self.accumulate(g)
            self.local_threshold = self.th_re_evaluate()
            local = self.cut(self.select(self.local_threshold), self.k)
        else:
            selected = sparse.accumulate_and_select(self.residual, g, self.local_threshold)
            local = self.select_local(selected)
        self.num_selected = len(local[0])
        self.marks[local[1]] = True
        if t % self.repartition_period == 0:
            self.divide(self.space_repartition(local[1]))
        region, touched, rounded_off = self.split_and_reduce(*local)
        if is_exact:
            self.global_threshold = self.th_re_evaluate_global(region)
        u, (of_sums, sums) = self.balance_and_allgatherv(region, is_exact)
        region[touched] = 0
        self.update_residual(local[1], u[1], rounded_off)
        if self.wire_dtype != "float32":
            self.residual[sums] += of_sums  # stays with the rank that has rounded
        self.marks[local[1]] = False
        return u

    # ---- selection ----

    def th_re_evaluate(self) -> Tensor:
        """Returns the exact local threshold; 0 where all entries are wanted, now and later."""
        if self.k == len(self.residual):
            return self.residual.new_zeros(())
        return sparse.kth_magnitude(self.residual, self.k)

    def select_local(self, selected: Selected) -> Selected:
        """Selects entries by an earlier threshold, or the k largest by a new threshold."""
        values, _ = selected
        if self.may_go_on(self.local_threshold, len(values)):
            self.local_threshold = sparse.corrected(self.local_threshold, len(values), self.k)
            return selected
        self.require_finite(bool(values.isfinite().all()))
        if len(values) >= self.k:
            self.local_threshold = sparse.kth_magnitude(values, self.k)
        else:
            self.local_threshold = self.th_re_evaluate()
            selected = self.select(self.local_threshold)
        return self.cut(selected, self.k)

    def may_go_on(self, threshold: Tensor, count: int) -> bool:
        """Returns whether a threshold selects about k entries, or fewer as there are no more."""
        return sparse.is_near(count, self.k) or (count < self.k and not threshold)

    def th_re_evaluate_global(self, region: Tensor) -> Tensor:
        """Returns the exact k-th largest magnitude of all regions, digit by digit from the highest.

        Magnitudes have the same order as the integers with the same bits.
        """
        if self.k == len(self.residual):
            return region.new_zeros(())
        values, _ = sparse.select(region, region.new_zeros(()))
        bits = values.abs().view(torch.int64 if values.dtype == torch.float64 else torch.int32)
        wanted, prefix = self.k, 0
        width = DIGIT_BITS if self.k >= FEW else DIGIT_BITS // 2
        for shift in range(8 * values.itemsize - width, -1, -width):
            digits = (bits >> shift) & ((1 << width) - 1)
            counts = sparse.count_each(digits, 1 << width).to(torch.int32)
            self.net.all_reduce(counts).wait()
            at_least = counts.flip(0).cumsum(0).flip(0).tolist()  # with this digit or a higher one
            if at_least[0] < wanted:
                return region.new_zeros(())  # there are fewer than k in all
            digit = max(d for d, num in enumerate(at_least) if num >= wanted)
            wanted -= at_least[digit + 1] if digit + 1 < len(at_least) else 0
            prefix = prefix << width | digit
            bits = bits[digits == digit]
        return torch.tensor(prefix, dtype=bits.dtype, device=region.device).view(region.dtype)

    def select_global(self, region: Tensor, is_exact: bool) -> tuple[Selected, list[Part]]:
        """Returns the global top-k's entries in this rank's region, and every rank's part of them.

        The ranks have at most 5k/4 entries, and at most k by an exact threshold; of equal entries
        the first are taken.
        """
        if not is_exact:
            selected, parts = self.select_near(region)
            total = sum(part.count for part in parts)
            if self.may_go_on(self.global_threshold, total):
                self.global_threshold = sparse.corrected(self.global_threshold, total, self.k)
                return selected, parts
            self.global_threshold = self.th_re_evaluate_global(region)
        selected = self.select_exactly(region)
        return selected, self.announce(*self.measure(selected))

    def select_near(self, region: Tensor) -> tuple[Selected, list[Part]]:
        """Selects by an earlier threshold, at most one entry more than all ranks may have."""
        most = 5 * self.k // 4 + 1
        values, places, cuts = sparse.select_at_most(region, self.global_threshold, most)
        indices = places + self.boundaries[self.net.rank]
        (part,) = self.measure((values, indices), cuts)
        return (values[: part.count], indices[: part.count]), self.announce(part)

    def select_exactly(self, region: Tensor) -> Selected:
        """Selects this rank's entries of the k largest, by the k-th magnitude of all regions."""
        values, places = sparse.select(region, self.global_threshold)
        ties = values.abs() == self.global_threshold
        counts = torch.tensor([len(values), int(ties.sum())])
        theirs = torch.stack(self.net.all_gather(counts).wait())
        num, num_ties = theirs.sum(0).tolist()
        before = int(theirs[: self.net.rank, 1].sum())
        may_stay = self.k - (num - num_ties) - before  # of this rank's ties, the first ones
        kept = (ties.logical_not() | (ties.cumsum(0) <= may_stay)).nonzero().squeeze(1)
        return values[kept], places[kept] + self.boundaries[self.net.rank]

    # ---- the two phases ----

    def space_repartition(self, indices: Tensor) -> list[int]:
        """Returns regions with equally many selected entries, by the mean of all ranks' wishes."""
        n, num_ranks = len(self.residual), self.net.world_size
        wishes = torch.tensor(evenly(n, num_ranks)[1:-1], dtype=torch.int64)
        if len(indices):
            wishes = indices[evenly(len(indices), num_ranks)[1:-1]].cpu()
        self.net.all_reduce(wishes).wait()
        return [0, *(wishes // num_ranks).tolist(), n]

    def divide(self, boundaries: list[int]) -> None:
        """Divides the entries into one region for each rank."""
        self.boundaries = boundaries
        self.edges = devices.integers(boundaries, self.residual.device)

    def split_and_reduce(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends each rank the entries of its region; sums the entries of this rank's region.

        Returns:
            The region's sums, the places that may differ from zero, and what was rounded off the
            values.
        """
        rank, num_ranks = self.net.rank, self.net.world_size
        start, stop = self.boundaries[rank : rank + 2]
        cuts = torch.searchsorted(indices, self.edges)
        order = downwards(rank, num_ranks)
        (terms, places), rounded_off = self.swap((values, indices), cuts, order, self.wire_dtype)
        if len(self.room) < stop - start:
            self.room = self.residual.new_zeros(stop - start)
        region, touched = self.room[: stop - start], places - start
        return region.index_add_(0, touched, terms), touched, rounded_off

    def balance_and_allgatherv(self, region: Tensor, is_exact: bool) -> tuple[Selected, Selected]:
        """Returns the global top-k from all regions, and what was rounded off this rank's sums."""
        selected, parts = self.select_global(region, is_exact)
        sizes = [part.count for part in parts]
        if max(sizes) * len(sizes) > self.balance_ratio * sum(sizes):
            selected = self.balance(selected, sizes)
            parts = self.announce(*self.measure(selected))
        u, rounded_off = self.gather(selected, parts, self.wire_dtype)
        return u, (rounded_off, selected[1])

    def balance(self, selected: Selected, sizes: Sequence[int]) -> Selected:
        """Spreads the entries evenly, in their order."""
        rank, num_ranks = self.net.rank, self.net.world_size
        begin = sum(sizes[:rank])
        goals = evenly(sum(sizes), num_ranks)
        cuts = [min(max(goal - begin, 0), sizes[rank]) for goal in goals]
        parts = devices.integers(cuts, self.residual.device)
        return self.swap(selected, parts, range(num_ranks))[0]

    # ---- the residual ----

    def update_residual(
        self, local_indices: Tensor, global_indices: Tensor, rounded_off: Tensor
    ) -> None:
        """Clears the residual at those local indices that are among the global ones.

        The residual keeps there what was rounded off.
        """
        if self.wire_dtype == "float32":  # no place comes twice; the host waits for no length
            left = self.residual[global_indices]
            self.residual[global_indices] = left.masked_fill_(self.marks[global_indices], 0)
            return
        applied = torch.isin(local_indices, global_indices, assume_unique=True)
        left = self.residual[local_indices]
        self.residual[local_indices] = torch.where(applied, rounded_off, left)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "local_threshold": self.local_threshold,
            "global_threshold": self.global_threshold,
            "boundaries": self.boundaries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.local_threshold = state["local_threshold"].to(self.residual)
        self.global_threshold = state["global_threshold"].to(self.residual)
        self.divide(list(state["boundaries"]))

    def metrics(self) -> dict[str, float]:
        n = max(1, len(self.residual))
        return super().metrics() | {"local_density": self.num_selected / n}
