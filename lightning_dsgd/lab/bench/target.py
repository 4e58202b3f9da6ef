"""How soon is a model as good as with all-reduce?

    lightning-dsgd bench target --task digits --strategies allreduce,wagma,hpsgd --seeds 3 \
        --output FILE.json

Ranks of the simulated world compute real gradients of a small network; time and network are
virtual, so the result does not depend on this machine.  A step takes 1 s of virtual time.  Each
strategy trains in each situation with each learning rate and seed.  Its best learning rate there is
the one with the best final quality, mean over the seeds; the same rule holds for all-reduce.

Situations: slow-link (an all-reduce takes 3 steps), slow-rank (one of 8 ranks takes twice as long),
heavy-tail (steps of random duration), random (2 of 8 random ranks are 80% of a step late),
random-16 (4 of 16).

The target is 99% of all-reduce's final quality with the same seed, or all of it.  A loss reaches
99% of the quality at 1/0.99 of the loss.  The first table has, for each situation:

    37 s (0.38)    seconds to the target, median over the seeds; relative to all-reduce's own time
    2 of 3         how many seeds reached it, if not all did
    1.5x           how many times the steps of --steps it trained for, if not once

With --stretch 0.5,1,2 each strategy also trains for half and twice the steps, with the schedule of
its learning rate over all of them; what most seeds reach the target with counts, of those the
soonest, of all-reduce too.  The target stays all-reduce's quality after --steps.

The second table has the final quality above all-reduce's, steps/s (mean of ranks), steps/s (slowest
rank) unless the file is older, and the learning rate; * marks one at an edge of the grid.  A run
that was interrupted continues if the same command is given again.  With --jobs 4, four cells are
computed at a time; the result is the same.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.bench.cells import Cell, finish, measured, take_core
from lightning_dsgd.lab.bench.job import Job
from lightning_dsgd.lab.bench.network import why_not
from lightning_dsgd.lab.bench.situations import SITUATIONS
from lightning_dsgd.lab.results import provenance, typed

BASELINE: Final = "allreduce"
STRATEGIES: Final = (
    "allreduce,local_sgd,hpsgd,hpsgd:max_local_steps=2,hpsgd:max_local_steps=8,adpsgd,"
    "popsgd,popsgd:blocking=true,sgp,sgp:overlap=1,eager_sgd,wagma,wagma:overlap=true"
)
DEFAULTS: Final[dict[str, tuple[int, str]]] = {
    "digits": (120, "0.1,0.2,0.4,0.8"),
    "resnet": (100, "0.1,0.2,0.4,0.8"),
    "language": (200, "0.005,0.01,0.02"),
    "translation": (100, "0.01,0.02,0.04"),
}
"""The steps, and the grid of learning rates, of each task."""
SHARES: Final = (0.99, 1.0)
"""The shares of all-reduce's final quality that are targets."""

Row = dict[str, Any]


# ---- what the cells say ----


def best_lr(cells: Sequence[Cell], *, higher_is_better: bool) -> float:
    """Returns the learning rate with the best mean final value; of equal ones the lowest."""
    sign = 1 if higher_is_better else -1
    finals: dict[float, list[float]] = {}
    for cell in sorted(cells, key=lambda cell: float(cell["lr"])):
        finals.setdefault(cell["lr"], []).append(sign * cell["value"][-1])
    return max(finals, key=lambda lr: statistics.mean(finals[lr]))


def reached(cell: Cell, target: float, *, higher_is_better: bool) -> int | None:
    """Returns the place of the first value that is as good; None if there is none."""
    for place, value in enumerate(cell["value"]):
        if value >= target if higher_is_better else value <= target:
            return place
    return None


def to_target(
    mine: Sequence[Cell], targets: dict[int, float], *, higher_is_better: bool
) -> dict[str, dict[int, float]]:
    """Returns each seed's seconds, steps and MB to the target; infinite where it is not reached."""
    found: dict[str, dict[int, float]] = {"seconds": {}, "step": {}, "mb_sent": {}}
    for cell in mine:
        place = reached(cell, targets[cell["seed"]], higher_is_better=higher_is_better)
        for key, by_seed in found.items():
            by_seed[cell["seed"]] = math.inf if place is None else cell[key][place]
    return found


