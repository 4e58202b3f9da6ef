"""Simulates the candidates, and ranks them by when training ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate, with_claims
from lightning_dsgd.lab.decisions import Choice, Situation
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import Run, run
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
        candidate: the strategy, and how batches are dealt
        end_share: the time until training ends, over all-reduce's
        job_steps_per_s: steps of the job: as many batches as there are ranks, on whichever rank
        mb_sent: what a rank sends in a step
        mb_memory: what a rank needs more at its peak
        cost: the cost in accuracy, in the situation that is most like this; None: not measured
    """

    candidate: Candidate
    end_share: float
    job_steps_per_s: float
    mb_sent: float
    mb_memory: float
    cost: Cost | None

    @property
    def label(self) -> str:
        """What the row is called."""
        return self.candidate.label

    @property
    def is_strategy(self) -> bool:
        """Whether it is to be chosen from: neither the bound nor the baseline."""
        return self.candidate.spec not in (BOUND, BASELINE)

    @property
    def is_as_good(self) -> bool:
        """Whether it was measured, and no later than all-reduce at 99% of its accuracy."""
        return self.cost is not None and self.cost.is_as_good


@dataclass(frozen=True)
class Ranking:
    """Ranks all candidates, what ends soonest first.

    Args:
        rows: the candidates
        situation: the measured situation that is most like this run
        refused: candidates that cannot run here, and why
        slow_ranks: the speeds of ranks that are always slower, over the mean of all ranks' speeds
        epoch_steps: the steps of an epoch; None: one endless epoch
    """

    rows: list[Row]
    situation: str
    refused: dict[str, str]
    slow_ranks: dict[int, float] = field(default_factory=dict)
    epoch_steps: int | None = None

    def of(self, label: str) -> Row:
        """Returns the row with this label."""
        return next(row for row in self.rows if row.label == label)

    @property
    def advised(self) -> Row:
        """The row with which training ends soonest, of those that were measured to be as good.

        Of rows that end at the same time, the one that `decisions` prefers, or else the one that
        was sooner at 99% of the accuracy.  It is all-reduce's own row unless that ends clearly
        later.
        """
        good = [row for row in self.rows if row.is_strategy and row.is_as_good]
        baseline = self.of(BASELINE)
        soonest = min((row.end_share for row in good), default=baseline.end_share)
        if soonest > (1 - CLOSE) * baseline.end_share:
            return baseline
        alike = [row for row in good if row.end_share * (1 - CLOSE) <= soonest]
        for choice in self.decided.choices:
            if row := self.row_of(choice, alike):
                return row
        return min(alike, key=_quality_s)

    @property
    def decided(self) -> Situation:
        """What `decisions` says of the measured situation."""
        return decisions.measured_as(self.situation)

    def row_of(self, choice: Choice, rows: Sequence[Row]) -> Row | None:
        """Returns the row of a choice, if there is one; in an endless epoch nothing is claimed."""
        data = EQUAL if self.epoch_steps is None else choice.data
        sought = Candidate(choice.strategy, data)
        return next((row for row in rows if row.candidate == sought), None)

    @property
    def sooner(self) -> Row | None:
        """The row that ends clearly sooner than the advised one, but was not as good, if any."""
        worse = [row for row in self.rows if row.is_strategy and row.cost and not row.is_as_good]
        limit = (1 - CLOSE) * self.advised.end_share
        return next((row for row in worse if row.end_share < limit), None)

    @property
    def claims(self) -> Row | None:
        """The row with claimed batches that ends soonest; those that were as good go first."""
        claimed = [r for r in self.rows if r.is_strategy and r.candidate.data == CLAIMED]
        return min(claimed, key=lambda row: (not row.is_as_good, row.end_share), default=None)


def _quality_s(row: Row) -> float:
    assert row.cost is not None
    return row.cost.time


def rank(
    candidates: Sequence[Candidate],
    machine: Machine,
    num_ranks: int,
    num_steps: int,
    shown: Callable[[Iterable[Candidate]], Iterable[Candidate]] = iter,
    epoch_steps: int | None = None,
    *,
    on_device: bool = False,
) -> Ranking:
    """Simulates every candidate, and ranks them.

    Args:
        candidates: the candidates; the bound and the baseline must be among them
        machine: the machine to simulate, with recorded step times
        num_ranks: P
        num_steps: steps of the job; a sparse strategy on many ranks makes fewer
        shown: goes through the candidates, and shows how far the simulation is
        epoch_steps: the steps of an epoch, after which all ranks stand still; then each candidate
            whose ranks can claim batches is simulated with claims too.  None: one endless epoch,
            where each rank makes all its steps
        on_device: whether ranks train on a device
    """
    assert machine.recorded is not None

    def simulated(candidate: Candidate, steps: int) -> Run:
        return run(
            candidate.spec,
            num_ranks,
            machine,
            steps,
            epoch_steps=epoch_steps,
            data=candidate.data,
        )

    if epoch_steps is not None:
        candidates = with_claims(candidates)
    of_fewer = max(_LEAST_STEPS, _SPARSE_WORK // num_ranks**2)
    runs: dict[Candidate, tuple[Run, int]] = {}
    refused: dict[str, str] = {}
    for candidate in shown(candidates):
        steps = min(num_steps, of_fewer) if candidate.is_sparse else num_steps
        try:
            runs[candidate] = simulated(candidate, steps), steps
        except ValueError as error:
            refused[candidate.label] = str(error)
    baseline = next(candidate for candidate in runs if candidate.spec == BASELINE)
    # What makes fewer steps is compared with an all-reduce that makes as many.
    bases = {num_steps: runs[baseline][0]}
    for steps in {steps for _, steps in runs.values()} - {num_steps}:
        bases[steps] = simulated(baseline, steps)
    rate = bases[num_steps].slowest_steps_per_s
    slowest_s = _slowest_s(machine.recorded, num_ranks, num_steps)
    situation = accuracy.most_like(machine.recorded, 1 / rate - slowest_s, num_ranks)
    rows = []
    for candidate, (done, steps) in runs.items():
        share = bases[steps].slowest_steps_per_s / done.slowest_steps_per_s
        is_claimed = candidate.data == CLAIMED
        copies = make_algorithm(candidate.spec).num_copies(
            num_ranks, is_claimed=is_claimed, on_device=on_device
        )
        rows.append(
            Row(
                candidate,
                share,
                rate / share,
                done.bytes_sent / 1e6,
                copies * machine.num_params * _BYTES / 1e6,
                accuracy.cost(candidate.label, situation),
            )
        )
    slow_ranks = {rank: machine.recorded.speeds[rank] for rank in machine.recorded.slow_ranks}
    rows.sort(key=lambda row: row.end_share)
    return Ranking(rows, situation, refused, slow_ranks, epoch_steps)


def _slowest_s(recorded: Recorded, num_ranks: int, num_steps: int) -> float:
    """Returns how long a step takes if all wait for the slowest rank in every step."""
    times = recorded.step_times(num_ranks, num_steps, seed=0)
    return statistics.fmean(max(of_step) for of_step in zip(*times, strict=True))
