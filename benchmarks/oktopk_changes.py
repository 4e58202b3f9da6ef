"""Loss against bytes where Ok-Topk exchanges what Adam's steps have changed, and not gradients.

    python benchmarks/oktopk_changes.py --output docs/results/oktopk/oktopk_changes.json

8 ranks of the simulated world train the language model of `bench target`, with its batches and its
schedule.  "@0.3" after a strategy is Adam's first beta, if it is not 0.9.  A row has the strategy's
better learning rate of those of the first seed.  The bytes are those of a rank, in a step; the
paper's bound is 6k (P-1)/P numbers of 4 bytes, with k of 1% of the weights.

Each cell is printed and written at once; a cell that is in the file is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_dsgd.lab.bench.situations import Situation
from lightning_dsgd.lab.bench.small_tasks import TASKS
from lightning_dsgd.lab.bench.target_cell import LATENCY_S, Training, bandwidth_bytes_s
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.simulated import SimulatedWorld

RANKS = 8
WAY = Situation("a step takes 0.97 to 1.03 s")
CHANGES = "exchanges=changes"
STRATEGIES = [
    "allreduce",
    *("oktopk@0.5", "oktopk:density=0.02@0.5", "oktopk:density=0.03:wire_dtype=int8@0.5"),
    *(f"oktopk:{CHANGES}", f"oktopk:{CHANGES}@0.0"),
    f"oktopk:{CHANGES}:density=0.02@0.0",
    f"oktopk:{CHANGES}:density=0.02:wire_dtype=int8@0.0",
    f"oktopk:{CHANGES}:density=0.03:wire_dtype=int8@0.3",
    f"oktopk:{CHANGES}:density=0.05:wire_dtype=int4@0.3",
    f"topk_allgather:{CHANGES}@0.0",
]
LRS = [0.01, 0.02]


def train(strategy: str, lr: float, seed: int, steps: int) -> dict[str, float]:
    spec, _, beta = strategy.partition("@")
    task = TASKS["language"]
    if beta:

        def optimizer(weights: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
            made = TASKS["language"].optimizer(weights, lr)
            for group in made.param_groups:
                group["betas"] = (float(beta), 0.999)
            return made

        task = replace(task, optimizer=optimizer)
    cell = {"strategy": spec, "lr": lr, "seed": seed}
    training = Training(task, WAY, cell, {"steps": steps})
    bandwidth = bandwidth_bytes_s(training.x[0], WAY)
    world = SimulatedWorld(RANKS, LATENCY_S, bandwidth, timeout_s=math.inf)
    with on_one_core():
        world.run(training.run)
    weights = training.x.shape[1]
    return {
        "loss": round(training.curve["value"][-1], 4),
        "kb_per_step": round(max(training.bytes_sent) / steps / 1e3, 3),
        "bound_kb": round(6 * round(0.01 * weights) * (RANKS - 1) / RANKS * 4 / 1e3, 3),
    }


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows: the mean loss of each strategy at its better learning rate, beside all-reduce's."""
    rows: list[dict[str, Any]] = []
    for strategy in dict.fromkeys(cell["strategy"] for cell in cells):
        own = [cell for cell in cells if cell["strategy"] == strategy]
        lr = min((cell for cell in own if cell["seed"] == 0), key=lambda cell: float(cell["loss"]))[
            "lr"
        ]
        taken = {cell["seed"]: cell for cell in own if cell["lr"] == lr}
        losses = {seed: cell["loss"] for seed, cell in taken.items()}
        base = rows[0]["losses"] if rows else losses
        above = [100 * (losses[seed] / base[seed] - 1) for seed in losses if seed in base]
        rows.append(
            {
                "strategy": strategy,
                "lr": lr,
                "losses": losses,
                "percent_above": round(statistics.mean(above), 1),
                "kb_per_step": taken[0]["kb_per_step"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--lrs", type=float, nargs="+", default=LRS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("oktopk_changes.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = json.loads(args.output.read_text())["cells"] if args.output.exists() else []
    for seed in range(args.seeds):
        for strategy in args.strategies:
            known = [row for row in summary(cells) if row["strategy"] == strategy]
            for lr in [known[0]["lr"]] if seed else args.lrs:
                key = {"strategy": strategy, "lr": lr, "seed": seed}
                if any(key.items() <= cell.items() for cell in cells):
                    continue
                cells.append(key | train(strategy, lr, seed, args.steps))
                print(cells[-1], flush=True)
                rows = summary(cells)
                specs = [row["strategy"].partition("@")[0] for row in rows]
                made = provenance() | {"hyperparameters": in_force(specs, [RANKS])}
                made |= {"steps": args.steps, "summary": rows, "cells": cells}
                write_result(made, args.output)


if __name__ == "__main__":
    main()
