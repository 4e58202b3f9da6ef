"""Local SGD (Stich, ICLR 2019, https://arxiv.org/abs/1805.09767), Algorithm 1.

    x_i <- x_i - lr * g_i(x_i)                  every step
    x_i <- (1/P) sum_j x_j                      every sync_period-th step

Differs from the paper: any optimizer makes the local step, and its state stays local unless
`average_momentum` is set; a rank that has run out of data continues to take part in the averages
with the weights it has.  Not in the paper: the outer optimizer, fragments, overlap, rounded sums,
averaged momentum and a growing period (`primitives/periodic.py`).

Every rank waits for every other once per period, and then sends 2(P-1)/P |x| and one integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dsgd.algorithm import Profile
from lightning_dsgd.hyperparameters import setting
from lightning_dsgd.primitives.periodic import PeriodicAverage


@dataclass
class LocalSGD(PeriodicAverage):
    """Averages the weights of all ranks every `sync_period` steps."""

    name: ClassVar[str] = "local_sgd"
    profile: ClassVar[Profile] = Profile(
        when="every `sync_period` steps",
        with_whom="all ranks",
        sends="2(P-1)/P |x| / `sync_period`",
        memory="none; |x| with an outer optimizer, |x| more with momentum, 2 |x| more "
        "with a `wire_dtype`, 2 |x| / `num_fragments` more with `overlap_steps`, |x| more with "
        "`average_momentum`",
    )

    growing_period: bool = setting(  # type: ignore[misc]
        default=False,
        doc="if True, `sync_period` is what the period begins with; it grows as the learning rate "
        "falls, at most 32 times",
    )
