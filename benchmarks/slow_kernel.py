"""What one rank's slow kernel costs the other ranks in a step, on an emulated device.

    python benchmarks/slow_kernel.py

Four processes, each with the device of `tests/support/fake_device.py`, which does its work late, in
streams of its own.  In each step a kernel takes 50 ms, on rank 2 it takes 0.6 s.  All ranks train
for as long; each of the others notes how long its steps take until its device has made them.
The first three steps are not counted, and no kernel is slow in them.  The figures say who waits for
whom.  They are no speeds of a GPU.

`wagma` and `eager_sgd` wait for a late rank's `grace_s`, by default an eighth of its last step.  A
long `sync_period` leaves out the global averages of `wagma`, which wait for all ranks.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import script
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab import accelerators
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives.own_device import await_step
from tests.support.worlds import FakeWorld, ProcessWorld

RANKS, SLOW, NUM_WEIGHTS = 4, 2, 10_000
KERNEL_S, SLOW_KERNEL_S = 0.05, 0.6
WARM_UP = 3
PERIOD = "sync_period=1000"
SPECS = (
    "allreduce",
    "sgp",
    f"wagma:{PERIOD}",
    f"wagma:{PERIOD}:grace_s=0",
    f"wagma:{PERIOD}:overlap=true",
    "eager_sgd:quorum=solo",
    "eager_sgd:quorum=solo:grace_s=0",
    "eager_sgd:quorum=majority",
    "sgp:overlap=1",
    "sgp:overlap=100",
    "adpsgd",
    "popsgd",
    "hpsgd",
)


def train(net: Any, device: Any, spec: str, seconds: float) -> dict[str, Any]:
    """How long each step of this rank took, and the share of rounds that it was late for.

    Args:
        net: this rank's transport
        device: the device, or one that is none
        spec: the algorithm
        seconds: how long all ranks train
    """
    x = torch.zeros(NUM_WEIGHTS).to(getattr(device, "device", device))
    algorithm = make_algorithm(spec)
    algorithm.start(net.sub("algorithm"), x)
    steps_s: list[float] = []
    net.barrier().wait()
    end = begin = time.monotonic()
    until = begin + seconds
    while end < until:
        is_slow = net.rank == SLOW and len(steps_s) >= WARM_UP
        accelerators.spin(x.device, SLOW_KERNEL_S if is_slow else KERNEL_S)
        g = torch.full_like(x, 1e-3)
        algorithm.before_update(x, g)
        x -= g
        algorithm.after_update(x)
        await_step(net, x)
        begin, end = end, time.monotonic()
        steps_s.append(end - begin)
    found = {"steps_s": steps_s[WARM_UP:], "late_share": algorithm.metrics().get("late_share")}
    algorithm.settle(x)
    algorithm.finish(x)
    return found


def measure(world: ProcessWorld, spec: str, turn: int, seconds: float) -> dict[str, Any]:
    """One world's figures: of the steps that its other ranks made."""
    ranks = world.run(RANKS, train, spec, seconds)
    steps_s = [s for rank in range(RANKS) if rank != SLOW for s in ranks[rank]["steps_s"]]
    return {
        "strategy": spec,
        "round": turn,
        "median_s": statistics.median(steps_s),
        "worst_s": max(steps_s),
        "steps": len(steps_s),
        "slow_steps": len(ranks[SLOW]["steps_s"]),
        "late_share": ranks[SLOW]["late_share"],
        "load": os.getloadavg()[0],
    }


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians over the rounds."""
    rows = []
    for spec in SPECS:
        of_spec = [cell for cell in cells if cell["strategy"] == spec]
        row: dict[str, Any] = {"strategy": spec}
        for figure in ("median_s", "worst_s", "late_share"):
            values = [cell[figure] for cell in of_spec if cell[figure] is not None]
            row[figure] = statistics.median(values) if values else None
        rows.append(row | {"worst_of_all_s": max(cell["worst_s"] for cell in of_spec)})
    return rows


def main() -> None:
    parser = script.parser(__doc__, "docs/results/gpus/slow_kernel.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each strategy in a round")
    args = parser.parse_args()
    report = provenance() | {
        "device": "emulated",
        "ranks": RANKS,
        "kernel_s": KERNEL_S,
        "slow_kernel_s": SLOW_KERNEL_S,
        "seconds": args.seconds,
    }
    cells = []
    for turn in range(args.rounds):
        for spec in SPECS:
            world = FakeWorld(timeout_s=60.0, seed=RANKS * turn)
            cells.append(measure(world, spec, turn, args.seconds))
            print(cells[-1], flush=True)
    for row in summary(cells):
        late = "" if row["late_share"] is None else f"{row['late_share']:.2f}"
        median_s, worst_s = row["median_s"], row["worst_s"]
        print(f"{row['strategy']:40} {median_s:6.3f} s  worst {worst_s:6.3f} s  late {late}")
    write_result(report | {"summary": summary(cells), "cells": cells}, args.output)


if __name__ == "__main__":
    main()
