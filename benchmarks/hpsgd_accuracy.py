"""Accuracy of `hpsgd` on digits after the same number of epochs as synchronous SGD, seed by seed.

    python benchmarks/hpsgd_accuracy.py --ranks 4 --epochs 30 --output FILE.json

Accuracy is that of the final model on the 360 images that are not trained on.  The ranks are
started once, and run one `Trainer.fit` after another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "hpsgd": ("hpsgd", {}),
    "hpsgd, sums that take 8 steps": ("hpsgd", {}),
    "local_sgd, sync_period=8": ("local_sgd", {"sync_period": 8}),
}


def run_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells = []
    for seed in range(args.seeds):
        for label in STRATEGIES:
            cells.append(fit(label, seed, args))
            if dist.get_rank() == 0:
                print(cells[-1], flush=True)
    if dist.get_rank() == 0:
        Path(args.part).write_text(json.dumps(cells))
    dist.barrier()
    dist.destroy_process_group()


def fit(label: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    import lightning as L
    import torch

    import lightning_dsgd
    from lightning_dsgd.algorithms.hpsgd import HPSGD
    from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData

    class Slow(HPSGD):
        """Looks whether the sum is there only at every eighth step: as on a slow link."""

        def after_update(self, x: Any) -> None:
            if self.in_flight is not None and self.num_local_steps < 7:
                self.num_local_steps += 1
                return
            super().after_update(x)

    class Clock(L.Callback):
        begin = seconds = 0.0
        figures: dict[str, float] | None = None

        def on_train_start(self, *_: Any) -> None:
            self.begin = time.perf_counter()

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            self.seconds = time.perf_counter() - self.begin
            self.figures = trainer.strategy.communication()

    name, options = STRATEGIES[label]
    if label.startswith("hpsgd,"):
        strategy = lightning_dsgd.DecentralizedStrategy(Slow())
    else:
        strategy = lightning_dsgd.STRATEGIES[name](**options)
    L.seed_everything(seed, verbose=False)
    data, model, clock = DigitsData(), DigitsClassifier(), Clock()
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=args.epochs,
        callbacks=[clock],
    ).fit(model, data)
    model.eval()
    right = total = 0
    with torch.no_grad():
        for split in ("val", "test"):
            for images, digits in torch.utils.data.DataLoader(data.splits[split], 180):
                right += int((model(images).argmax(1) == digits).sum())
                total += len(digits)
    return {
        "strategy": label,
        "seed": seed,
        "accuracy": 100 * right / total,
        "seconds": clock.seconds,
        "local_steps_per_sync": (clock.figures or {}).get("local_steps_per_sync"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="docs/results/hpsgd_accuracy.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.ranks), __file__, "--part", str(part)]
        command += ["--epochs", str(args.epochs), "--seeds", str(args.seeds)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        cells = json.loads(part.read_text())
    for label in STRATEGIES:
        values = [cell["accuracy"] for cell in cells if cell["strategy"] == label]
        print(
            f"{label:32} {statistics.mean(values):.2f} % ("
            + ", ".join(f"{v:.2f}" for v in values)
            + ")"
        )
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {"command": " ".join(["python", "benchmarks/hpsgd_accuracy.py", *sys.argv[1:]])}
    output.write_text(json.dumps({**report, "ranks": args.ranks, "cells": cells}, indent=1))
    print(f"written: {output}")


if __name__ == "__main__":
    main()
