r"""How soon is a model as good as with all-reduce?

    python -m benchmarks target --task digits --strategies allreduce,wagma,popsgd \
        --epoch-steps 30 --data equal,claimed --output FILE.json

Ranks of the simulated world compute real gradients of a small network; time and network are
virtual, so the result does not depend on this machine.  A step takes 1 s of virtual time.  Each
strategy trains in each situation with each learning rate and seed.  Its best learning rate there is
the one with the best final quality, mean over --tuning-seeds, which are not reported; the same rule
holds for all-reduce.

Situations: slow-link (an all-reduce takes 3 steps), slow-rank (one of 8 ranks takes twice as long),
heavy-tail (steps of random duration), random (2 of 8 random ranks are 80% of a step late),
random-16 (4 of 16).

By default training is one endless epoch: no rank stands still before the end.  With --epoch-steps
30 all ranks stand still after every 30 steps, as Lightning does, and validate for a second.  Each
rank owes as many batches (--data equal), or takes the next one of the epoch while there is one
(--data claimed, for strategies whose ranks do not step together).

The target is 99% of all-reduce's final quality with the same seed, or all of it.  A loss reaches
99% of the quality at 1/0.99 of the loss.  --baseline has another strategy in all-reduce's place.
The tables have, for each situation:

    37 s (0.38 [0.31, 0.44])   seconds, mean over the seeds; relative to all-reduce's own time,
                               geometric mean, with 95% of the means of seeds that are drawn again
    2 of 3                     how many seeds reached the target, if not all did
    1.5x                       how many times the steps of --steps it trained for, if not once

A target counts when it holds for three looks in a row.  A seed that does not reach it counts as the
time limit: when the strategy or all-reduce ends, whichever is later.

With --stretch 0.5,1,2 each strategy also trains for half and twice the steps, with the schedule of
its learning rate over all of them; what most tuning seeds reach the target with counts, of those
the soonest, of all-reduce too.  The target stays all-reduce's quality after --steps.

The last table has the final quality above all-reduce's, the steps/s of the job (as many batches as
there are ranks, on whichever rank), and the learning rate; * marks one at an edge of the grid.  A
run that was interrupted continues if the same command is given again.  With --jobs 4, four cells
are computed at a time; the result is the same.

With --real-ms 200 each rank is a process and each link is emulated between network namespaces; a
step takes 200 ms, and is a second of the tables.  Computation is a sleep, so many ranks fit on few
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.situations import SITUATIONS, Situation
from benchmarks.compare.target_tables import tables
from lightning_dsgd.lab import epochs
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured, take_core
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.network import why_not
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.results import provenance, typed
from lightning_dsgd.lab.target_rows import BASELINE, Chosen, curves, label, summarize

STRATEGIES: Final = (
    "allreduce,allreduce:wire_dtype=int8:overlap=true,allreduce:wire_dtype=int8:delay=1,"
    "local_sgd:sync_period=1:scale_steps=true,local_sgd:sync_period=8,hpsgd,hpsgd:max_local_steps=2,hpsgd:max_local_steps=8,adpsgd,"
    "popsgd,popsgd:blocking=true,sgp,sgp:overlap=1,eager_sgd,wagma,wagma:overlap=true"
)
DEFAULTS: Final[dict[str, tuple[int, str]]] = {
    "digits": (120, "0.1,0.2,0.4,0.8"),
    "resnet": (100, "0.1,0.2,0.4,0.8"),
    "language": (200, "0.005,0.01,0.02"),
    "translation": (100, "0.01,0.02,0.04"),
    "translation_loss": (200, "0.005,0.01,0.02"),
}
"""The steps, and the grid of learning rates, of each task."""
FIRST_TUNING_SEED: Final = 1000
VALIDATION_S: Final = 1.0
"""How long all ranks validate after an epoch."""


# ---- the command ----


def _cells(
    args: argparse.Namespace, seeds: Iterable[int], lrs: Callable[[Cell], Iterable[float]]
) -> list[Cell]:
    """Returns cells seed by seed: an interrupted run has all strategies for its first seeds."""
    places: list[Cell] = [
        {"situation": situation, "strategy": spec, "seed": seed}
        | ({} if data == EQUAL else {"data": data})
        | ({} if stretch == 1 else {"stretch": stretch})
        for seed in seeds
        for situation in args.situations.split(",")
        for spec in args.strategies.split(",")
        for data in args.data.split(",")
        if data == EQUAL or not _is_lockstep(spec)
        for stretch in args.stretch
    ]
    return [place | {"lr": lr} for place in places for lr in lrs(place)]


def _is_lockstep(spec: str) -> bool:
    from lightning_dsgd.algorithms import make_algorithm  # loads torch

    return make_algorithm(spec).traits.lockstep


def _measured(
    args: argparse.Namespace, measure: Callable[[Sequence[Cell]], list[Cell]], tuning: range
) -> list[Cell]:
    """Measures the seeds that choose with all rates, then the others with what was chosen."""
    seeds = range(args.seeds)
    if not tuning:
        return measure(_cells(args, seeds, lambda place: args.lrs))
    first = measure(_cells(args, tuning, lambda place: args.lrs))
    higher_is_better = _higher_is_better(args.task)
    chosen = {
        name: Chosen(
            [cell for cell in first if cell["situation"] == name],
            tuning,
            args.baseline,
            higher_is_better=higher_is_better,
        )
        for name in args.situations.split(",")
    }

    def lrs(place: Cell) -> list[float]:
        here = chosen[place["situation"]]
        best = here.lr(label(place), place.get("stretch", 1.0))
        return sorted({best, here.lr(args.baseline)})

    return first + measure(_cells(args, seeds, lrs))


def _higher_is_better(task: str) -> bool:
    from benchmarks.compare.small_tasks import TASKS  # loads Lightning

    return TASKS[task].higher_is_better


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from lightning_dsgd.algorithms import make_algorithm  # loads torch

    situations = args.situations.split(",")
    specs = args.strategies.split(",")
    try:
        if args.seeds < 1 or args.steps < 1 or args.tuning_seeds < 0:
            raise ValueError(
                "--seeds and --steps must be at least 1, and --tuning-seeds at least 0, got "
                f"--seeds {args.seeds} --steps {args.steps} --tuning-seeds {args.tuning_seeds}"
            )
        _refuse_data(args)
        if args.jobs < 1 or (args.jobs > 1 and args.real_ms is not None):
            raise ValueError(
                "--jobs must be at least 1, and 1 with --real-ms, whose ranks are processes "
                f"already, got --jobs {args.jobs}"
            )
        if 1.0 not in args.stretch or round(args.stretch[0] * args.steps) < 1:
            raise ValueError(
                "--stretch must hold 1, and leave at least one step, got --stretch "
                f"{','.join(map(str, args.stretch))} --steps {args.steps}"
            )
        for situation in situations:
            if situation not in SITUATIONS:
                raise ValueError(
                    f"--situations must be of {','.join(SITUATIONS)}, got {situation!r}"
                )
        if args.real_ms is not None:
            _refuse_real(args)
        if args.baseline not in specs:
            raise ValueError(f"--strategies must have {args.baseline} among them, got {specs}")
        for spec in specs:
            algorithm = make_algorithm(spec)
            for ranks in {SITUATIONS[situation].ranks for situation in situations}:
                algorithm.check(ranks)
    except ValueError as err:
        parser.error(str(err))


def _refuse_data(args: argparse.Namespace) -> None:
    data = args.data.split(",")
    if EQUAL not in data or not {*data} <= {EQUAL, CLAIMED}:
        raise ValueError(
            f"--data must be {EQUAL} or {EQUAL},{CLAIMED}, as the baseline's ranks step together, "
            f"got --data {args.data}"
        )
    for each in data:
        epochs.check(args.epoch_steps, each)
    if CLAIMED in data and args.real_ms is not None:
        raise ValueError(
            f"--data {CLAIMED} is for simulated ranks, got it with --real-ms; leave one out"
        )


def _refuse_real(args: argparse.Namespace) -> None:
    from benchmarks.compare import target_rank
    from benchmarks.compare.small_tasks import TASKS

    if not args.real_ms > 0:
        raise ValueError(f"--real-ms must be positive, got --real-ms {args.real_ms}; try 200")
    target_rank.refuse(TASKS[args.task])
    reason = why_not()
    if reason:
        raise ValueError(f"--real-ms emulates the network, and cannot here: {reason}")


def _numbers(text: str) -> list[float]:
    try:
        return sorted({float(number) for number in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be such as 0.1,0.2,0.4, got {text!r}") from None


def _measure(cells: Sequence[Cell], settings: dict[str, Any], num_jobs: int) -> Iterator[Cell]:
    if "step_s" in settings:
        yield from _measure_real(cells, settings)
        return
    from benchmarks.compare import target_cell  # loads torch and Lightning

    run = partial(target_cell.run, settings=settings)
    with contextlib.ExitStack() as ending:
        results: Iterator[Cell] = map(run, cells)
        if num_jobs > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(num_jobs, spawn, take_core, (spawn.Value("i", 0),))
            ending.enter_context(pool)
            results = pool.map(run, cells)
        for cell, result in zip(cells, results, strict=True):
            yield {**cell, **result}


def _measure_real(cells: Sequence[Cell], settings: dict[str, Any]) -> Iterator[Cell]:
    """Starts the ranks once for all cells of a situation that follow one another."""
    from benchmarks.compare import target_rank

    for name, group in groupby(cells, key=lambda cell: str(cell["situation"])):
        situation = SITUATIONS[name]
        link = target_rank.link_of(situation, settings)
        job = Job("benchmarks.compare.target_rank:run", settings, situation.ranks, link)
        for result in job.measure(list(group)):
            ranks = result.pop("ranks")
            rates = [rank["steps_per_s"] for rank in ranks]
            mean = statistics.mean(rates)
            rates_of = {"steps_per_s": mean, "slowest_steps_per_s": min(rates)}
            num_steps = round(settings["steps"] * result.get("stretch", 1.0))
            job = num_steps / ranks[0]["seconds"][-1]
            yield {**result, **ranks[0], **rates_of, "job_steps_per_s": job}


def _floor_s(args: argparse.Namespace, situation: Situation) -> float:
    """Returns the least time of training, mean over the reported seeds."""
    floors = [situation.floor_s(seed, args.steps) for seed in range(args.seeds)]
    num_epochs = 0 if args.epoch_steps is None else math.ceil(args.steps / args.epoch_steps)
    return round(statistics.mean(floors) + num_epochs * VALIDATION_S, 2)


def main(argv: list[str] | None = None) -> None:
    """Measures what is missing, prints the tables and writes the result file."""
    parser = Parser("target", __doc__, prog="python -m benchmarks target")
    parser.add_argument("--task", choices=DEFAULTS, default="digits", help="what is trained")
    parser.add_argument("--situations", default=",".join(SITUATIONS), help="separated by commas")
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument(
        "--lrs", type=_numbers, help="learning rates to choose from; by default the task's"
    )
    parser.add_argument("--seeds", type=int, default=10, help="seeds that are reported")
    parser.add_argument(
        "--tuning-seeds",
        type=int,
        default=5,
        help="seeds that choose a rate; with 0 the reported ones do",
    )
    parser.add_argument("--steps", type=int, help="steps of every rank; by default the task's")
    parser.add_argument(
        "--epoch-steps", type=int, help="steps of an epoch; by default one epoch is endless"
    )
    parser.add_argument(
        "--data", default=EQUAL, help=f"how ranks get batches: {EQUAL}, or {EQUAL},{CLAIMED}"
    )
    parser.add_argument("--baseline", default=BASELINE, help="what others are compared to")
    parser.add_argument(
        "--stretch",
        type=_numbers,
        default=[1.0],
        help="factors of the number of steps; 1 must be among them",
    )
    parser.add_argument(
        "--real-ms",
        type=float,
        help="measures real processes, whose step takes so long; such as 200",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compute cells")
    parser.add_argument("--output", type=Path, default=Path("target.json"), help="file to write")
    args = parser.parse_args(argv)
    from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm  # loads torch
    from lightning_dsgd.lab.in_force import in_force  # loads torch

    num_steps, lrs = DEFAULTS[args.task]
    args.steps = num_steps if args.steps is None else args.steps
    args.lrs = _numbers(lrs) if args.lrs is None else args.lrs
    _refuse(parser, args)
    settings: dict[str, Any] = {"task": args.task, "steps": args.steps}
    if args.epoch_steps is not None:
        settings |= {"epoch_steps": args.epoch_steps, "validation_s": VALIDATION_S}
    if args.real_ms is not None:
        settings["step_s"] = args.real_ms / 1e3
    situations = {name: asdict(SITUATIONS[name]) for name in args.situations.split(",")}
    all_situations = {name: asdict(each) for name, each in SITUATIONS.items()}
    defaults = {name: make_algorithm(name).hyperparameters() for name in ALGORITHMS}
    identity = json.dumps([settings, all_situations, defaults])
    tuning = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + args.tuning_seeds)
    measure = partial(_measure, settings=settings, num_jobs=args.jobs)
    cells = _measured(args, lambda some: measured(some, args.output, identity, measure), tuning)
    higher_is_better = _higher_is_better(args.task)
    options = {"tuning": tuning, "baseline": args.baseline, "higher_is_better": higher_is_better}
    best, others = curves(cells, **options)
    num_ranks = (SITUATIONS[name].ranks for name in situations)
    choices = {"lrs": args.lrs, "stretch": args.stretch, "seeds": args.seeds}
    choices |= {"tuning_seeds": list(tuning), "baseline": args.baseline, "data": args.data}
    report = provenance(typed("python -m benchmarks target", argv)) | {
        "settings": settings | choices | {"situations": situations},
        "hyperparameters": in_force(args.strategies.split(","), num_ranks),
        "higher_is_better": higher_is_better,
        "floors": {name: _floor_s(args, SITUATIONS[name]) for name in situations},
        "summary": summarize(cells, **options),
        "curves": best,
        "others": others,
    }
    print("\n" + tables(report))
    finish(report, args.output)


if __name__ == "__main__":
    main()