def soonest(
    stretches: Mapping[float, Sequence[Cell]], targets: dict[int, float], *, higher_is_better: bool
) -> tuple[float, dict[str, dict[int, float]]]:
    """Returns how many times the steps a strategy trains to be there soonest, and `to_target` then.

    More seeds that reach the target come first, then less time.
    """
    found = {
        stretch: to_target(mine, targets, higher_is_better=higher_is_better)
        for stretch, mine in stretches.items()
    }

    def rank(stretch: float) -> tuple[int, float]:
        seconds = found[stretch]["seconds"].values()
        return -sum(map(math.isfinite, seconds)), statistics.median(seconds)

    stretch = min(found, key=rank)
    return stretch, found[stretch]


def _time_rows(
    at_best: dict[str, dict[float, list[Cell]]], share: float, *, higher_is_better: bool
) -> dict[str, Row]:
    """Returns each strategy's seconds, steps and MB to this share of the baseline's quality."""
    finals = {cell["seed"]: cell["value"][-1] for cell in at_best[BASELINE][1.0]}
    targets = {s: v * share if higher_is_better else v / share for s, v in finals.items()}
    found = {
        spec: soonest(stretches, targets, higher_is_better=higher_is_better)
        for spec, stretches in at_best.items()
    }
    base = found[BASELINE][1]["seconds"]
    assert all(map(math.isfinite, base.values())), "the baseline's last value reaches its target"
    rows: dict[str, Row] = {}
    for spec, (stretch, columns) in found.items():
        columns["share"] = {seed: s / base[seed] for seed, s in columns["seconds"].items()}
        row: Row = {"reached": sum(map(math.isfinite, columns["seconds"].values()))}
        if stretch != 1:
            row["stretch"] = stretch
        for key, by_seed in columns.items():
            median = statistics.median(by_seed.values())
            row[key] = round(median, 4) if math.isfinite(median) else None
        rows[spec] = row
    return rows


def summarize(cells: Sequence[Cell], *, higher_is_better: bool) -> tuple[list[Row], list[Cell]]:
    """Returns a row per situation and strategy, and the cells at the best learning rates."""
    rows, curves = [], []
    lrs = {cell["lr"] for cell in cells}
    edges = {min(lrs), max(lrs)} if len(lrs) > 1 else set()
    for situation in dict.fromkeys(cell["situation"] for cell in cells):
        here = [cell for cell in cells if cell["situation"] == situation]
        at_best: dict[str, dict[float, list[Cell]]] = {}
        for spec in dict.fromkeys(cell["strategy"] for cell in here):
            own = [cell for cell in here if cell["strategy"] == spec]
            for stretch in sorted({cell.get("stretch", 1.0) for cell in own}):
                alike = [cell for cell in own if cell.get("stretch", 1.0) == stretch]
                lr = best_lr(alike, higher_is_better=higher_is_better)
                best = [cell for cell in alike if cell["lr"] == lr]
                at_best.setdefault(spec, {})[stretch] = best
        times = {
            share: _time_rows(at_best, share, higher_is_better=higher_is_better) for share in SHARES
        }
        baseline = {cell["seed"]: cell for cell in at_best[BASELINE][1.0]}
        for spec, stretches in at_best.items():
            mine = stretches[1.0]
            curves += mine
            slow = [c["slowest_steps_per_s"] for c in mine if "slowest_steps_per_s" in c]
            gains = [cell["value"][-1] - baseline[cell["seed"]]["value"][-1] for cell in mine]
            rows.append(
                {
                    "situation": situation,
                    "strategy": spec,
                    "lr": mine[0]["lr"],
                    "lr_at_edge": mine[0]["lr"] in edges,
                    "seeds": len(mine),
                    "value": round(statistics.mean(cell["value"][-1] for cell in mine), 5),
                    "difference": round(statistics.mean(gains), 5),
                    "steps_per_s": round(statistics.mean(c["steps_per_s"] for c in mine), 4),
                    "slowest_steps_per_s": round(statistics.mean(slow), 4) if slow else None,
                    "seconds": round(statistics.median(c["seconds"][-1] for c in mine), 2),
                    "mb_sent": round(statistics.median(c["mb_sent"][-1] for c in mine), 4),
                    "to_target": {f"{share:g}": by_spec[spec] for share, by_spec in times.items()},
                }
            )
    return rows, curves


