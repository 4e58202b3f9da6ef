"""What helps Ok-Topk within the bytes of 1%: more entries of fewer bits, and changes for gradients.

    python benchmarks/oktopk_changes.py --output docs/results/oktopk/oktopk_changes.json

8 or --ranks ranks of the simulated world train the language model or the digits of `benchmarks
target`, with its batches and its schedule.  "@0.3" after a strategy is Adam's first beta, if it is
not 0.9.  A row has the strategy's best learning rate with the first seed.  The bytes are those of a
rank, in a step; the paper's bound is 6k (P-1)/P numbers of 4 bytes, with k of 1% of the weights.

Each cell is printed and written at once; a cell that is in the file is not computed again.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import torch

from benchmarks import script
from benchmarks.compare import target_cell
from benchmarks.compare.situations import Situation
from benchmarks.compare.small_tasks import TASKS
from benchmarks.compare.target_cell import Training
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result

WAY = Situation("a step takes 0.97 to 1.03 s")
CHANGES = "exchanges=changes"
STRATEGIES = {
    "language": [
        "allreduce",
        *("oktopk@0.5", "oktopk:density=0.02@0.5", "oktopk:density=0.03:wire_dtype=int8@0.5"),
        "oktopk:density=0.05:wire_dtype=int4@0.5",
        *(f"oktopk:{CHANGES}", f"oktopk:{CHANGES}@0.0"),
        f"oktopk:{CHANGES}:density=0.02@0.0",
        f"oktopk:{CHANGES}:density=0.02:wire_dtype=int8@0.0",
        f"oktopk:{CHANGES}:density=0.03:wire_dtype=int8@0.3",
        f"oktopk:{CHANGES}:density=0.03:wire_dtype=int8:scale_steps=true@0.3",
        f"oktopk:{CHANGES}:density=0.05:wire_dtype=int4@0.3",
        f"topk_allgather:{CHANGES}@0.0",
    ],
    "digits": [
        *("allreduce", "oktopk", "oktopk:density=0.03:wire_dtype=int8"),
        *("oktopk:density=0.05:wire_dtype=int4", f"oktopk:{CHANGES}:density=0.05:wire_dtype=int4"),
    ],
}
LRS = {"language": [0.01, 0.02], "digits": [0.1, 0.2, 0.4, 0.8]}
STEPS = {"language": 200, "digits": 120}


def train(
    name: str, strategy: str, lr: float, seed: int, *, steps: int, ranks: int
) -> dict[str, float]:
    spec, _, beta = strategy.partition("@")
    task = TASKS[name]
    if beta:

        def optimizer(weights: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
            made = TASKS[name].optimizer(weights, lr)
            for group in made.param_groups:
                group["betas"] = (float(beta), 0.999)
            return made

        task = replace(task, optimizer=optimizer)
    cell = {"strategy": spec, "lr": lr, "seed": seed}
    training = Training(task, replace(WAY, ranks=ranks), cell, {"steps": steps})
    target_cell.train(training)
    weights = training.x.shape[1]
    return {
        "value": round(training.curve["value"][-1], 4),
        "kb_per_step": round(max(training.bytes_sent) / steps / 1e3, 3),
        "bound_kb": round(6 * round(0.01 * weights) * (ranks - 1) / ranks * 4 / 1e3, 3),
    }


def summary(cells: list[dict[str, Any]], *, up: bool) -> list[dict[str, Any]]:
    """The rows: the quality of each strategy at its best learning rate, beside all-reduce's."""
    rows: list[dict[str, Any]] = []
    for strategy in dict.fromkeys(cell["strategy"] for cell in cells):
        own = [cell for cell in cells if cell["strategy"] == strategy]
        first = sorted((c for c in own if not c["seed"]), key=lambda c: float(c["value"]))
        best = first[-1 if up else 0]
        values = {cell["seed"]: cell["value"] for cell in own if cell["lr"] == best["lr"]}
        base = rows[0]["values"] if rows else values
        to_base = [100 * (values[s] - base[s]) / (1 if up else base[s]) for s in values]
        rows.append(
            {
                "strategy": strategy,
                "lr": best["lr"],
                "values": values,
                "points" if up else "percent": round(statistics.mean(to_base), 1),
                "kb_per_step": best["kb_per_step"],
            }
        )
    return rows


def main() -> None:
    parser = script.parser(__doc__, "oktopk_changes.json")
    parser.add_argument("--task", choices=STRATEGIES, default="language")
    parser.add_argument("--strategies", nargs="+", help="all-reduce first; by default all")
    parser.add_argument("--lrs", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=WAY.ranks)
    parser.add_argument("--steps", type=int, help="by default those of `benchmarks target`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    up, steps = TASKS[args.task].higher_is_better, args.steps or STEPS[args.task]
    cells = json.loads(args.output.read_text())["cells"] if args.output.exists() else []
    for seed in range(args.seeds):
        for strategy in args.strategies or STRATEGIES[args.task]:
            known = [row for row in summary(cells, up=up) if row["strategy"] == strategy]
            for lr in [known[0]["lr"]] if seed else args.lrs or LRS[args.task]:
                key = {"strategy": strategy, "lr": lr, "seed": seed}
                if any(key.items() <= cell.items() for cell in cells):
                    continue
                cells.append(
                    key | train(args.task, strategy, lr, seed, steps=steps, ranks=args.ranks)
                )
                print(cells[-1], flush=True)
                rows = summary(cells, up=up)
                specs = [row["strategy"].partition("@")[0] for row in rows]
                report = provenance() | {"hyperparameters": in_force(specs, [args.ranks])}
                report |= {"steps": steps, "summary": rows, "cells": cells}
                write_result(report, args.output)


if __name__ == "__main__":
    main()
