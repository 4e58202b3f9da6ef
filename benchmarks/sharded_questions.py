"""What it costs a step of sharded replicas that a lost rank ends its replica alone.

    python benchmarks/sharded_questions.py --output docs/results/sharded/questions.json

With `on_loss="continue"` the ranks of a replica ask each other in each step whether one of them has
met a loss.  2 replicas x 2 shards, four processes on this machine, plain SGD and `local_sgd`.  Runs
with "end" and with "continue" take turns; the median of a run's steps counts, and the median of the
differences of neighbouring runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_dsgd as dsgd
from benchmarks.sharded_memory import RANKS, join, sharded_model
from lightning_dsgd.lab.results import provenance, write_result

WARM_UP = 5
WAYS = ("end", "continue")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, args), nprocs=RANKS)
        steps = torch.load(f"{folder}/0.pt", weights_only=True)
    added = statistics.median(b - a for a, b in zip(steps["end"], steps["continue"], strict=True))
    row = {way: statistics.median(steps[way]) for way in WAYS} | {"added_ms": added}
    print({name: f"{value:.2f} ms" for name, value in row.items()})
    options = vars(args) | {"output": str(args.output)}
    write_result(provenance() | {"options": options, "rows": [row]}, args.output)


def run(rank: int, folder: str, args: argparse.Namespace) -> None:
    """All runs on one rank: milliseconds of a step in each."""
    mesh = join(rank, folder)
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            steps[way].append(1e3 * measure(way, mesh, args))
    if rank == 0:
        torch.save(steps, f"{folder}/0.pt")
    dist.destroy_process_group()


def measure(on_loss: str, mesh: Any, args: argparse.Namespace) -> float:
    """The median of a run's steps."""
    model = sharded_model(mesh, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, times = torch.randn(64, args.width), []
    with dsgd.decentralized(
        model,
        optimizer,
        dsgd.LocalSGD(sync_period=4),
        replicas=mesh["replica"],
        on_loss=on_loss,
        timeout_s=300,
    ):
        for _ in range(WARM_UP + args.steps):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    main()
