"""What slows the ranks of `benchmarks target` down, by name."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.lab.simulate.machines import delayed_ranks


@dataclass(frozen=True)
class Situation:
    """Describes what slows the ranks down; a step takes 1 s where nothing else is said.

    Args:
        text: what happens, in words
        ranks: the number of ranks
        allreduce_s: how long an all-reduce of the weights takes
        late: how many random ranks are 0.8 s late in each step
        slow: how many times as long a step takes on the last rank
        heavy_tail: whether a step takes 0.7 s and a Pareto time (shape 1.5) of 0.3 s, at most 8 s
    """

    text: str
    ranks: int = 8
    allreduce_s: float = 0.02
    late: int = 0
    slow: float = 1.0
    heavy_tail: bool = False

    def step_s(self, seed: int, step: int, rank: int) -> float:
        """Returns the time of one step's computation on one rank, the same for every strategy."""
        draw = random.Random(f"{seed}/{step}/{rank}")
        if self.heavy_tail:
            return 0.7 + min(8.0, 0.3 * draw.paretovariate(1.5))
        base = self.slow if rank == self.ranks - 1 else 1.0
        is_late = rank in delayed_ranks(seed, step, self.ranks, self.late)
        return base * draw.uniform(0.97, 1.03) + (0.8 if is_late else 0.0)

    def floor_s(self, seed: int, num_steps: int) -> float:
        """Returns how long so many steps of all ranks take where nobody ever waits.

        Ranks share the steps by their speeds, and messages take no time.
        """
        own = [
            sum(self.step_s(seed, step, rank) for step in range(num_steps))
            for rank in range(self.ranks)
        ]
        return statistics.harmonic_mean(own)


SITUATIONS: Final = {
    "slow-link": Situation("an all-reduce takes as long as 3 steps", allreduce_s=3.0),
    "slow-rank": Situation("one rank takes twice as long for every step", slow=2.0),
    "heavy-tail": Situation("steps of random duration, a few 8 s long", heavy_tail=True),
    "random": Situation("2 of 8 random ranks are 80% of a step late in every step", late=2),
    "random-16": Situation(
        "4 of 16 random ranks are 80% of a step late in every step", ranks=16, late=4
    ),
}
"""The situations by name."""
