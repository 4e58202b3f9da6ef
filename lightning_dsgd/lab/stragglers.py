"""Which ranks a benchmark delays in a step, the same on every rank and in the simulation."""

from __future__ import annotations

import random


def delayed_ranks(seed: int, step: int, world_size: int, num_ranks: int) -> list[int]:
    """Draws `num_ranks` different ranks: a pure function of its arguments."""
    return random.Random(f"{seed}/{step}").sample(range(world_size), num_ranks)
