"""Final quality with gradients that travel rounded, at DDP's own learning rate.

    python benchmarks/rounded_sums.py

Ranks of the simulated world train tasks of `benchmarks target` by `allreduce`: 8 ranks digits with
momentum, 4 ranks language with AdamW and a residual network with momentum.  The learning rate is
the one of the grid with which exact sums end best with the seed of `TUNING`, which is not reported.
The quality is an accuracy, or for language the loss, of what is not trained on.

`2bit` is the format of `sparse_loco` for every entry.  `2bit, scaled` makes an optimizer's step
larger by sqrt(E[u^2] / E[m^2]) in each block of entries, as Adam divides by the size of what it is
given.  Legend: u the mean that has arrived, m the exact one, which is summed here besides; E[.] a
mean over entries and steps that forgets 5% with each step.

Each run is written to the file at once, and a run that is there already is not made again.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks import script
from benchmarks.compare import target_cell
from benchmarks.compare.situations import Situation
from benchmarks.compare.small_tasks import TASKS
from benchmarks.compare.target_cell import Training
from lightning_dsgd.algorithm import ORDINARY, Conditions
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import rounding
from lightning_dsgd.transport import Transport

GRID: Final = {
    "digits": (8, 120, [0.2, 0.4, 0.8]),
    "language": (4, 200, [0.01, 0.02]),
    "resnet": (4, 100, [0.2, 0.4, 0.8]),
}
"""Ranks, steps and learning rates of each task."""
TUNING: Final = 1000
FORMATS: Final = ("float32", "2bit", "int4", "int8", "2bit, scaled")
SCALED: Final = "2bit, scaled"
BLOCK: Final = 1024
"""The number of entries whose steps are scaled alike."""
KEPT: Final = 0.95
"""The share of a sum that stays with each step."""


@dataclass
class Rounded(AllReduce):
    """All-reduce with any format of `rounding`."""

    wire_dtype: str = rounding.wire_dtype(of="gradient entry")


@dataclass
class Scaled(Rounded):
    """The same, with steps as large as with exact sums."""

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.sums = torch.zeros(2, -(-len(x) // BLOCK))

    def before_update(self, x: Tensor, g: Tensor) -> None:
        exact = g.clone()
        self.net.all_reduce(exact).wait()
        exact /= self.net.world_size
        super().before_update(x, g)
        squares = torch.stack([g, exact]).square_()
        self.sums.mul_(KEPT).add_(pad(squares, (0, -len(g) % BLOCK)).view(2, -1, BLOCK).sum(2))
        self.before = x.clone()

    def after_update(self, x: Tensor) -> None:
        super().after_update(x)
        arrived, exact = self.sums
        factors = (arrived / exact).sqrt_().nan_to_num_(1.0, 1.0).repeat_interleave(BLOCK)
        x.add_((x - self.before) * (factors[: len(x)] - 1))


def train(task: str, wire: str, lr: float, seed: int) -> dict[str, float]:
    ranks, steps, _ = GRID[task]
    way = Situation("steps that take 0.97 to 1.03 s", ranks)
    cell = {"strategy": "allreduce", "lr": lr, "seed": seed}
    training = Training(TASKS[task], way, cell, {"steps": steps})
    training.algorithms = [
        Scaled(wire_dtype="2bit") if wire == SCALED else Rounded(wire_dtype=wire)
        for _ in training.algorithms
    ]
    target_cell.train(training)
    curve = training.curve
    found = {"value": round(curve["value"][-1], 4)}
    if wire != SCALED:  # which sends exact sums besides
        found["kb_per_step"] = round(1e3 * curve["mb_sent"][-2] / curve["step"][-2], 2)
    return found


class Runs:
    """All that has been run, in the file and here."""

    def __init__(self, args: Any) -> None:
        self.file = args.output
        self.cells: list[dict[str, Any]] = []
        if self.file.exists():
            self.cells = json.loads(self.file.read_text())["cells"]

    def value(self, task: str, wire: str, lr: float, seed: int) -> float:
        key = {"task": task, "wire_dtype": wire, "lr": lr, "seed": seed}
        for cell in self.cells:
            if key.items() <= cell.items():
                return float(cell["value"])
        self.cells.append(key | train(task, wire, lr, seed))
        print(self.cells[-1], flush=True)
        made = provenance() | {"hyperparameters": in_force(["allreduce"], [4, 8])}
        write_result(made | {"summary": self.summary(), "cells": self.cells}, self.file)
        return float(self.cells[-1]["value"])

    def lr(self, task: str) -> float:
        """The learning rate with which exact sums end best."""
        best = max if TASKS[task].higher_is_better else min
        found = {lr: self.value(task, "float32", lr, TUNING) for lr in GRID[task][2]}
        return best(found, key=found.__getitem__)

    def summary(self) -> list[dict[str, Any]]:
        """A row for each task and format: points, or percent of loss, above exact sums."""
        rows = []
        reported = [cell for cell in self.cells if cell["seed"] != TUNING]
        for task, wire in dict.fromkeys((c["task"], c["wire_dtype"]) for c in reported):
            of_task = [c for c in reported if c["task"] == task]
            exact = {c["seed"]: c["value"] for c in of_task if c["wire_dtype"] == "float32"}
            own = {c["seed"]: c["value"] for c in of_task if c["wire_dtype"] == wire}
            is_up = TASKS[task].higher_is_better
            apart = [100 * (own[s] - exact[s]) / (1 if is_up else exact[s]) for s in own]
            row = {"task": task, "wire_dtype": wire, "seeds": len(own)}
            row |= {"value": round(statistics.mean(own.values()), 4)}
            row["points" if is_up else "percent"] = round(statistics.mean(apart), 2)
            row |= {"least": round(min(apart), 2), "most": round(max(apart), 2)}
            [first, *_] = [c for c in of_task if c["wire_dtype"] == wire]
            rows.append(row | {"lr": first["lr"], "kb_per_step": first.get("kb_per_step")})
        return rows


def main() -> None:
    parser = script.parser(__doc__, "docs/results/balanced/rounded_sums.json")
    parser.add_argument("--tasks", nargs="+", choices=GRID, default=list(GRID))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args)
    lrs = {task: runs.lr(task) for task in args.tasks}
    for wires in (FORMATS[:3], FORMATS[3:]):
        for seed in range(args.seeds):
            for task, lr in lrs.items():
                for wire in wires:
                    if wire != SCALED or not TASKS[task].higher_is_better:  # Adam's task
                        runs.value(task, wire, lr, seed)
    for row in runs.summary():
        print(row)


if __name__ == "__main__":
    main()
