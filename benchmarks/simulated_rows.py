"""Several algorithms on several numbers of ranks: the rows and their plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import Run, run


def compare(
    specs: Sequence[str],
    ranks: Sequence[int],
    name: str,
    machine: Machine,
    steps: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns all rows; `allreduce` is first, if present, as the others are compared to it."""
    for spec in specs:  # before the first of them takes minutes
        for world_size in ranks:
            make_algorithm(spec).check(world_size)
    rows = []
    total = steps * sum(ranks) * len(specs)
    with tqdm(total=total, unit="step", leave=False, disable=None) as bar:  # of a terminal
        for world_size in ranks:
            baseline = None
            for spec in sorted(specs, key=lambda spec: spec != "allreduce"):
                bar.set_description_str(f"{spec}, {world_size} ranks")
                begin_s = time.perf_counter()
                done = run(spec, world_size, machine, steps, seed, on_step=bar.update)
                baseline = done if spec == "allreduce" else baseline
                rows.append(summarize(done, name, baseline))
                took = time.perf_counter() - begin_s
                tqdm.write(f"{spec}, {world_size} ranks: {took:.1f} s", file=sys.stderr)
    return rows


def summarize(done: Run, machine: str, baseline: Run | None) -> dict[str, Any]:
    """Returns one row of the table; `baseline` is the all-reduce."""
    ratio = slowest_ratio = None
    if baseline is not None:
        ratio = done.steps_per_s / baseline.steps_per_s
        slowest_ratio = done.slowest_steps_per_s / baseline.slowest_steps_per_s
    return {
        "algorithm": done.algorithm,
        "ranks": len(done.done_s),
        "profile": machine,
        "steps_per_s": done.steps_per_s,
        "slowest_steps_per_s": done.slowest_steps_per_s,
        "ideal_steps_per_s": done.ideal_steps_per_s,
        "of_ideal": done.steps_per_s / done.ideal_steps_per_s,
        "ratio": ratio,
        "slowest_ratio": slowest_ratio,
        "mb_sent_per_step": done.bytes_sent / 1e6,
    }


def plot(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draws bars of throughput, grouped by P, each group under its ideal."""
    everyone = sorted({row["ranks"] for row in rows})
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        mine = {row["ranks"]: row["steps_per_s"] for row in rows if row["algorithm"] == name}
        places = [everyone.index(p) + (index + 0.5) * width - 0.42 for p in mine]
        axes.bar(places, mine.values(), 0.94 * width, label=name, color=f"C{index}")
    for place, p in enumerate(everyone):
        ideal = max(row["ideal_steps_per_s"] for row in rows if row["ranks"] == p)
        label = "ideal" if place == 0 else None
        axes.hlines(ideal, place - 0.45, place + 0.45, "k", "dashed", label=label)
    axes.set_xticks(range(len(everyone)), [f"{p:,}" for p in everyone])
    axes.set(xlabel="ranks", ylabel="steps/s (mean of ranks)")
    axes.set_ylim(0, 1.45 * max(row["ideal_steps_per_s"] for row in rows))
    axes.legend(fontsize="small", ncols=2, loc="upper center")
