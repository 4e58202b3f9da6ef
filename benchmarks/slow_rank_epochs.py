"""A rank that is always slower, in epochs that end for all ranks together: what gains time.

    python benchmarks/slow_rank_epochs.py

`Trainer.fit` with 4 real ranks on the digits.  A step takes 400 ms, on the last rank 800 ms; most
of it is a sleep.  All ranks validate together after each epoch.  An epoch's 120 batches are dealt
equally (30, 30, 30, 30), by the ranks' speeds (34, 34, 34, 17), or claimed (`data="claimed"`).  DDP
and `allreduce` need equal numbers, or known ones.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import script
from benchmarks.compare import contestants
from benchmarks.compare.convergence_cell import Paced
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.run_cells import rank_of_this_process
from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData

STRATEGIES = "ddp,allreduce,wagma,wagma:overlap=true,popsgd,adpsgd,hpsgd"
EQUALLY, BY_SPEED, CLAIMED = (1, 1, 1, 1), (2, 2, 2, 1), ()
CANNOT = [("ddp", BY_SPEED), ("ddp", CLAIMED), ("allreduce", CLAIMED)]
DEALT = {EQUALLY: "equally", BY_SPEED: "by speed", CLAIMED: "claimed"}
BATCH = 8
SPLIT = (120 * BATCH, 720, 117)


class BySpeed(DistributedSampler):
    """Deals each rank a share of every epoch that is as large as its speed."""

    def __init__(self, dataset, speeds, rank, seed=0):
        super().__init__(dataset, num_replicas=len(speeds), rank=rank, seed=seed)
        ends = [len(dataset) * sum(speeds[:r]) // sum(speeds) for r in (rank, rank + 1)]
        self.mine = slice(*ends)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        return iter(order[self.mine].tolist())

    def __len__(self):
        return self.mine.stop - self.mine.start


class Clock(L.Callback):
    """Seconds from the first batch on, and the accuracy, after each epoch with its validation."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: list[float] = []
        self.accuracy: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        torch.distributed.barrier()
        self.begin = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begin)
        self.accuracy.append(float(trainer.callback_metrics["val_accuracy"]))


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One training on this rank."""
    L.seed_everything(cell["seed"], verbose=False)
    rank, is_slow = rank_of_this_process(), rank_of_this_process() == len(EQUALLY) - 1
    data = DigitsData(BATCH, split=SPLIT)
    data.setup("fit")
    train, is_claimed = data.splits["train"], tuple(cell["speeds"]) == CLAIMED
    sampler = None if is_claimed else BySpeed(train, cell["speeds"], rank, cell["seed"])
    loader = DataLoader(train, BATCH, shuffle=is_claimed, sampler=sampler, drop_last=True)
    clock = Clock()
    trainer = contestants.trainer(
        cell["strategy"] + ":data=claimed" * is_claimed,
        len(EQUALLY),
        max_epochs=settings["epochs"],
        callbacks=[Paced(settings["step_s"] * (2 if is_slow else 1)), clock],
    )
    trainer.fit(DigitsClassifier(settings["lr"]), loader, data.val_dataloader())
    return {"steps": trainer.global_step, "seconds": clock.seconds, "accuracy": clock.accuracy}


def cells(specs: list[str], seeds: int) -> list[Cell]:
    """Seed by seed."""
    return [
        {"strategy": spec, "speeds": list(speeds), "seed": seed}
        for seed in range(seeds)
        for spec in specs
        for speeds in DEALT
        if (spec, speeds) not in CANNOT
    ]


def summarize(results: list[Cell]) -> list[dict[str, Any]]:
    """A row for each strategy and way of dealing."""
    rows = []
    for spec, *speeds in dict.fromkeys((r["strategy"], *r["speeds"]) for r in results):
        mine = [r for r in results if (r["strategy"], r["speeds"]) == (spec, speeds)]
        epochs = len(mine[0]["ranks"][0]["seconds"])
        rows.append(
            {
                "strategy": spec,
                "dealt": DEALT[tuple(speeds)],
                "batches": [rank["steps"] // epochs for rank in mine[0]["ranks"]],
                "seconds": [max(rank["seconds"][-1] for rank in r["ranks"]) for r in mine],
                "accuracy": [r["ranks"][0]["accuracy"][-1] for r in mine],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    titles = "| | batches | of each rank | training, s | final accuracy |"
    lines = [titles, "|---|---|---|---|---|"]
    for row in rows:
        seconds = " / ".join(f"{value:.1f}" for value in row["seconds"])
        accuracy = f"{100 * statistics.mean(row['accuracy']):.1f}%"
        batches = " ".join(map(str, row["batches"]))
        lines.append(
            f"| `{row['strategy']}` | {row['dealt']} | {batches} | {seconds} | {accuracy} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/choosing/slow_rank_epochs.json")
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.4)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("epochs", "step_s", "lr")}
    job = Job(f"{__file__}:run_cell", settings, len(EQUALLY))
    specs = args.strategies.split(",")
    results = job.run(cells(specs, args.seeds), args.output)
    rows = summarize(results)
    print("\n" + table(rows))
    made = job.provenance() | {"hyperparameters": in_force(specs, [len(EQUALLY)])}
    finish(made | {"summary": rows, "cells": results}, args.output)


if __name__ == "__main__":
    main()
