"""Runs what was advised, here, beside what is predicted for just that.

Each step is a sleep as long as the recorded one, so that many ranks fit on few cores, and every
strategy meets the same steps; all of them take turns.  A step takes more than its sleep and its
communication, as `no_sync` shows.  What it takes of a core is part of every prediction, so that
ranks and their lanes compete for cores; the rest of what `no_sync` takes longer is added.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate
from lightning_dsgd.lab.advise.ranking import Ranking
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.jobs.cells import in_turn
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.network import demanded
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run

STEPS: Final = 20
ROUNDS: Final = 3
MOST: Final = 3
_CLAIMED: Final = f":data={CLAIMED}"


def specs_of(ranking: Ranking) -> list[str]:
    """Returns the bound, all-reduce, the advised strategy, and what ends soonest besides.

    They are written as `benchmarks throughput` takes them: `popsgd:data=claimed`.
    """
    first = [row.candidate for row in (ranking.advised, *ranking.rows) if row.is_strategy]
    return [BOUND, BASELINE, *dict.fromkeys(map(spec_of, first[: 1 + MOST]))][: 2 + MOST]


def spec_of(candidate: Candidate) -> str:
    """Returns a candidate as `benchmarks throughput` takes it."""
    return candidate.spec + (_CLAIMED if candidate.data == CLAIMED else "")


def verify(
    ranking: Ranking, machine: Machine, num_ranks: int, network: str | None
) -> list[dict[str, Any]]:
    """Returns measured and predicted steps per second of the job, until the last rank is done."""
    link = demanded(network)
    specs = specs_of(ranking)
    measured, core_s = measure(specs, machine, num_ranks, link)
    return compare(specs, machine, num_ranks, measured, core_s)


def measure(
    specs: Sequence[str],
    machine: Machine,
    num_ranks: int,
    link: Link | None,
    rounds: int = ROUNDS,
    kept: Path | None = None,
) -> tuple[dict[str, list[float]], float]:
    """Returns each strategy's steps per second, by round, and the core's time in a `BOUND` step.

    Args:
        specs: the strategies
        machine: holds the steps to replay
        num_ranks: P
        link: what lies between the ranks; None: nothing
        rounds: how often each strategy has its turn
        kept: beside this file lies what is measured, for a run that is begun again; None: nowhere
    """
    assert machine.recorded is not None
    times = [machine.recorded.step_times(num_ranks, STEPS, seed) for seed in range(rounds)]
    settings = {"ranks": num_ranks, "params": machine.num_params, "steps": STEPS, "times": times}
    job = Job("lightning_dsgd.lab.advise.verify_cell:run", settings, num_ranks, link)
    measured: dict[str, list[float]] = {}
    core_s = []
    with tempfile.TemporaryDirectory() as folder:
        output = kept or Path(folder, "verify.json")
        for result in job.run(in_turn(specs, "round", rounds), output):
            slowest_s = max(rank["seconds"] for rank in result["ranks"])
            measured.setdefault(result["strategy"], []).append(STEPS / slowest_s)
            if result["strategy"] == BOUND:
                core_s += [rank["core_s"] / STEPS for rank in result["ranks"]]
    return measured, statistics.mean(core_s)


def compare(
    specs: Sequence[str],
    machine: Machine,
    num_ranks: int,
    measured: dict[str, list[float]],
    core_s: float,
) -> list[dict[str, Any]]:
    """Returns one row for each strategy: medians over the rounds."""
    here = replace(machine, machine_size=max(machine.machine_size, num_ranks), step_core_s=core_s)
    rounds = range(len(measured[BOUND]))

    def predicted(spec: str, besides_s: float) -> float:
        data = CLAIMED if spec.endswith(_CLAIMED) else EQUAL
        one = partial(run, spec.removesuffix(_CLAIMED), num_ranks, here, STEPS)
        runs = (one(seed, epoch_steps=STEPS, data=data) for seed in rounds)
        return statistics.median(1 / (1 / each.slowest_steps_per_s + besides_s) for each in runs)

    besides_s = max(0.0, 1 / statistics.median(measured[BOUND]) - 1 / predicted(BOUND, 0.0))
    rows = []
    for spec in specs:
        rate = statistics.median(measured[spec])
        expected = predicted(spec, besides_s)
        rows.append(
            {
                "strategy": spec,
                "measured": rate,
                "predicted": expected,
                "ratio": expected / rate,
                "besides_s": besides_s,
                "step_core_s": core_s,
                "rounds": measured[spec],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table of predicted beside measured rates."""
    width = max(len(row["strategy"]) for row in rows) + 2
    lines = [
        "steps/s of the job:",
        f"{'strategy':{width}}{'measured':>17}{'predicted':>11}{'ratio':>7}",
    ]
    for row in rows:
        lines.append(
            f"{row['strategy']:{width}}{row['measured']:>17.3f}{row['predicted']:>11.3f}"
            f"{row['ratio']:>7.2f}"
        )
    core_ms, besides_ms = (1e3 * rows[0][name] for name in ("step_core_s", "besides_s"))
    lines.append(
        f"in every predicted step, as {BOUND} shows it: {core_ms:.1f} ms of a core, and "
        f"{besides_ms:.1f} ms"
    )
    return "\n".join(lines)
