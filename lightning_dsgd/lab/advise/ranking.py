"""Simulates the candidates, and ranks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.recorded import Recorded

CLOSE: Final = 0.03
"""Predictions that differ by less are taken for equal, and measured quality decides."""
_SPARSE_WORK: Final = 8000
"""Of a sparse strategy so many steps times ranks times ranks are simulated."""
_LEAST_STEPS: Final = 6
_BYTES: Final = 4


@dataclass(frozen=True)
class Row:
    """A candidate on the machine in question.

    Args:
        candidate: what it is
        steps_per_s: until the slowest rank has done its steps
        share: of the bound: what there is without communication
        ratio: to all-reduce
        mb_sent: by a rank in a step
        mb_memory: that a rank needs more
        cost: in accuracy, in the situation that is most like this; None: not measured
    """

    candidate: Candidate
    steps_per_s: float
    share: float
    ratio: float
    mb_sent: float
    mb_memory: float
    cost: Cost | None


@dataclass(frozen=True)
class Ranking:
    """All candidates, the fastest first.

    Args:
        rows: the candidates
        situation: the measured one that is most like this run
        refused: candidates that cannot run here, and why
    """

    rows: list[Row]
    situation: str
    refused: dict[str, str]

    def of(self, spec: str) -> Row:
        """The row of this candidate."""
        return next(row for row in self.rows if row.candidate.spec == spec)

    @property
    def advised(self) -> Row:
        """Of those as fast as the fastest, the one that was soonest at 99% of the accuracy.

        Strategies whose accuracy was not measured, and the bound, are not advised.
        """
        known = [r for r in self.rows if r.cost is not None and r.candidate.spec != BOUND]
        fastest = max(row.steps_per_s for row in known)
        close = [row for row in known if row.steps_per_s >= (1 - CLOSE) * fastest]
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
) -> Ranking:
    """Simulates every candidate.

    Args:
        candidates: which; the bound and the baseline must be among them
        machine: on what, with recorded step times
        num_ranks: P
        num_steps: of each rank; fewer of a sparse strategy on many ranks
        shown: goes through the candidates, and shows how far it is
    """
    assert machine.recorded is not None
    rates: dict[str, tuple[Candidate, float, float]] = {}
    refused: dict[str, str] = {}
    bound = 0.0
    for candidate in shown(candidates):
        steps = num_steps
        if candidate.is_sparse:
            steps = min(num_steps, max(_LEAST_STEPS, _SPARSE_WORK // num_ranks**2))
        try:
            done = run(candidate.spec, num_ranks, machine, steps)
        except ValueError as error:
            refused[candidate.spec] = str(error)
            continue
        # Of fewer steps: what share of the bound of just these.
        share = float(done.compute_s.sum(1).max() / done.done_s[:, -1].max())
        if candidate.spec == BOUND:
            bound = done.slowest_steps_per_s
        rates[candidate.spec] = candidate, share, done.bytes_sent
    allreduce_s = 1 / (rates[BASELINE][1] * bound) - 1 / bound
    late_s = _lateness(machine.recorded, num_ranks, num_steps, bound)
    situation = accuracy.most_like(machine.recorded, allreduce_s - late_s, num_ranks)
    baseline = rates[BASELINE][1]
    rows = [
        Row(
            candidate,
            share * bound,
            share,
            share / baseline,
            sent / 1e6,
            candidate.copies * machine.num_params * _BYTES / 1e6,
            accuracy.cost(spec, situation),
        )
        for spec, (candidate, share, sent) in rates.items()
    ]
    return Ranking(sorted(rows, key=lambda row: -row.steps_per_s), situation, refused)


def _lateness(recorded: Recorded, num_ranks: int, num_steps: int, bound: float) -> float:
    """What a step takes longer if everyone waits for the slowest in every step."""
    times = recorded.step_times(num_ranks, num_steps, seed=0)
    slowest = math.fsum(max(of_step) for of_step in zip(*times, strict=True))
    return max(0.0, slowest / num_steps - 1 / bound)
