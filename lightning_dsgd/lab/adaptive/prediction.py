"""When training would end with each candidate, from what all ranks have seen.

It is what the simulation of `lightning-dsgd advise` comes to, without the simulation, which would
hold up a training for seconds.

    all-reduce     every step waits for the slowest rank, and for what of the sum is not hidden
    every step     a rank waits for its group's sum, if it does not travel meanwhile
    every period   all wait for whom takes longest for so many steps
    an epoch       ends with the rank that takes longest, or, claimed, once all have worked as long

Legend: P ranks, S ranks in a group.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.lab.adaptive import own_rate
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.candidates import BASELINE
from lightning_dsgd.lab.simulate.model import BACKWARD
from lightning_dsgd.lab.simulate.recorded import Recorded

HOME: Final = "allreduce:overlap=true"
ROUNDED: Final = "allreduce:wire_dtype=int8:overlap=true"
LONG_EPOCH: Final = 100
"""Stands for the steps of an epoch whose length is not known."""
_SHARE_OF_INT8: Final = 1 / 3.88
_SLOW: Final = 1.3


def home_of(*, overlaps: bool, is_small: bool) -> str:
    """Returns the all-reduce that is begun with: in pieces, where these are worth it."""
    return HOME if overlaps and not is_small else BASELINE


@dataclass(frozen=True)
class Seen:
    """Holds what all ranks have seen together, the same on each.

    Args:
        own_s: what each rank computed in each of its last steps: [rank][step]
        sum_s: how long a sum of all weights takes
        epoch_steps: the steps of each rank in an epoch; 0: not known
        made_s: what a step of the job took with what is in force, waits included; 0: not measured
        change_s: what the last change cost; 0: there was none
        look_s: how long the last look took; 0: it is the first
        claims: whether ranks claim their batches
        averages: whether weights may be averaged; not so with Adam and the like
        overlaps: whether pieces of a gradient may travel during the backward pass
        is_small: whether such pieces are so small that sending them may take longer than it hides
    """

    own_s: tuple[tuple[float, ...], ...]
    sum_s: float
    epoch_steps: int = 0
    made_s: float = 0.0
    change_s: float = 0.0
    look_s: float = 0.0
    claims: bool = False
    averages: bool = True
    overlaps: bool = True
    is_small: bool = False

    @property
    def home(self) -> str:
        """The all-reduce that is begun with, and gone back to."""
        return home_of(overlaps=self.overlaps, is_small=self.is_small)

    @property
    def candidates(self) -> list[str]:
        """What may be chosen, as on the command line; all-reduce first."""
        specs = [self.home, ROUNDED if self.overlaps else "allreduce:wire_dtype=int8"]
        if self.overlaps and self.home != HOME:
            specs.append(HOME)
        if self.averages:
            size = f"group_size={min(len(self.own_s), 8)}"
            specs += [own_rate.WIDE.replace("group_size=8", size), "wagma:overlap=true"]
            specs += ["wagma", "wagma:sync_period=10", "hpsgd"]
        return specs

    @property
    def home_s(self) -> float:
        """What a step takes with all-reduce."""
        return self.step_s(self.home)

    @property
    def floor_s(self) -> float:
        """What a step of the job would take if nobody waited within an epoch."""
        return self._until_all_are_done([statistics.fmean(own) for own in self.own_s])

    def step_s(self, spec: str) -> float:
        """Returns what a step of the job takes with a choice."""
        algorithm, num_ranks = make_algorithm(spec), len(self.own_s)
        if isinstance(algorithm, AllReduce):
            slowest = [max(of_step) for of_step in zip(*self.own_s, strict=True)]
            sum_s = self.sum_s * (_SHARE_OF_INT8 if algorithm.wire_dtype == "int8" else 1.0)
            hidden_s = BACKWARD * min(slowest) if algorithm.overlap else 0.0
            return statistics.fmean(slowest) + max(0.0, sum_s - hidden_s)
        sum_s, period = 0.0, 0  # what travels beside the training holds up nobody
        if isinstance(algorithm, WAGMA) and not algorithm.overlap:
            size = algorithm.group_size or algorithm.usual_size(num_ranks)
            sum_s = self.sum_s * (size - 1) / size / ((num_ranks - 1) / num_ranks)
            period = algorithm.period
        done_s = self._until_all_are_done([sum_s + statistics.fmean(own) for own in self.own_s])
        if not 0 < period < len(self.own_s[0]):
            return done_s
        begins = range(0, len(self.own_s[0]), period)
        blocks = [[sum(own[begin : begin + period]) for begin in begins] for own in self.own_s]
        together = sum(max(of_block) for of_block in zip(*blocks, strict=True))
        return float(max(done_s, sum_s + together / len(self.own_s[0])))

    def _until_all_are_done(self, means: Sequence[float]) -> float:
        """Returns the time of an epoch over its steps, from the ranks' own times of a step."""
        if not self.claims:
            return max(means)
        last = max(map(max, self.own_s)) / 2  # an epoch ends with somebody's last step
        return float(statistics.harmonic_mean(means) + last / (self.epoch_steps or LONG_EPOCH))


class _Window(Recorded):
    """Holds step times of a short window, where a mean is no sure sign of a slow rank."""

    @property
    def slow_ranks(self) -> list[int]:
        """The ranks that are slower in three of four of their steps."""
        least = [statistics.quantiles(of_rank, n=4)[0] for of_rank in self.seconds]
        limit = _SLOW * statistics.median(least)
        return [rank for rank, seconds in enumerate(least) if seconds > limit]


def predicted(seen: Seen) -> tuple[str, dict[str, float]]:
    """Returns the measured situation that is most like, and each candidate's time over home's."""
    window = _Window(seen.own_s)
    situation = accuracy.most_like(window, seen.sum_s, window.num_ranks)
    return situation, {spec: seen.step_s(spec) / seen.home_s for spec in seen.candidates}