# ---- tables ----


def tables(result: dict[str, Any]) -> str:
    """Returns Markdown: seconds to each share of all-reduce's quality, then quality and speed."""
    parts = []
    for share in SHARES:
        words = "all" if share == 1 else f"{share:.0%}"
        parts.append(f"Seconds to {words} of all-reduce's final quality, and share of its time:")
        parts.append(time_table(result, f"{share:g}"))
    better = "accuracy in points" if result["higher_is_better"] else "loss"
    rates = "steps/s (mean of ranks)"
    if any(row.get("slowest_steps_per_s") for row in result["summary"]):  # not in older files
        rates += ", steps/s (slowest rank)"
    parts.append(f"Final {better} relative to all-reduce; {rates}; learning rate:")
    parts.append(quality_table(result))
    return "\n\n".join(parts)


def time_table(result: dict[str, Any], share: str) -> str:
    """Returns seconds to this share of all-reduce's final quality, in Markdown."""
    return _table(result, partial(_time_cell, share=share))


def quality_table(result: dict[str, Any]) -> str:
    """Returns final quality, rates of the mean and the slowest rank, and learning rate."""
    return _table(result, partial(_quality_cell, higher_is_better=result["higher_is_better"]))


def _table(result: dict[str, Any], text: Callable[[Row], str]) -> str:
    by_place = {(row["strategy"], row["situation"]): row for row in result["summary"]}
    situations = list(dict.fromkeys(row["situation"] for row in result["summary"]))
    lines = ["| | " + " | ".join(situations) + " |", "|---" * (len(situations) + 1) + "|"]
    for spec in dict.fromkeys(row["strategy"] for row in result["summary"]):
        found = [by_place.get((spec, situation)) for situation in situations]
        texts = ["" if row is None else text(row) for row in found]
        lines.append(f"| `{spec}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _time_cell(row: Row, *, share: str) -> str:
    figures = row["to_target"][share]
    count = f"{figures['reached']} of {row['seeds']}"
    if figures["seconds"] is None:
        return f"never ({count})" if figures["reached"] else "never"
    text = f"{figures['seconds']:.0f} s ({figures['share']:.2f})"
    if "stretch" in figures:
        text += f", {figures['stretch']:g}x"
    return text if figures["reached"] == row["seeds"] else f"{text}, {count}"


def _quality_cell(row: Row, *, higher_is_better: bool) -> str:
    if row["strategy"] == BASELINE:
        value = f"{100 * row['value']:.1f}%" if higher_is_better else f"{row['value']:.3f}"
    else:
        value = (
            f"{100 * row['difference']:+.1f}" if higher_is_better else f"{row['difference']:+.3f}"
        )
    rates = [row["steps_per_s"], row.get("slowest_steps_per_s")]
    text = ", ".join(f"{rate:.2f}" for rate in rates if rate is not None)
    return f"{value}; {text}; {row['lr']:g}{'*' * row['lr_at_edge']}"


# ---- the command ----


def _cells(args: argparse.Namespace) -> list[Cell]:
    """Returns cells seed by seed: an interrupted run has all strategies for its first seeds."""
    return [
        {"situation": situation, "strategy": spec, "lr": lr, "seed": seed}
        | ({} if stretch == 1 else {"stretch": stretch})
        for seed in range(args.seeds)
        for situation in args.situations.split(",")
        for spec in args.strategies.split(",")
        for stretch in args.stretch
        for lr in args.lrs
    ]


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from lightning_dsgd.algorithms import make_algorithm  # loads torch

    situations = args.situations.split(",")
    specs = args.strategies.split(",")
    try:
        if args.seeds < 1 or args.steps < 1:
            raise ValueError(
                "--seeds and --steps must be at least 1, got "
                f"--seeds {args.seeds} --steps {args.steps}"
            )
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
        if BASELINE not in specs:
            raise ValueError(f"--strategies must have {BASELINE} among them, got {specs}")
        for spec in specs:
            algorithm = make_algorithm(spec)
            for ranks in {SITUATIONS[situation].ranks for situation in situations}:
                algorithm.check(ranks)
    except ValueError as err:
        parser.error(str(err))


def _refuse_real(args: argparse.Namespace) -> None:
    from lightning_dsgd.lab.bench import target_rank
    from lightning_dsgd.lab.bench.small_tasks import TASKS

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
    from lightning_dsgd.lab.bench import target_cell  # loads torch and Lightning

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
    from lightning_dsgd.lab.bench import target_rank

    for name, group in groupby(cells, key=lambda cell: str(cell["situation"])):
        situation = SITUATIONS[name]
        link = target_rank.link_of(situation, settings)
        job = Job("lightning_dsgd.lab.bench.target_rank:run", settings, situation.ranks, link)
        for result in job.measure(list(group)):
            ranks = result.pop("ranks")
            rates = [rank["steps_per_s"] for rank in ranks]
            mean = statistics.mean(rates)
            yield {**result, **ranks[0], "steps_per_s": mean, "slowest_steps_per_s": min(rates)}


def main(argv: list[str] | None = None) -> None:
    """Measures what is missing, prints the tables and writes the result file."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=DEFAULTS, default="digits")
    parser.add_argument("--situations", default=",".join(SITUATIONS), help="separated by commas")
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument(
        "--lrs", type=_numbers, help="learning rates to choose from, such as 0.1,0.2"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every rank")
    parser.add_argument(
        "--stretch", type=_numbers, default=[1.0], help="times the steps; 1 must be among them"
    )
    parser.add_argument(
        "--real-ms", type=float, help="real processes, and how long a step takes; such as 200"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compute cells")
    parser.add_argument("--output", type=Path, default=Path("target.json"))
    args = parser.parse_args(argv)
    from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm  # loads torch
    from lightning_dsgd.lab.bench.small_tasks import TASKS  # loads Lightning

    num_steps, lrs = DEFAULTS[args.task]
    args.steps = num_steps if args.steps is None else args.steps
    args.lrs = _numbers(lrs) if args.lrs is None else args.lrs
    _refuse(parser, args)
    settings = {"task": args.task, "steps": args.steps}
    if args.real_ms is not None:
        settings["step_s"] = args.real_ms / 1e3
    situations = {name: asdict(SITUATIONS[name]) for name in args.situations.split(",")}
    all_situations = {name: asdict(each) for name, each in SITUATIONS.items()}
    defaults = {name: make_algorithm(name).hyperparameters() for name in ALGORITHMS}
    identity = json.dumps([settings, all_situations, defaults])
    measure = partial(_measure, settings=settings, num_jobs=args.jobs)
    cells = measured(_cells(args), args.output, identity, measure)
    higher_is_better = TASKS[args.task].higher_is_better
    summary, curves = summarize(cells, higher_is_better=higher_is_better)
    choices = {"lrs": args.lrs, "stretch": args.stretch, "seeds": args.seeds}
    report = provenance(typed("lightning-dsgd bench target", argv)) | {
        "settings": settings | choices | {"situations": situations},
        "higher_is_better": higher_is_better,
        "summary": summary,
        "finals": [
            {
                key: cell[key]
                for key in ("situation", "strategy", "lr", "stretch", "seed")
                if key in cell
            }
            | {"value": cell["value"][-1]}
            for cell in cells
        ],
        "curves": curves,
    }
    print("\n" + tables(report))
    finish(report, args.output)


if __name__ == "__main__":
    main()
