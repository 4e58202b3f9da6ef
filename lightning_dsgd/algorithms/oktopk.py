"""Ok-Topk (Li & Hoefler, PPoPP 2022, https://arxiv.org/abs/2201.07598), Algorithms 1 and 2.

    acc_i <- e_i + g_i P / A
    S <- the places of Topk(sum_i Topk(acc_i))
    u <- sum_i acc_i at S                   rule="paper": sum_i Topk(acc_i) at S
    e_i <- acc_i, but 0 where it has contributed to u
    g_i <- u / P

Legend: g gradient, e residual, acc the accumulated gradient, k = density n entries of n are
selected, P ranks, of which A still have data (P, in the paper), tau' threshold_period, tau
repartition_period.

Every rank owns a region of the gradient: it sums the entries that the ranks have selected there and
selects from the sums.  Their places are all-gathered, and the values there summed, without indices
(`rule="paper"`: the sums are all-gathered).

Differs from the paper, in short (`paper=True`: not in the first two points):
- Every rank gives all that it has at S.  By the paper's rule it keeps what it has not selected
  itself, which waits longer the more ranks there are.
- Thresholds are corrected a little in each step according to their counts, and evaluated again
  where fewer than 3k/4 or more than 5k/4 entries reach one.  Exact ones are found by counting.
- Gradients are accumulated, not lr * g, and the optimizer comes afterwards, as in the paper's runs
  with Adam.  A rank without data goes on with its residual (`error_feedback`).
- Any P, packed indices (`sparse_format`), one bucket; `wire_dtype` and `local_steps`.

Every rank waits for every other in every exchange, once in `local_steps` steps.  Sends about k
(P-1)/P entries and as many indices, and 2k (P-1)/P values, per exchange: at a density of 1% about
14k (P-1)/P bytes; by the paper's rule 2k (P-1)/P entries, 10k (P-1)/P bytes.  The paper's bound is
6k (P-1)/P numbers of 4 bytes.  It holds for any positions of the entries, if k is large compared
with the counts (64 P bytes) and, with two ranks, not all lie in the other's region in both phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.algorithm import ORDINARY, Conditions, Profile
from lightning_dsgd.hyperparameters import at_least, one_of, setting
from lightning_dsgd.primitives import rounding, sparse
from lightning_dsgd.primitives.error_feedback import ErrorFeedback, Selected, downwards, evenly
from lightning_dsgd.primitives.sparse_format import PLACES, Lot
from lightning_dsgd.primitives.step_scaling import EVERY, EXCHANGED_BLOCK, Similarity
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
        sends="about 14k (P-1)/P at a density of 1%, at most 24k (P-1)/P, / `local_steps`",
        memory="2 |g|; at most |g| more for the region",
    )

    printed: ClassVar[dict[str, Any]] = {
        "rule": "paper",
        "wire_dtype": "float32",
        "local_steps": 1,
        "exchanges": "gradients",
        "warmup_steps": 0,
    }

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
    rule: str | None = one_of(
        "shared",
        "paper",
        default=None,
        doc='what is applied at the chosen places: with "shared" all that the ranks have there, '
        'with "paper" what a rank has selected; None means "shared", or "paper" with `paper=True`',
    )
    paper: bool = setting(
        default=False,
        doc='if True, the algorithm is as printed: `rule="paper"`, and thresholds stay as they are '
        "for `threshold_period` exchanges",
    )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 3.0

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.is_shared = self.rule != "paper"
        self.local_threshold = self.global_threshold = self.residual.new_zeros(())
        self.divide(evenly(len(x), net.world_size))
        self.marks = torch.zeros_like(x[:0] if self.is_shared else x, dtype=torch.bool)
        self.room = self.residual.new_zeros(0)  # for the region; zeros between two steps
        self.num_dense = math.ceil(self.warmup_steps / self.local_steps)  # exchanges of the warm-up
        self.most = len(x) if self.paper else 5 * self.k // 4 + 1
        self.num_selected = 0
        if self.scale_steps and self.is_shared and self.local_steps == 1 < net.world_size:
            self.similarity = Similarity(self.residual, net.world_size, EXCHANGED_BLOCK)

    def exchange(self, g: Tensor) -> None:
        if self.round >= self.num_dense:
            super().exchange(g)
            return
        sample = self.some_of(g)
        self.gradients += torch.where(sample.isfinite().all(), sample, 0.0)
        own = g[::EVERY].clone() if self.similarity is not None else None
        self.net.all_reduce(g).wait()
        if own is not None:
            places = torch.arange(0, len(g), EVERY, device=g.device)
            self.similarity.compare(places, own, g[::EVERY], self.num_others)
        g /= self.net.world_size
        self.round += 1
        self.num_selected = self.num_applied = len(g)

    def sparse_allreduce(self, g: Tensor) -> Selected:
        """Runs one step of the paper's Algorithm 1, up to the sum at the places it has chosen."""
        t = self.round - self.num_dense
        is_exact = t % self.threshold_period == 0
        local, lots = self.select_local(g, is_exact)
        self.num_selected = len(local[0])
        if t % self.repartition_period == 0:
            self.divide(self.space_repartition(local[1]))
            lots = self.measure(local, self.cuts(local[1]))
        region, touched, rounded_off = self.split_and_reduce(local, lots)
        if is_exact:
            self.global_threshold = self.th_re_evaluate_global(region)
        selected, lots = self.select_global(region, is_exact)
        region[touched] = 0
        sizes = [lot.count for lot in lots]
        if max(sizes) * len(sizes) > self.balance_ratio * sum(sizes):
            selected, lots = self.balance(selected, sizes)
        if self.is_shared:
            (_, places), _ = self.gather(selected, lots, PLACES)
            if self.similarity is None:
                return self.sum_at(places), places
            own = self.residual[places]
            sums = self.sum_at(places)
            self.similarity.compare(places, own, sums, self.num_others)
            return sums, places
        u, of_sums = self.gather(selected, lots, self.wire_dtype)
        self.update_residual(local[1], u[1], rounded_off)
        if self.wire_dtype != "float32":
            self.residual[selected[1]] += of_sums  # stays with the rank that has rounded
        return u

    # ---- selection ----

    def th_re_evaluate(self) -> Tensor:
        """Returns the exact local threshold; 0 where all entries are wanted, now and later."""
        if self.k == len(self.residual):
            return self.residual.new_zeros(())
        return sparse.kth_magnitude(self.residual, self.k)

    def select_local(self, g: Tensor, is_exact: bool) -> tuple[Selected, list[Lot]]:
        """Selects entries by an earlier threshold, or the k largest by a new threshold."""
        if is_exact:
            self.accumulate(g)
        else:
            values, places = sparse.select(self.residual, self.local_threshold, g, self.most)
            lots = self.measure((values, places), self.cuts(places))
            count = lots[-1].end
            if self.may_go_on(self.local_threshold, count):
                self.local_threshold = self.corrected(self.local_threshold, count)
                return (values[:count], places[:count]), lots
        self.local_threshold = self.th_re_evaluate()
        local = self.cut(self.select(self.local_threshold), self.k)
        return local, self.measure(local, self.cuts(local[1]))

    def may_go_on(self, threshold: Tensor, count: int) -> bool:
        """Returns whether a threshold selects about k entries, or fewer as there are no more."""
        is_near = self.paper or sparse.is_near(count, self.k)  # waits for no device
        return is_near or (count < self.k and not threshold)

    def corrected(self, threshold: Tensor, count: int) -> Tensor:
        """Returns the next exchange's threshold, after one that has selected so many entries."""
        return threshold if self.paper else sparse.corrected(threshold, count, self.k)

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

    def select_global(self, region: Tensor, is_exact: bool) -> tuple[Selected, list[Lot]]:
        """Returns the global top-k's entries in this rank's region, and every rank's lot of them.

        The ranks have at most 5k/4 entries, and at most k by an exact threshold; of equal entries
        the first are taken.
        """
        rank = self.net.rank
        if not is_exact:  # one entry more than all ranks may have tells of too many
            values, places = sparse.select(region, self.global_threshold, most=self.most)
            indices = places + self.boundaries[rank]
            (lot,) = self.measure((values, indices), self.cuts(indices)[rank : rank + 2])
            lots = self.announce(lot)
            total = sum(lot.count for lot in lots)
            if self.may_go_on(self.global_threshold, total):
                self.global_threshold = self.corrected(self.global_threshold, total)
                return (values[: lot.count], indices[: lot.count]), lots
            self.global_threshold = self.th_re_evaluate_global(region)
        selected = self.select_exactly(region)
        return selected, self.announce(*self.measure(selected))

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

    def cuts(self, indices: Tensor) -> Tensor:
        """Returns where the entries of each region begin, and the last ones end."""
        return torch.searchsorted(indices, self.edges)

    def split_and_reduce(self, local: Selected, lots: list[Lot]) -> tuple[Tensor, Tensor, Tensor]:
        """Sends each rank the entries of its region; sums the entries of this rank's region.

        Returns the region's sums, the places that may differ from zero, and what was rounded off.
        """
        rank, num_ranks = self.net.rank, self.net.world_size
        start, stop = self.boundaries[rank : rank + 2]
        order = downwards(rank, num_ranks)
        (terms, places), rounded_off = self.swap(local, lots, order, self.wire_dtype)
        if len(self.room) < stop - start:
            self.room = self.residual.new_zeros(stop - start)
        region, touched = self.room[: stop - start], places - start
        return region.index_add_(0, touched, terms), touched, rounded_off

    def balance(self, selected: Selected, sizes: Sequence[int]) -> tuple[Selected, list[Lot]]:
        """Spreads the entries evenly, in their order."""
        rank, num_ranks = self.net.rank, self.net.world_size
        begin = sum(sizes[:rank])
        goals = evenly(sum(sizes), num_ranks)
        cuts = [min(max(goal - begin, 0), sizes[rank]) for goal in goals]
        lots = self.measure(selected, devices.integers(cuts, self.residual.device))
        wire_dtype = PLACES if self.is_shared else "float32"
        selected = self.swap(selected, lots, range(num_ranks), wire_dtype)[0]
        return selected, self.announce(*self.measure(selected))

    # ---- what is applied, and the residual ----

    def sum_at(self, places: Tensor) -> Tensor:
        """Sums what all ranks have at these places; what is rounded off alone stays there."""
        values = self.residual[places]
        if self.wire_dtype == "float32":
            self.net.all_reduce(values).wait()
            self.residual[places] = 0
            return values
        rank, num_ranks = self.net.rank, self.net.world_size
        numbers = torch.arange(len(places), device=places.device)
        lots = [Lot(a, b - a, a) for a, b in pairwise(evenly(len(places), num_ranks))]
        share, order = slice(lots[rank].begin, lots[rank].end), downwards(rank, num_ranks)
        (terms, those), rounded_off = self.swap((values, numbers), lots, order, self.wire_dtype)
        sums = torch.zeros_like(values[share]).index_add_(0, those - share.start, terms)
        (totals, _), of_sums = self.gather((sums, numbers[share]), lots, self.wire_dtype)
        rounded_off[share] = of_sums
        self.residual[places] = rounded_off
        return totals

    def update_residual(self, local: Tensor, applied: Tensor, rounded_off: Tensor) -> None:
        """Leaves what was rounded off at those local indices whose entries were applied."""
        self.marks[applied] = True
        left = self.residual[local]
        self.residual[local] = torch.where(self.marks[local], rounded_off, left)
        self.marks[applied] = False

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
