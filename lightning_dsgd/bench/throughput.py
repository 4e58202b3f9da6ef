"""Steps per second of several strategies, in one job, with simulated computation and stragglers.

    lightning-dsgd bench throughput --strategies ddp,wagma,wagma:overlap=true,no_sync --ranks 8 \
        --compute-ms 400 --delay-ms 320 --delayed-ranks 2 --params 1e6 --steps 30 --output FILE.json

All ranks are started once, through `torchrun`; then they run one `Trainer.fit` after another, every
strategy once a round, in an order that changes from round to round.  Computation is a sleep, so
that many ranks fit on few cores, and the same random ranks are delayed for every strategy of a
round.

A round of a strategy gives: steps / (time until the slowest rank has done its last step).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

STATISTICS = ("steps_per_s", "wait_s_per_step", "mb_sent_per_step", "late_share")


def parse_strategy(spec: str) -> tuple[str, dict[str, Any]]:
    """`wagma:overlap=true:grace_s=0.02` as a name and its hyperparameters."""
    name, *options = spec.split(":")
    pairs = (option.split("=", 1) for option in options)
    return name, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def run_rank(args: argparse.Namespace) -> None:
    """What every process does: all cells, one after the other."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    specs = args.strategies.split(",")
    for turn in range(args.rounds):
        shift = turn % len(specs)
        for spec in specs[shift:] + specs[:shift]:
            cell = run_cell(spec, turn, args)
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, cell)
            slowest = max(rank["seconds"] for rank in everyones)
            results.append(
                {
                    "strategy": spec,
                    "round": turn,
                    "steps_per_s": args.steps / slowest,
                    "seconds": [rank["seconds"] for rank in everyones],
                    **{
                        name: statistics.mean(rank[name] for rank in everyones)
                        for name in STATISTICS[1:]
                        if name in everyones[0]
                    },
                }
            )
            if dist.get_rank() == 0:
                print(
                    f"round {turn + 1}/{args.rounds}  {spec:32} "
                    f"{results[-1]['steps_per_s']:.3f} steps/s",
                    flush=True,
                )
    if dist.get_rank() == 0:
        Path(args.part).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run_cell(spec: str, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    """One fit of one strategy on this rank."""
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_dsgd
    from lightning_dsgd.callbacks import StragglerInjector

    class Sleeper(L.LightningModule):
        """So many parameters, and a step that takes so long and computes next to nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(int(float(args.params))))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(args.compute_ms / 1e3)
            return self.weight[:1000].sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.begin = self.end = 0.0
            self.before: dict[str, float] = {}
            self.after: dict[str, float] = {}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            torch.distributed.barrier()
            self.before = self.figures(trainer)
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.end = time.perf_counter()
            if trainer.global_step == args.steps:
                self.after = self.figures(trainer)

        @staticmethod
        def figures(trainer: Any) -> dict[str, float]:
            ours = hasattr(trainer.strategy, "communication")
            return trainer.strategy.communication() if ours else {}

    name, options = parse_strategy(spec)
    strategy: Any = name
    if options:
        strategy = lightning_dsgd.STRATEGIES[name](**options)
    clock = Clock()
    L.seed_everything(turn, verbose=False)
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, StragglerInjector(args.delay_ms / 1e3, args.delayed_ranks, seed=turn)],
    ).fit(
        Sleeper(),
        DataLoader(TensorDataset(torch.zeros(args.steps * int(os.environ["WORLD_SIZE"]), 1))),
    )
    cell: dict[str, Any] = {"seconds": clock.end - clock.begin}
    if clock.after:
        for name, key, unit in (
            ("wait_s", "wait_s_per_step", 1),
            ("bytes_sent", "mb_sent_per_step", 1e6),
        ):
            cell[key] = (clock.after[name] - clock.before[name]) / args.steps / unit
        if "late_share" in clock.after:
            cell["late_share"] = clock.after["late_share"]
    return cell


def summarize(cells: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Per strategy the medians over the rounds, and the median of the ratios within each round."""
    by_round: dict[int, dict[str, float]] = {}
    for cell in cells:
        by_round.setdefault(cell["round"], {})[cell["strategy"]] = cell["steps_per_s"]
    rows = []
    for spec in dict.fromkeys(cell["strategy"] for cell in cells):
        mine = [cell for cell in cells if cell["strategy"] == spec]
        row: dict[str, Any] = {"strategy": spec}
        for name in STATISTICS:
            values = [cell[name] for cell in mine if name in cell]
            row[name] = statistics.median(values) if values else None
        for other, key in ((baseline, "ratio"), ("no_sync", "of_no_sync")):
            ratios = [r[spec] / r[other] for r in by_round.values() if spec in r and other in r]
            row[key] = statistics.median(ratios) if ratios else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], baseline: str) -> str:
    """The summary in Markdown."""
    lines = [
        f"| strategy | steps/s | x {baseline} | of no_sync | waited, ms a step | MB sent a step "
        "| late |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [
            f"{row['steps_per_s']:.2f}",
            _or_dash(row["ratio"], "{:.2f}"),
            _or_dash(row["of_no_sync"], "{:.2f}"),
            _or_dash(row["wait_s_per_step"], "{:.0f}", 1e3),
            _or_dash(row["mb_sent_per_step"], "{:.2f}"),
            _or_dash(row["late_share"], "{:.0%}"),
        ]
        lines.append(f"| `{row['strategy']}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def _or_dash(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(factor * value)


def main(argv: list[str] | None = None) -> None:
    """Starts the ranks, waits for them, and writes the result file."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench throughput", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--strategies", default="ddp,local_sgd:sync_period=1,wagma,no_sync")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute-ms", type=float, default=400.0)
    parser.add_argument("--delay-ms", type=float, default=320.0)
    parser.add_argument("--delayed-ranks", type=int, default=2)
    parser.add_argument("--params", default="1e6")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="throughput.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # where rank 0 leaves the cells
    args = parser.parse_args(argv)
    if args.part:
        run_rank(args)
        return
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_suffix(".part")
    given = sys.argv[1:] if argv is None else argv
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(args.ranks), "-m", "lightning_dsgd.bench.throughput"]
    subprocess.run(
        [*launch, *given, "--part", str(part)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    cells = json.loads(part.read_text())
    part.unlink()
    import lightning
    import torch

    import lightning_dsgd

    baseline = args.strategies.split(",")[0]
    rows = summarize(cells, baseline)
    report = {
        "command": "lightning-dsgd bench throughput " + " ".join(given),
        "network": "loopback",
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_dsgd": lightning_dsgd.__version__,
        },
        "summary": rows,
        "cells": cells,
    }
    output.write_text(json.dumps(report, indent=1))
    print(table(rows, baseline))
    print(f"\nwritten: {output}")


if __name__ == "__main__":
    main()
