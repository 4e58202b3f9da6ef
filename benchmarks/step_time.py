"""What a strategy adds to a training step, against Lightning's own.

    python benchmarks/step_time.py --output docs/results/step_time.json

1. two gloo ranks, about 10M parameters, balanced work: `allreduce` against `ddp`;
2. one rank, a step of about 50 ms: `no_sync` against `SingleDeviceStrategy`.

Short fits of both alternate within one job; a sample is the ratio of the two medians of a round,
and the result is the median of the ratios.  One torch thread a rank.
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

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd

CASES = {"2 ranks": ("ddp", "allreduce"), "1 rank": ("auto", "no_sync")}


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


def fit(strategy: str, devices: int, args: argparse.Namespace) -> float:
    L.seed_everything(0, verbose=False)
    model = Network(args.width, args.depth)
    data = TensorDataset(
        torch.randn(args.batch_size * 64, args.width), torch.randint(10, (args.batch_size * 64,))
    )
    clock = Clock()
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    ).fit(model, DataLoader(data, args.batch_size))
    return clock.median_s()


def run_rank(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = CASES[args.case]
    devices = int(os.environ.get("WORLD_SIZE", 1))
    samples: list[dict[str, float]] = []
    for turn in range(args.rounds + 1):
        order = names if turn % 2 else names[::-1]
        sample = {name: fit(name, devices, args) for name in order}
        if turn:  # the first round warms up
            samples.append({name: sample[name] for name in names})
    ratios = [sample[names[1]] / sample[names[0]] for sample in samples]
    parameters = sum(p.numel() for p in Network(args.width, args.depth).parameters())
    result = {
        "case": args.case,
        "parameters": parameters,
        "batch_size": args.batch_size,
        "baseline": names[0],
        "strategy": names[1],
        "baseline_ms": 1e3 * statistics.median(sample[names[0]] for sample in samples),
        "strategy_ms": 1e3 * statistics.median(sample[names[1]] for sample in samples),
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "samples_s": samples,
    }
    if int(os.environ.get("RANK", 0)) == 0:
        Path(args.output).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_case(case: str, options: list[str], output: Path) -> dict[str, Any]:
    part = output.with_suffix(f".{case[0]}.tmp")
    launch = [sys.executable]
    if case == "2 ranks":
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, __file__, "--case", case, "--output", str(part), *options]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result: dict[str, Any] = json.loads(part.read_text())
    part.unlink()
    print(
        f"{case}: {result['strategy']} {result['strategy_ms']:.1f} ms, {result['baseline']} "
        f"{result['baseline_ms']:.1f} ms a step; median ratio {result['median_ratio']:.3f} "
        f"(from {min(result['ratios']):.3f} to {max(result['ratios']):.3f})"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", default="docs/results/step_time.json")
    args = parser.parse_args()
    if args.case:
        run_rank(args)
        return
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    options = ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    options += ["--width", str(args.width), "--depth", str(args.depth)]
    options += ["--batch-size", str(args.batch_size)]
    results = [run_case(case, options, output) for case in CASES]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "lightning_dsgd": lightning_dsgd.__version__,
    }
    report = {"command": "python benchmarks/step_time.py", "cores": os.cpu_count()}
    output.write_text(json.dumps({**report, "versions": versions, "cases": results}, indent=1))
    print(f"written: {output}")


if __name__ == "__main__":
    main()
