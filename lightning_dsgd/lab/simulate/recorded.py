"""Step times of a real run, drawn again for a simulated one.

A window of the record is played as it was, from a random step on, and from the first step again
after the last.  So step times stay correlated in time, and across ranks, as they were.  More ranks
than were recorded are played by further copies of all ranks, from other steps on: what is common to
ranks stays common to those of a copy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """Holds what each rank computed in each step.

    Args:
        seconds: [rank][step]
    """

    seconds: tuple[tuple[float, ...], ...]

    def step_times(self, world_size: int, num_steps: int, seed: int) -> list[list[float]]:
        """Returns what each rank computes in each step, in seconds: [rank][step]."""
        source, recorded_steps = random.Random(f"recorded/{seed}"), len(self.seconds[0])
        times: list[list[float]] = []
        while len(times) < world_size:
            begin = source.randrange(recorded_steps)
            for of_rank in self.seconds[: world_size - len(times)]:
                window = [of_rank[(begin + step) % recorded_steps] for step in range(num_steps)]
                times.append(window)
        return times
