"""How long `balanced` takes beside `ddp`, at the same loss.

    python benchmarks/balanced.py                 # real: 4 processes, about ten minutes
    python benchmarks/balanced.py --virtual       # in virtual time: 4, 8 and 16 ranks
    python benchmarks/balanced.py --workers 2     # with workers of the loaders, beside none
    python benchmarks/balanced.py --workers 2 --strategy ddp

Both accumulate `k` micro-batches for a step, with the same rate, data and optimizer.  A micro-batch
is a small network's forward and backward pass and a sleep; with k = 4 it takes 80 ms, with 8 40 ms.

    alike      all ranks take as long
    slow       rank 1 takes twice as long
    late       one rank by chance is late by 0.8 of a step, before it begins
    stalls     a rank's step takes min(Pareto(1.6), 8.7) times as long, drawn for rank and step

Real cells: `ddp` and `balanced` alternate in the same processes, situation by situation, and a
ratio is one of two fits that follow each other.  The first two steps of a fit are not timed.

With --workers a strategy alternates with itself: without workers and with so many for each rank,
which load micro-batches ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result

SITUATIONS = ("alike", "slow", "late", "stalls")
NAMES = ("ddp", "balanced")
WITH_WORKERS = " with workers"
"""Stands behind a strategy's name."""
UNIT_S = {4: 0.08, 8: 0.04}
LATE = 0.8
WARM_UP = 2


class Pace:
    """How long the ranks of a situation take; the same draws for all strategies.

    Args:
        situation: one of `SITUATIONS`
        num_ranks: how many ranks there are
        num_steps: how many steps they make
        seed: of the draws
    """

    def __init__(self, situation: str, num_ranks: int, num_steps: int, seed: int) -> None:
        chance = random.Random(f"{situation} {num_ranks} {seed}")
        self.situation = situation
        num_late = max(1, num_ranks // 4)
        self.late = [set(chance.sample(range(num_ranks), num_late)) for _ in range(num_steps)]
        self.factors = [
            [min(chance.paretovariate(1.6), 8.7) for _ in range(num_ranks)]
            for _ in range(num_steps)
        ]

    def factor(self, rank: int, step: int) -> float:
        """By how much a rank's micro-batch takes longer than one takes usually."""
        if self.situation == "slow":
            return 2.0 if rank == 1 else 1.0
        return self.factors[step][rank] if self.situation == "stalls" else 1.0

    def delay(self, rank: int, step: int) -> float:
        """How late a rank begins a step, as a share of a step."""
        return LATE if self.situation == "late" and rank in self.late[step] else 0.0

    def of_ddp(self, num_ranks: int, num_steps: int) -> float:
        """How long DDP takes, in steps, but for its sums."""
        return sum(
            max(self.factor(rank, step) + self.delay(rank, step) for rank in range(num_ranks))
            for step in range(num_steps)
        )


# ---- in virtual time ----


def virtual(num_ranks: int, k: int, situation: str, *, backups: bool, seed: int) -> float:
    """The time of `balanced` as a share of DDP's."""
    from lightning_dsgd.algorithm import Conditions
    from lightning_dsgd.algorithms.balanced import Balanced
    from lightning_dsgd.data.units.dealing import UnitDealing
    from lightning_dsgd.data.units.protocol import NONE
    from lightning_dsgd.simulated import SimulatedWorld

    num_steps = 40
    pace = Pace(situation, num_ranks, num_steps, seed)

    def train(net: Any) -> float:
        algorithm, x = Balanced(backups=backups), torch.zeros(4)
        algorithm.start(net.sub("sums"), x, Conditions(gradient_counts=torch.zeros(1).long()))
        dealing = UnitDealing(net.sub("units"), backups=backups, on_closed=algorithm.close_step)
        dealing.know(0, [[rank for _ in range(k) for rank in range(num_ranks)]] * num_steps)
        for step in range(num_steps):
            dealing.begin_step(step)
            is_first = True
            while (unit := dealing.take(waits=True)) != NONE:
                late = pace.delay(net.rank, step) if is_first else 0.0
                is_first = False
                net.compute(late + pace.factor(net.rank, step) / k)
                mine = [torch.full((4,), float(unit))]
                dealing.finish(lambda: algorithm.add(step, unit, lambda flat: [flat], mine))  # noqa: B023
            algorithm.take_sum(step)
        net.sub("end").barrier().wait()
        dealing.close()
        algorithm.stop()
        return float(net.now())

    world = SimulatedWorld(num_ranks, latency_s=2e-4, strict=False)
    return max(world.run(train)) / pace.of_ddp(num_ranks, num_steps)


def in_virtual_time(path: Path) -> None:
    rows = []
    for num_ranks in (4, 8, 16):
        for k in (4, 8):
            for situation in SITUATIONS:
                for backups in (False, True):
                    shares = [
                        virtual(num_ranks, k, situation, backups=backups, seed=seed)
                        for seed in range(3)
                    ]
                    row = {
                        "ranks": num_ranks,
                        "k": k,
                        "situation": situation,
                        "backups": backups,
                        "share_of_ddp": round(statistics.median(shares), 3),
                    }
                    rows.append(row)
                    print(row, flush=True)
    told = {"hyperparameters": in_force(["balanced", "balanced:backups=false"], [4, 8, 16])}
    write_result({**provenance(), **told, "rows": rows}, path)


# ---- real processes ----


def rank_main(settings: dict[str, Any]) -> None:
    """All fits of one rank."""
    import lightning as L
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_dsgd  # noqa: F401

    torch.set_num_threads(1)
    num_ranks, num_steps = int(os.environ["WORLD_SIZE"]), settings["steps"]

    class Model(L.LightningModule):
        def __init__(self, pace: Pace, unit_s: float, k: int) -> None:
            super().__init__()
            L.seed_everything(1, verbose=False)
            self.net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
            self.pace, self.unit_s, self.k = pace, unit_s, k
            self.times: list[float] = []
            self.num_units = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % self.k == 0:
                time.sleep(
                    self.pace.delay(self.global_rank, self.global_step) * self.unit_s * self.k
                )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(self.pace.factor(self.global_rank, self.global_step) * self.unit_s)
            self.num_units += 1
            return nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % self.k == 0:
                self.times.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def fit(name: str, situation: str, k: int, seed: int) -> dict[str, Any]:
        num_workers = settings["workers"] if name.endswith(WITH_WORKERS) else 0
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(8 * num_ranks * k * num_steps, 32, generator=draw)
        data = TensorDataset(x, x.square().sum(1).sqrt())
        model = Model(Pace(situation, num_ranks, num_steps, seed), UNIT_S[k], k)
        L.Trainer(
            strategy=name.split()[0],
            accelerator="cpu",
            devices=num_ranks,
            max_epochs=1,
            accumulate_grad_batches=k,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, DataLoader(data, batch_size=8, num_workers=num_workers))
        with torch.no_grad():
            loss = nn.functional.mse_loss(model.net(x[:2048]).squeeze(-1), data.tensors[1][:2048])
        times = model.times
        return {
            "seconds": times[-1] - times[WARM_UP - 1],
            "loss": float(loss),
            "units": model.num_units,
        }

    rank = int(os.environ["RANK"])
    file = Path(settings["folder"], f"{rank}.jsonl")
    lines = []
    for seed in range(settings["rounds"]):
        for k in UNIT_S:
            for situation in settings["situations"]:
                names = settings["names"] if seed % 2 == 0 else settings["names"][::-1]
                for name in names:
                    found = fit(name, situation, k, seed)
                    cell = {"strategy": name, "situation": situation, "k": k, "round": seed}
                    lines.append(json.dumps({**cell, "rank": rank, **found}))
                    file.write_text("\n".join(lines))


def real(path: Path, args: argparse.Namespace) -> None:
    names = (args.strategy, args.strategy + WITH_WORKERS) if args.workers else NAMES
    situations = ("slow",) if args.workers else SITUATIONS
    counts = {"ranks": args.ranks, "steps": args.steps, "workers": args.workers}
    with tempfile.TemporaryDirectory() as folder:
        rank_settings = {**counts, "rounds": args.rounds, "names": names, "situations": situations}
        settings = json.dumps({**rank_settings, "folder": folder})
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(args.ranks), __file__, "--as-rank", settings),
            ],
            check=True,
        )
        files = Path(folder).glob("*.jsonl")
        every = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    every.sort(key=lambda each: each["rank"])
    cells = []
    for cell in (each for each in every if each["rank"] == 0):
        same = ("strategy", "situation", "k", "round")
        ranks = [e for e in every if all(e[n] == cell[n] for n in same)]
        cells.append(
            {n: cell[n] for n in same}
            | {
                "seconds": round(max(e["seconds"] for e in ranks), 3),
                "loss": cell["loss"],
                "units": [e["units"] for e in ranks],
            }
        )
    rows = summary(cells, *names)
    for row in rows:
        print(row)
    told = {"hyperparameters": in_force([args.strategy], [args.ranks])}
    settings_in_force = {**counts, "unit_s": UNIT_S, "lr": 3e-3}
    write_result({**provenance(), **told, **settings_in_force, "rows": rows, "cells": cells}, path)


