"""Step times of a real run, as `StepTrace` has recorded them, drawn again for a simulated one.

A window of the record is played as it was, from a random step on, and from the first step again
after the last.  So step times stay correlated in time, and across ranks, as they were.  More ranks
than were recorded are played by further copies of all ranks, from other steps on: what is common to
ranks stays common to those of a copy.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_dsgd.lab.timeline.trace import missing_ranks, read_folder

LEAST_STEPS: Final = 5
"""The least steps of every rank; the first, which warms up, is left out."""
_SLOW: Final = 1.3
"""A rank is slow if its mean step is so many times the median of the ranks' means."""


@dataclass(frozen=True)
class Recorded:
    """Holds what each rank computed in each step.

    Args:
        seconds: [rank][step]
        num_params: parameters of the model; None where the trace does not say
        strategy: the strategy with which it was recorded
        epoch_steps: the steps of each rank in an epoch; None where the trace does not say
    """

    seconds: tuple[tuple[float, ...], ...]
    num_params: int | None = None
    strategy: str = ""
    epoch_steps: int | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks that were recorded."""
        return len(self.seconds)

    @property
    def num_steps(self) -> int:
        """The number of steps of each rank."""
        return len(self.seconds[0])

    @property
    def mean_s(self) -> float:
        """The mean over ranks and steps."""
        return statistics.mean(map(statistics.mean, self.seconds))

    @property
    def speeds(self) -> list[float]:
        """Each rank's rate of steps, over the mean of all ranks' rates, if no rank waits."""
        rates = [1 / statistics.mean(of_rank) for of_rank in self.seconds]
        return [rate / statistics.mean(rates) for rate in rates]

    @property
    def slow_ranks(self) -> list[int]:
        """The ranks that are always slower."""
        median = statistics.median(1 / speed for speed in self.speeds)
        return [rank for rank, speed in enumerate(self.speeds) if 1 / speed > _SLOW * median]

    def epoch_steps_of(self, world_size: int) -> int | None:
        """Returns the steps of each rank in an epoch of as many samples, on so many ranks."""
        if self.epoch_steps is None:
            return None
        return max(1, round(self.epoch_steps * self.num_ranks / world_size))

    def step_times(self, world_size: int, num_steps: int, seed: int) -> list[list[float]]:
        """Returns what each rank computes in each step, in seconds: [rank][step]."""
        source = random.Random(f"recorded/{seed}")
        times: list[list[float]] = []
        while len(times) < world_size:
            begin = source.randrange(self.num_steps)
            for of_rank in self.seconds[: world_size - len(times)]:
                window = [of_rank[(begin + step) % self.num_steps] for step in range(num_steps)]
                times.append(window)
        return times

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """Reads the files of `StepTrace` in this folder.

        Raises:
            ValueError: if waits were not recorded, and so cannot be told from computation
        """
        traces = read_folder(folder)
        if any(trace.about.get("waits") == "not seen" for trace in traces):
            raise ValueError(
                f"the trace in {folder} must tell waits from computation, got one of "
                f"strategy {traces[0].about.get('strategy')!r}, which does not; record a short run "
                'with strategy="allreduce" or "no_sync"'
            )
        absent = missing_ranks(traces)
        if absent:
            raise ValueError(
                f"the trace in {folder} must have a file of every rank, got none of ranks "
                f"{', '.join(map(str, absent))}; copy them there"
            )
        common = min(len(trace.steps) for trace in traces)
        if common < LEAST_STEPS:
            raise ValueError(
                f"the trace in {folder} must have {LEAST_STEPS} steps of every rank, got {common}; "
                "train for longer"
            )
        seconds = tuple(tuple(s.own_s for s in trace.steps[1:common]) for trace in traces)
        about = traces[0].about
        num_params, epoch_steps = (about.get(name) for name in ("parameters", "epoch_steps"))
        return cls(
            seconds,
            int(num_params) if num_params else None,
            str(about.get("strategy", "")),
            int(epoch_steps) if epoch_steps else None,
        )
