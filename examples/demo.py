"""How soon is a network as good with a decentralised strategy as with DDP?

    python examples/demo.py [--output FOLDER] [--seeds N] [--lrs 0.02,0.05]

Four ranks on this machine classify handwritten digits.  In every step one random rank is held up
for 50 milliseconds, as happens in clusters: DDP waits for it in every step, `wagma` only where it
averages over all ranks, every hundredth step.  Both train for the same number of epochs, with the
same seeds and the same learning rates.  The target is 99% of the accuracy that DDP has in the end,
with the learning rate that gives it the best; each seed has its own.  Each strategy is shown with
the learning rate with which it is there soonest.

The table has medians over the seeds; how many times as soon is the median of each seed's quotient.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "wagma")
BASELINE = "ddp"
TARGET_SHARE = 0.99
RANKS = 4
EPOCHS = 10
SPLIT = (1077, 720, 0)
"""One image of 720 is 0.14 points."""
DELAY_S = 0.05
EPOCH_LINE = "  epoch"

Job = dict[str, Any]


def train(strategy: str, folder: Path, epochs: int, lr: float, seed: int) -> None:
    """One rank of one job: Lightning starts this script again for each of the others."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_dsgd.lab.callbacks import StragglerInjector
    from lightning_dsgd.tasks import DigitsClassifier, DigitsData

    class History(L.Callback):
        """One line and one row an epoch, on rank 0."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.rows: list[dict[str, float]] = []
            self.bytes_sent: float | None = None
            self.begin = time.monotonic()

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            row = {
                "seconds": time.monotonic() - self.begin,
                "loss": float(trainer.callback_metrics["val_loss"]),
                "accuracy": float(trainer.callback_metrics["val_accuracy"]),
            }
            self.rows.append(row)
            if trainer.is_global_zero:
                print(
                    f"{EPOCH_LINE} {len(self.rows):2}/{epochs}  {row['seconds']:5.1f} s  "
                    f"validation loss {row['loss']:.3f}  accuracy {row['accuracy']:6.1%}",
                    flush=True,
                )

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if strategy != "ddp":
                self.bytes_sent = trainer.strategy.communication()["bytes_sent"]

    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    history = History()
    checkpoint = ModelCheckpoint(
        folder, "digits", every_n_epochs=epochs, enable_version_counter=False
    )
    straggler = StragglerInjector(delay_s=DELAY_S, num_ranks=1, seed=seed)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=epochs,
        callbacks=[history, checkpoint, straggler],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsClassifier(lr=lr), DigitsData(batch_size=16, split=SPLIT))
    if trainer.is_global_zero:
        result = {
            "rows": history.rows,
            "bytes_sent": history.bytes_sent,
            "checkpoint": checkpoint.best_model_path,
        }
        Path(folder, "result.json").write_text(json.dumps(result))


def run_job(strategy: str, folder: Path, epochs: int, lr: float, seed: int, progress: str) -> Job:
    """All ranks of one job; shows its epochs, keeps the rest in a log file."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--output", str(folder)]
    command += ["--epochs", str(epochs), "--lrs", str(lr), "--seed", str(seed)]
    command += ["--strategy", strategy]
    last_lines: collections.deque[str] = collections.deque(maxlen=40)
    print(f"\n{progress}: {strategy}, learning rate {lr:g}, seed {seed}, {RANKS} ranks", flush=True)
    with (
        open(folder / "job.log", "w") as log,
        subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as job,
    ):
        assert job.stdout is not None
        try:
            for line in job.stdout:
                log.write(line)
                last_lines.append(line)
                if line.startswith(EPOCH_LINE):
                    print(line, end="", flush=True)
        except BaseException:  # Ctrl-C, or SIGTERM: no rank is to train on
            os.killpg(job.pid, signal.SIGKILL)
            raise
    if job.returncode or not result.exists():
        sys.stderr.writelines(last_lines)
        sys.exit(f"{strategy} failed with exit code {job.returncode}; all it said: {log.name}")
    return {"strategy": strategy, "lr": lr, "seed": seed} | json.loads(result.read_text())


def of_lr(jobs: Sequence[Job], lr: float) -> list[Job]:
    return [job for job in jobs if job["lr"] == lr]


def targets_of(jobs: Sequence[Job], lrs: Sequence[float]) -> dict[int, float]:
    """By seed, at the learning rate with the best mean of the final accuracies."""

    def final(lr: float) -> float:
        return statistics.mean(job["rows"][-1]["accuracy"] for job in of_lr(jobs, lr))

    best = of_lr(jobs, max(lrs, key=final))
    return {job["seed"]: TARGET_SHARE * job["rows"][-1]["accuracy"] for job in best}


def soonest(jobs: Sequence[Job], lrs: Sequence[float], targets: dict[int, float]) -> list[Job]:
    """Those with the learning rate that they reach the target soonest with, in the median."""
    return of_lr(jobs, min(lrs, key=lambda lr: median_seconds(of_lr(jobs, lr), targets)))


