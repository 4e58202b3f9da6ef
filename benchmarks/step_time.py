"""What a strategy adds to a training step, against Lightning's own; and what surviving adds.

    python benchmarks/step_time.py --output docs/results/benchmarks/step_time.json

1. two gloo ranks, about 10M parameters, balanced work: `allreduce` against `ddp`;
2. one rank, a step of about 50 ms: `no_sync` against `SingleDeviceStrategy`;
3. two ranks without a loss: `allreduce` with `on_loss="continue"` against `on_loss="end"`.

Short fits of both alternate within one job; a sample is the ratio of the two medians of a round,
and the result is the median of the ratios.  One torch thread a rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import script
from benchmarks.compare import contestants
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job

CASES = (
    (2, "ddp", "allreduce"),
    (1, "single_device", "no_sync"),
    (2, "allreduce", "allreduce:on_loss=continue"),
)
"""The number of ranks, what is compared with, and what is measured."""


class Network(L.LightningModule):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def median_s(self, warm_up: int = 3) -> float:
        steps = [b - a for a, b in zip(self.ends[:-1], self.ends[1:], strict=True)]
        return statistics.median(steps[warm_up:])


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One short fit: the median time of a step."""
    L.seed_everything(0, verbose=False)
    model = Network(settings["width"], settings["depth"])
    count = settings["batch_size"] * 64
    data = TensorDataset(torch.randn(count, settings["width"]), torch.randint(10, (count,)))
    clock = Clock()
    trainer = contestants.trainer(
        cell["strategy"],
        settings["world_size"],
        max_steps=settings["steps"],
        max_epochs=-1,
        callbacks=[clock],
    )
    trainer.fit(model, DataLoader(data, settings["batch_size"]))
    return {"step_s": clock.median_s(), "parameters": sum(p.numel() for p in model.parameters())}


def run_case(
    ranks: int, names: tuple[str, str], args: argparse.Namespace
) -> tuple[dict[str, Any], Job]:
    settings = {key: getattr(args, key) for key in ("steps", "width", "depth", "batch_size")}
    job = Job(f"{__file__}:run_cell", {**settings, "world_size": ranks}, ranks)
    plan = [
        {"round": turn, "strategy": name}
        for turn in range(args.rounds + 1)
        for name in (names if turn % 2 else names[::-1])
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = job.run(plan, Path(folder, "cells.json"))
    samples: dict[int, dict[str, float]] = {}
    for result in results[2:]:  # the first round warms up
        step_s = statistics.mean(rank["step_s"] for rank in result["ranks"])
        samples.setdefault(result["round"], {})[result["strategy"]] = step_s
    ratios = [sample[names[1]] / sample[names[0]] for sample in samples.values()]
    case = {
        "ranks": ranks,
        "parameters": results[0]["ranks"][0]["parameters"],
        "baseline": names[0],
        "strategy": names[1],
        "baseline_ms": 1e3 * statistics.median(s[names[0]] for s in samples.values()),
        "strategy_ms": 1e3 * statistics.median(s[names[1]] for s in samples.values()),
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "samples_s": list(samples.values()),
    }
    print(
        f"{ranks} rank(s): {names[1]} {case['strategy_ms']:.1f} ms, {names[0]} "
        f"{case['baseline_ms']:.1f} ms per step; median ratio {case['median_ratio']:.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f})"
    )
    return case, job


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/step_time.json")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    found = (run_case(ranks, (theirs, ours), args) for ranks, theirs, ours in CASES)
    cases, jobs = zip(*found, strict=True)
    report = jobs[0].provenance()
    finish(report | {"cases": list(cases)}, args.output)


if __name__ == "__main__":
    main()
