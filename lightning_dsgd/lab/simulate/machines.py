"""A machine and what trains on it: the figures that a simulation starts from."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lightning_dsgd.lab.simulate.processors import Costs


def delayed_ranks(seed: int, step: int, world_size: int, num_ranks: int) -> list[int]:
    """Draws the ranks that are late in a step, the same on every rank and in the simulation."""
    return random.Random(f"{seed}/{step}").sample(range(world_size), num_ranks)


@dataclass(frozen=True)
class Spread:
    """Draws step times of `least_s` plus a log-normal rest, cut off at `most_s`."""

    least_s: float
    median_s: float
    sigma: float
    most_s: float = math.inf

    def draw(self, source: random.Random) -> float:
        """Draws one step time."""
        rest = (self.median_s - self.least_s) * source.lognormvariate(0.0, self.sigma)
        return min(self.least_s + rest, self.most_s)


@dataclass(frozen=True)
class Recorded:
    """Holds what each rank computed in each step of a real run, drawn again for a simulated one.

    A window of the record is played as it was, from a random step on, and from the first step again
    after the last.  So step times stay correlated in time, and across ranks, as they were.  More
    ranks than were recorded are played by further copies of all ranks, from other steps on: what is
    common to ranks stays common to those of a copy.

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


@dataclass(frozen=True)
class Machine:
    """Describes a machine, and the training that runs on it.

    Args:
        latency_s: the latency of a message
        bandwidth_bytes_s: the rate of each rank's link, in each direction
        compute_s: the computation of a step, without communication
        num_params: parameters of the model, in fp32
        shared_link: whether all ranks share one link
        spread: distribution of the step times, in place of `compute_s`
        delay_s: how long a delayed rank is late
        delayed_ranks: how many random ranks are delayed in each step
        devices: more ranks than this share the devices, and compute that much slower
        exact_topk_s: time of an exact top-k per element
        threshold_s: time to select by a known threshold, per element
        step_core_s: what a step takes of a core besides `compute_s` and communication
        recorded: step times of a real run, in place of `compute_s`
        costs: what communication takes of the cores that ranks share; None: nothing
    """

    latency_s: float
    bandwidth_bytes_s: float
    compute_s: float
    num_params: int
    shared_link: bool = False
    spread: Spread | None = None
    delay_s: float = 0.0
    delayed_ranks: int = 0
    devices: int | None = None
    exact_topk_s: float = 0.0
    threshold_s: float = 0.0
    step_core_s: float = 0.0
    recorded: Recorded | None = None
    costs: Costs | None = None

    def step_times(self, world_size: int, num_steps: int, seed: int) -> list[list[float]]:
        """Returns what each rank computes in each step, in seconds: [rank][step].

        The delayed ranks are those that `StragglerInjector` draws with the same seed.
        """
        if not self.delay_s >= 0:
            raise ValueError(
                f"delay_s must not be negative, got delay_s={self.delay_s}; try delay_s=0.3"
            )
        if not 0 <= self.delayed_ranks <= world_size:
            raise ValueError(
                "delayed_ranks must be at least 0 and at most the number of ranks, got "
                f"delayed_ranks={self.delayed_ranks} with {world_size} ranks; try delayed_ranks=1"
            )
        delayed = [
            delayed_ranks(seed, step, world_size, self.delayed_ranks) for step in range(num_steps)
        ]
        slower = max(1.0, world_size / self.devices) if self.devices else 1.0
        if self.recorded is not None:
            times = self.recorded.step_times(world_size, num_steps, seed)
            return [
                [s + self.delay_s * (rank in delayed[step]) for step, s in enumerate(of_rank)]
                for rank, of_rank in enumerate(times)
            ]
        times = []
        for rank in range(world_size):
            source = random.Random(f"compute/{seed}/{rank}")
            times.append(
                [
                    slower * self._compute(source) + self.delay_s * (rank in delayed[step])
                    for step in range(num_steps)
                ]
            )
        return times

    def _compute(self, source: random.Random) -> float:
        return self.compute_s if self.spread is None else self.spread.draw(source)
