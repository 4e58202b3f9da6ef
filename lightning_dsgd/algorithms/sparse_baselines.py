"""The sparse all-reduces that Ok-Topk is compared with (Li & Hoefler, PPoPP 2022, Table 1).

    acc_i <- e_i + g_i,   s_i <- Topk(acc_i)

    TopkAllgather   u <- sum_i s_i      s_i to all                          2k (P-1)
    GaussianTopk    the same, with a normal distribution's threshold        2k (P-1)
    TopkDSA         u <- sum_i s_i      by regions, then all-gathered       4k (P-1)/P to
                                                                            (2k + n)(P-1)/P
    GTopk           u <- Topk(s_0 + s_1) ... up a tree, then down it        4k log2 P at the root

Legend: g gradient, e residual, k = density n entries of n are selected, u what is applied (times
1/P), P ranks.  The last column is the paper's: numbers of 4 bytes that a rank sends per exchange,
at most; an entry takes two, its value and its index.  GaussianTopk sends more if more than k
entries reach the threshold.

Papers: TopkAllgather and TopkDSA: SparCML (Renggli et al., SC 2019,
https://arxiv.org/abs/1802.08021); GTopk: Shi et al., ICDCS 2019, https://arxiv.org/abs/1901.04359;
GaussianTopk: Shi et al. 2019, https://arxiv.org/abs/1911.08772.

Differences from the papers: indices are packed (`sparse_format`) in all of them; a rank that has
run out of data continues with its residual; not in the papers is `local_steps`, which sums what
several steps have changed (both: `error_feedback`).  Every rank waits for every other in every
exchange, once in `local_steps` steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.algorithm import Profile
from lightning_dsgd.primitives import sparse, sparse_format
from lightning_dsgd.primitives.error_feedback import ErrorFeedback, Selected, downwards, evenly
from lightning_dsgd.primitives.sparse_format import Lot

UP: Final = 1
DOWN: Final = 2
_HEAD: Final = torch.empty(0, dtype=torch.int64)
LOWERED_BY: Final = 0.9
"""The factor of a Gaussian threshold until enough entries get through."""


@dataclass
class TopkAllgather(ErrorFeedback):
    """All-gathers the k largest gradient entries of each rank and sums them."""

    name: ClassVar[str] = "topk_allgather"
    profile: ClassVar[Profile] = Profile(
        when="every step, or every `local_steps` steps",
        with_whom="all ranks",
        sends="at most 8k (P-1) / `local_steps`",
        memory="2 |g|",
    )

    def sparse_allreduce(self, g: Tensor) -> Selected:
        self.accumulate(g)
        values, indices = selected = self.local_topk()
        self.residual[indices] = 0
        total = g if g.dtype == values.dtype else torch.zeros_like(self.residual)
        theirs, places = self.gather(selected, self.announce(*self.measure(selected)))[0]
        total.index_add_(0, places, theirs)
        return sparse.select(total, total.new_zeros(()))


@dataclass
class GaussianTopk(TopkAllgather):
    """Like `topk_allgather`, with a threshold estimated from a normal distribution.

    The threshold is the one that k of n normally distributed entries would reach.  It is lowered
    until more than 3k/4 entries reach it, as in Ok-Topk's comparison.  More than k entries may
    reach it.
    """

    name: ClassVar[str] = "gaussian_topk"
    profile: ClassVar[Profile] = Profile(
        when="every step, or every `local_steps` steps",
        with_whom="all ranks",
        sends="about 8k (P-1) / `local_steps`; more if more than k entries reach the threshold",
        memory="2 |g|",
    )

    def local_topk(self) -> Selected:
        e = self.residual
        if self.k == len(e):
            return super().local_topk()
        deviation, mean = torch.std_mean(e, correction=0)
        quantile = math.sqrt(2) * torch.erfinv(deviation.new_tensor(1 - self.k / len(e)))
        limits = torch.finfo(e.dtype)
        threshold = (mean.abs() + deviation * quantile).clamp(max=limits.max)
        selected = self.select(threshold)
        while 4 * len(selected[0]) <= 3 * self.k and threshold > limits.tiny:
            threshold = threshold * LOWERED_BY
            selected = self.select(threshold)
        return selected


@dataclass
class TopkDSA(ErrorFeedback):
    """Sums the k largest gradient entries by regions, then all-gathers the regions (SparCML).

    A region is sent dense as soon as that takes fewer bytes.
    """

    name: ClassVar[str] = "topk_dsa"
    profile: ClassVar[Profile] = Profile(
        when="every step, or every `local_steps` steps",
        with_whom="all ranks",
        sends="at most 16k (P-1)/P to (8k + 4n)(P-1)/P, / `local_steps`",
        memory="2 |g|; |g| / P more for the region",
    )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 2.0 + 1 / world_size  # for the region

    def sparse_allreduce(self, g: Tensor) -> Selected:
        rank, world_size = self.net.rank, self.net.world_size
        self.accumulate(g)
        selected = self.local_topk()
        self.residual[selected[1]] = 0
        bounds = evenly(len(g), world_size)
        start, stop = bounds[rank : rank + 2]
        cuts = torch.searchsorted(selected[1], devices.integers(bounds, g.device))
        lots, order = self.measure(selected, cuts), downwards(rank, world_size)
        (values, places), _ = self.swap(selected, lots, order, "float32")
        region = self.residual.new_zeros(stop - start).index_add_(0, places - start, values)
        values, places = sparse.select(region, region.new_zeros(()))
        sums = values, places + start
        (lot,) = self.measure(sums)
        if lot.num_bytes("float32", region.dtype) >= region.nbytes:
            sums = region, torch.arange(start, stop, device=region.device)
            lot = Lot(0, len(region), start)
        values, indices = self.gather(sums, self.announce(lot))[0]
        kept = values.nonzero().squeeze(1)  # a dense region has zeros
        return values[kept], indices[kept]


@dataclass
class GTopk(ErrorFeedback):
    """Sums the k largest gradient entries pairwise up a binomial tree and keeps k of each sum.

    Differs from the paper: any P; what a rank drops from a sum goes into its own residual.  (The
    paper returns a rank's entry to it if its index is not in the result.  So it loses what was
    dropped in one branch at an index that reached the root through another.)
    """

    name: ClassVar[str] = "gtopk"
    profile: ClassVar[Profile] = Profile(
        when="every step, or every `local_steps` steps",
        with_whom="all ranks, up a tree and down again",
        sends="at most 16k log2 P / `local_steps`, at the root of the tree",
        memory="2 |g|",
    )

    def sparse_allreduce(self, g: Tensor) -> Selected:
        rank, world_size = self.net.rank, self.net.world_size
        self.accumulate(g)
        selected = self.local_topk()
        self.residual[selected[1]] = 0
        distances = [1 << i for i in range((world_size - 1).bit_length())]
        for distance in distances:
            if rank % (2 * distance) == distance:
                self.send(selected, rank - distance, UP)
            elif rank % (2 * distance) == 0 and rank + distance < world_size:
                selected = self.merge(selected, self.recv(rank + distance, UP))
        for distance in reversed(distances):
            if rank % (2 * distance) == distance:
                selected = self.recv(rank - distance, DOWN)
            elif rank % (2 * distance) == 0 and rank + distance < world_size:
                self.send(selected, rank + distance, DOWN)
        return selected

    def send(self, selected: Selected, rank: int, tag: int) -> None:
        lots = self.measure(selected)
        self.net.send(sparse_format.heads_of(lots), rank, tag)
        self.net.send(sparse_format.pack(*selected, lots)[0], rank, tag)

    def recv(self, rank: int, tag: int) -> Selected:
        lots = sparse_format.lots_of(self.net.recv(_HEAD, rank, tag).wait())
        like = self.residual.new_empty(0, dtype=torch.uint8)
        message = self.net.recv(like, rank, tag).wait()
        return sparse_format.unpack([message], lots, self.residual)

    def merge(self, ours: Selected, theirs: Selected) -> Selected:
        """Returns the k largest entries of the sum; the rest goes into the residual."""
        values, indices = map(torch.cat, zip(ours, theirs, strict=True))
        indices, place = indices.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        sums = values.new_zeros(len(indices)).index_add_(0, place, values)  # two terms at most
        if len(sums) <= self.k:
            return sums, indices
        keep = sparse.largest(sums, self.k)
        self.residual[indices[~keep]] += sums[~keep]
        return sums[keep], indices[keep]