def seconds_to(job: Job, accuracy: float) -> float:
    """When it was reached for the first time; infinite if never."""
    reached = (row["seconds"] for row in job["rows"] if row["accuracy"] >= accuracy)
    return next(reached, float("inf"))


def median_seconds(jobs: Sequence[Job], targets: dict[int, float]) -> float:
    """To the target, over the seeds; infinite if half of them never reach it."""
    return statistics.median(seconds_to(job, targets[job["seed"]]) for job in jobs)


def plot(best: dict[str, list[Job]], targets: dict[int, float], path: Path) -> None:
    """Accuracy over seconds, one line a seed, and when each strategy reaches the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    target = 100 * statistics.median(targets.values())
    words = f"target: {TARGET_SHARE:.0%} of {BASELINE}'s final accuracy"
    axes.axhline(target, color="grey", linewidth=1, linestyle=":", label=words)
    # Blue and orange, for those who cannot tell red from green; markers, for prints in grey.
    for (strategy, jobs), colour, marker in zip(
        best.items(), ("#0072B2", "#D55E00"), ("o", "s"), strict=True
    ):
        at = median_seconds(jobs, targets)
        words = f"{strategy}: {at:.1f} s to the target" if at < float("inf") else strategy
        for job in jobs:
            seconds = [row["seconds"] for row in job["rows"]]
            accuracies = [100 * row["accuracy"] for row in job["rows"]]
            style = {"color": colour, "marker": marker, "markersize": 4, "alpha": 0.7}
            axes.plot(seconds, accuracies, label=words, **style)
            words = "_"  # one entry in the legend for all seeds
        if at < float("inf"):
            axes.axvline(at, color=colour, linewidth=1, linestyle="--")
    second_epochs = [job["rows"][:2][-1]["accuracy"] for jobs in best.values() for job in jobs]
    axes.set_ylim(100 * min(second_epochs) - 1, 100.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation accuracy in percent")
    axes.set_title(
        f"Digits, {RANKS} ranks, one random rank {DELAY_S * 1000:.0f} ms late in each step"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def show(best: dict[str, list[Job]], targets: dict[int, float]) -> None:
    """The table at the end: medians over the seeds."""
    print(
        f"{'strategy':10}{'lr':>6}{'seconds':>9}{'accuracy':>10}{'s to target':>13}"
        f"{'times as soon':>15}{'MB sent by a rank':>19}"
    )
    base = {job["seed"]: seconds_to(job, targets[job["seed"]]) for job in best[BASELINE]}
    for strategy, jobs in best.items():
        seconds = median_seconds(jobs, targets)
        times = statistics.median(
            base[job["seed"]] / seconds_to(job, targets[job["seed"]]) for job in jobs
        )
        sent = jobs[0]["bytes_sent"]
        print(
            f"{strategy:10}{jobs[0]['lr']:6g}"
            f"{statistics.median(job['rows'][-1]['seconds'] for job in jobs):9.1f}"
            f"{statistics.median(job['rows'][-1]['accuracy'] for job in jobs):10.1%}"
            f"{'never' if seconds == float('inf') else f'{seconds:.1f}':>13}{times:15.2f}"
            f"{'not counted' if sent is None else f'{sent / 1e6:.1f}':>19}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write to"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--lrs", default="0.02,0.05", help="learning rates to choose from")
    parser.add_argument("--strategy", help=argparse.SUPPRESS)  # set for the jobs that this starts
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    output, lrs = args.output.resolve(), [float(lr) for lr in args.lrs.split(",")]
    if args.strategy:
        train(args.strategy, output, args.epochs, lrs[0], args.seed)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked = [(name, lr, seed) for seed in range(args.seeds) for lr in lrs for name in STRATEGIES]
    jobs = [
        run_job(
            name,
            output / f"{name}-lr{lr:g}-seed{seed}",
            args.epochs,
            lr,
            seed,
            f"{number} of {len(asked)}",
        )
        for number, (name, lr, seed) in enumerate(asked, 1)
    ]
    of = {name: [job for job in jobs if job["strategy"] == name] for name in STRATEGIES}
    targets = targets_of(of[BASELINE], lrs)
    best = {name: soonest(mine, lrs, targets) for name, mine in of.items()}
    print(
        f"\nMedians over the seeds ({args.seeds}), at the soonest of the learning rates {args.lrs}:"
    )
    show(best, targets)
    from lightning_dsgd.lab.in_force import in_force  # loads torch
    from lightning_dsgd.lab.results import provenance, write_result

    figures = [{key: job[key] for key in job if key != "checkpoint"} for job in jobs]
    made = provenance() | {"hyperparameters": in_force(STRATEGIES, [RANKS])}
    write_result(made | {"jobs": figures}, output / "demo.json")
    plot(best, targets, output / "accuracy.png")
    print(f"Accuracy over time: {output / 'accuracy.png'}")
    print(f"Checkpoints: {', '.join(mine[-1]['checkpoint'] for mine in best.values())}")


if __name__ == "__main__":
    main()
