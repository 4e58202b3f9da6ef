"""DiLoCo (Douillard et al., 2023, https://arxiv.org/abs/2311.08105), Algorithm 1.

    x_i <- x_i - lr * g_i(x_i)                       every step; AdamW in the paper
    D   <- (1/P) sum_j (x_j - W)                     every sync_period-th step
    v   <- m v + D,   W <- W + outer_lr (D + m v)
    x_i <- W

Legend: x_i the weights of rank i, W the global model, v the outer momentum, m outer_momentum, P
ranks.  Defaults are the paper's: 500 local steps, outer_lr 0.7, outer_momentum 0.9, Nesterov.  The
inner optimizer is the one that the LightningModule configures.

Fragments, overlap, mixing and rounded sums (`primitives/periodic.py`) give Streaming DiLoCo
(Douillard et al., 2025, https://arxiv.org/abs/2501.18512): num_fragments, fragments="layers",
overlap_steps=5, mixing=0.5, wire_dtype="e3m0".  With torch.optim.Muon as the inner optimizer and
wire_dtype="2bit" it is MuLoCo (Therien et al., 2025, https://arxiv.org/abs/2505.23725).

Differs from the papers: a rank that has run out of data continues to take part; the consensus,
which is evaluated and saved, is the mean of the ranks' weights, local steps since the last average
included.  Differs from Streaming DiLoCo: what is rounded off is sent the next time.  Not in the
papers: `average_momentum`.

Every rank waits for every other once per period, and then sends 2(P-1)/P |x| and one integer; in
the first period twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dsgd.algorithm import Profile
from lightning_dsgd.hyperparameters import at_least, one_of, with_default
from lightning_dsgd.primitives.periodic import PeriodicAverage


@dataclass
class DiLoCo(PeriodicAverage):
    """Averages the progress of hundreds of local steps, and steps with outer Nesterov momentum."""

    name: ClassVar[str] = "diloco"
    profile: ClassVar[Profile] = Profile(
        when="every `sync_period` steps",
        with_whom="all ranks",
        sends="2(P-1)/P |x| / `sync_period`",
        memory="2 |x|; |x| more with a `wire_dtype`, 2 |x| / `num_fragments` more with "
        "`overlap_steps`, |x| more with `average_momentum`",
    )

    sync_period: int = with_default(PeriodicAverage, "sync_period", 500)
    outer_lr: float = with_default(PeriodicAverage, "outer_lr", 0.7)
    outer_momentum: float = with_default(PeriodicAverage, "outer_momentum", 0.9)
    fragments: str = one_of(  # type: ignore[misc]
        "equal",
        "layers",
        default="equal",
        doc="what the pieces are: of equal size, or of whole layers, every `num_fragments`-th one",
    )
    mixing: float | None = at_least(  # type: ignore[misc]
        0,
        below=1,
        default=None,
        doc="share of a rank's own weights when a sum comes, `overlap_steps` late; None adds what "
        "the sum changes, so that no progress is lost",
    )
