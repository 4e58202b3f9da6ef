"""Independent SGD on every rank: the upper bound on steps per second ("PSGD" in HPSGD's paper).

    x_i <- x_i - lr * g_i(x_i)

The mean of the ranks' weights is evaluated, saved, and the result of training.  If the loss is not
convex, this need not be a good model.  Sends nothing in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dsgd.algorithm import Algorithm, Profile, Traits


@dataclass
class NoSync(Algorithm):
    """Never communicates while training."""

    name: ClassVar[str] = "no_sync"
    profile: ClassVar[Profile] = Profile(
        when="never",
        with_whom="none",
        sends="0",
        memory="none",
    )
    traits = Traits(averages_weights=False, follows_time=False)

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        return 0.0