def summary(cells: list[dict[str, Any]], first: str, second: str) -> list[dict[str, Any]]:
    """The median of the ratios of each pair, and how far the final losses are apart."""
    one, other = first.replace(" ", "_"), second.replace(" ", "_")
    rows = []
    for k in UNIT_S:
        for situation in SITUATIONS:
            mine = [c for c in cells if (c["k"], c["situation"]) == (k, situation)]
            if not mine:
                continue
            base, ours = (
                {cell["round"]: cell for cell in mine if cell["strategy"] == name}
                for name in (first, second)
            )
            ratios = [ours[r]["seconds"] / base[r]["seconds"] for r in sorted(ours)]
            apart = [abs(ours[r]["loss"] / base[r]["loss"] - 1) for r in ours]
            rows.append(
                {
                    "k": k,
                    "situation": situation,
                    f"{one}_s": round(statistics.median(c["seconds"] for c in base.values()), 2),
                    f"{other}_s": round(statistics.median(c["seconds"] for c in ours.values()), 2),
                    f"share_of_{one}": round(statistics.median(ratios), 3),
                    "least": round(min(ratios), 3),
                    "most": round(max(ratios), 3),
                    "loss_apart": float(f"{max(apart):.1e}"),
                    "rounds": len(ratios),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", action="store_true", help="in virtual time")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
    parser.add_argument(
        "--strategy", choices=NAMES[::-1], default="balanced", help="with --workers"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(__file__).parents[1] / "docs" / "results" / "balanced"
    if args.as_rank is not None:
        rank_main(args.as_rank)
    elif args.virtual:
        in_virtual_time(args.output or folder / "virtual.json")
    else:
        name = f"workers_{args.strategy}.json" if args.workers else "real.json"
        real(args.output or folder / name, args)


if __name__ == "__main__":
    main()
