"""SparseLoCo (Sarfi et al., 2025, https://arxiv.org/abs/2508.15706), Algorithm 1.

    x_i <- x after local_steps steps of this rank's optimizer; AdamW in the paper
    e_i <- decay e_i + (x - x_i)
    s_i <- Q(Topk(e_i)),   e_i <- e_i - s_i             k of every chunk of entries
    x   <- x - outer_lr (1/P) sum_j s_j                 on all ranks, which go on from there

Legend: e the residual, Q the rounding to two bits (`rounding.py`), k = density chunk_size, P ranks.
The residual, which decays, takes the place of an outer momentum.

Differs from the paper: a chunk is 4096 neighbours in the flat tensor, where the paper cuts matrices
into tiles of 64 by 64; the two magnitudes of two bits are means of 256 values, where the paper has
four levels for a parameter; indices are packed (`sparse_format`) into 8 bits, not 12.  As in the
paper, what is left of the residuals at the end is dropped.

Every rank waits for every other once in local_steps steps, and then sends all others the same
message: (P-1) (24 + 72 ceil(k' / 256) + about k') bytes, of k' entries in all chunks; and an
integer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dsgd.algorithm import Algorithm, Profile, Traits
from lightning_dsgd.hyperparameters import above, at_least, with_default
from lightning_dsgd.primitives import rounding, sparse
from lightning_dsgd.primitives.error_feedback import ErrorFeedback, Selected


@dataclass
class SparseLoCo(ErrorFeedback):
    """Sends the largest changes of many local steps, in two bits; the rest decays."""

    name: ClassVar[str] = "sparse_loco"
    profile: ClassVar[Profile] = Profile(
        when="every `local_steps` steps",
        with_whom="all ranks",
        sends="about 1.3k (P-1) / `local_steps`",
        memory="2 |x|",
    )
    exchanges: ClassVar[str | None] = "changes"  # type: ignore[misc]

    density: float | None = with_default(ErrorFeedback, "density", 1 / 32)
    local_steps: int = with_default(ErrorFeedback, "local_steps", 30)
    decay: float = above(0, at_most=1, default=0.95, doc="factor of the residual in each exchange")
    chunk_size: int = at_least(
        1, default=4096, doc="number of neighbouring weights of which the largest are selected"
    )
    outer_lr: float = above(0, default=1.0, doc="factor of the mean of what is sent")
    wire_dtype: str = rounding.wire_dtype("stays in the residual", "value", default="2bit")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, keeps_updates=False)

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        if self.local_steps == 1:
            raise ValueError(
                "sparse_loco exchanges what several steps have changed, got local_steps=1; set "
                'local_steps=30, or use strategy="topk_allgather"'
            )

    def sparse_allreduce(self, g: Tensor) -> Selected:
        self.residual *= self.decay
        self.accumulate(g)
        values, indices = selected = self.largest_of_chunks()
        announced = self.announce(*self.measure(selected))
        (theirs, places), rounded_off = self.gather(selected, announced, self.wire_dtype)
        self.residual[indices] = rounded_off if len(rounded_off) else 0.0
        total = g if g.dtype == values.dtype else torch.zeros_like(self.residual)
        total.index_add_(0, places, theirs, alpha=self.outer_lr)
        return sparse.select(total, total.new_zeros(()))

    def largest_of_chunks(self) -> Selected:
        """Returns the k largest entries of each chunk; the last chunk may be shorter."""
        size = min(self.chunk_size, max(1, len(self.residual)))
        chunks = pad(self.residual, (0, -len(self.residual) % size)).view(-1, size)
        places = chunks.abs().topk(self.num_selected_of(size), sorted=False).indices.sort(1).values
        begins = torch.arange(len(chunks), device=places.device)[:, None] * size
        values = chunks.gather(1, places).view(-1)
        kept = values.nonzero().squeeze(1)  # neither zeros nor what fills the last chunk
        return values[kept], (places + begins).view(-1)[kept]

    def finish(self, x: Tensor) -> None:
        Algorithm.finish(self, x)
