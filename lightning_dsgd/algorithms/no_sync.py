"""Independent SGD on every rank: the lower bound on the time of a step ("PSGD" in HPSGD's paper).

    x_i <- x_i - lr * g_i(x_i)

The mean of the ranks' weights is what is evaluated, saved and left at the end; for a model that is
not convex it need not be a good one.  Sends nothing in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dsgd.algorithm import Algorithm, Profile


@dataclass
class NoSync(Algorithm):
    """Never communicates while training.

    Memory above plain training: none.
    """

    name: ClassVar[str] = "no_sync"
    profile: ClassVar[Profile] = Profile(
        when="never",
        with_whom="nobody",
        sends="nothing",
        suits="measurements: the lower bound on the time of a step",
    )
