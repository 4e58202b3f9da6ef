"""Simulates the candidates, and ranks them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.recorded import Recorded

CLOSE: Final = 0.03
"""Predictions that differ by less are taken as equal, and measured quality decides."""
_SPARSE_WORK: Final = 8000
"""The most steps times ranks times ranks that are simulated of a sparse strategy."""
_LEAST_STEPS: Final = 6
_BYTES: Final = 4


@dataclass(frozen=True)
class Row:
    """Ranks a candidate on the machine in question.

    Args:
        candidate: the strategy
        slowest_steps_per_s: the slowest rank's rate, which sets the time if all owe as many steps
        share: the rate over the bound's, which knows no communication
        slowest_ratio: the rate over all-reduce's
        mean_ratio: the same for the mean of the ranks' steps per second
        mb_sent: what a rank sends in a step
        mb_memory: what a rank needs more at its peak
        cost: the cost in accuracy, in the situation that is most like this; None: not measured
    """

    candidate: Candidate
    slowest_steps_per_s: float
    share: float
    slowest_ratio: float
    mean_ratio: float
    mb_sent: float
    mb_memory: float
    cost: Cost | None


@dataclass(frozen=True)
class Ranking:
    """Ranks all candidates, the fastest first.

    Args:
        rows: the candidates
        situation: the measured situation that is most like this run
        refused: candidates that cannot run here, and why
        slow_ranks: the speeds of ranks that are always slower, over the mean of all ranks' speeds
        dealt_by_speed: the least time of training over all-reduce's, if batches follow the speeds
    """

    rows: list[Row]
    situation: str
    refused: dict[str, str]
    slow_ranks: dict[int, float] = field(default_factory=dict)
    dealt_by_speed: float = 1.0

    def of(self, spec: str) -> Row:
        """Returns the row of this candidate."""
        return next(row for row in self.rows if row.candidate.spec == spec)

    @property
    def advised(self) -> Row:
        """The row that was soonest at 99% of the accuracy, of those as fast as the fastest.

        Strategies whose accuracy was not measured, and the bound, are not advised.
        """
        return self._soonest_of_fastest(lambda row: row.slowest_ratio)

    @property
    def advised_if_dealt(self) -> Row:
        """The advised row where each rank's number of batches follows its speed."""
        return self._soonest_of_fastest(lambda row: row.mean_ratio)

    def _soonest_of_fastest(self, rate: Callable[[Row], float]) -> Row:
        known = [r for r in self.rows if r.cost is not None and r.candidate.spec != BOUND]
        fastest = max(map(rate, known))
        close = [row for row in known if rate(row) >= (1 - CLOSE) * fastest]
        return min(close, key=_lateness_of_quality)


def _lateness_of_quality(row: Row) -> tuple[float, float]:
    assert row.cost is not None
    return (math.inf if row.cost.time is None else row.cost.time), -row.cost.points


def rank(
    candidates: Sequence[Candidate],
    machine: Machine,
    num_ranks: int,
    num_steps: int,
    shown: Callable[[Iterable[Candidate]], Iterable[Candidate]] = iter,
    epoch_steps: int | None = None,
) -> Ranking:
    """Simulates every candidate, and ranks them.

    Args:
        candidates: the candidates; the bound and the baseline must be among them
        machine: the machine to simulate, with recorded step times
        num_ranks: P
        num_steps: steps of each rank; a sparse strategy on many ranks makes fewer
        shown: goes through the candidates, and shows how far the simulation is
        epoch_steps: the steps of an epoch, after which all ranks stand still; None: never
    """
    assert machine.recorded is not None
    runs: dict[str, tuple[Candidate, float, float, float]] = {}
    refused: dict[str, str] = {}
    bound = 0.0
    for candidate in shown(candidates):
        steps = num_steps
        if candidate.is_sparse:
            steps = min(num_steps, max(_LEAST_STEPS, _SPARSE_WORK // num_ranks**2))
        try:
            done = run(candidate.spec, num_ranks, machine, steps, epoch_steps=epoch_steps)
        except ValueError as error:
            refused[candidate.spec] = str(error)
            continue
        # With fewer steps, the share is taken from the bound of just these.
        share = float(done.compute_s.sum(1).max() / done.done_s[:, -1].max())
        if candidate.spec == BOUND:
            bound = done.slowest_steps_per_s
        mean_share = done.steps_per_s / done.ideal_steps_per_s
        runs[candidate.spec] = candidate, share, mean_share, done.bytes_sent
    _, baseline, mean_baseline, _ = runs[BASELINE]
    allreduce_s = 1 / (baseline * bound) - 1 / bound
    late_s = _lateness(machine.recorded, num_ranks, num_steps, bound)
    situation = accuracy.most_like(machine.recorded, allreduce_s - late_s, num_ranks)
    rows = [
        Row(
            candidate,
            share * bound,
            share,
            share / baseline,
            mean_share / mean_baseline,
            sent / 1e6,
            candidate.copies * machine.num_params * _BYTES / 1e6,
            accuracy.cost(spec, situation),
        )
        for spec, (candidate, share, mean_share, sent) in runs.items()
    ]
    return Ranking(
        sorted(rows, key=lambda row: -row.slowest_steps_per_s),
        situation,
        refused,
        {rank: machine.recorded.speeds[rank] for rank in machine.recorded.slow_ranks},
        baseline * bound * _dealt_step_s(machine.recorded),
    )


def _dealt_step_s(recorded: Recorded) -> float:
    """Returns a mean rank's step time, if no rank waits: the harmonic mean of the ranks' times."""
    return statistics.harmonic_mean(map(statistics.mean, recorded.seconds))


def _lateness(recorded: Recorded, num_ranks: int, num_steps: int, bound: float) -> float:
    """Returns how much longer a step takes if everyone waits for the slowest in every step."""
    times = recorded.step_times(num_ranks, num_steps, seed=0)
    slowest = math.fsum(max(of_step) for of_step in zip(*times, strict=True))
    return max(0.0, slowest / num_steps - 1 / bound)
