"""How soon is a network as good with a decentralised strategy as with DDP?

    python examples/demo.py [--output FOLDER] [--seeds N] [--lrs 0.02,0.05]

Four ranks on this machine classify handwritten digits.  In every step one random rank is held up
for 50 milliseconds, as happens in clusters: DDP waits for it in every step, `wagma` only where it
averages over all ranks, every hundredth step.  Both train for the same number of epochs.  The
target is 99% of the accuracy that DDP has in the end.

With several seeds the table shows medians, and how many times as soon is the median over the seeds.
With several learning rates each strategy has the one that gives it the best final accuracy.
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
EPOCHS = 20
DELAY_S = 0.05
EPOCH_LINE = "  epoch"

Job = dict[str, Any]


def train(strategy: str, folder: Path, epochs: int, lr: float, seed: int) -> None:
    """One rank of one job: Lightning starts this script again for each of the others."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_dsgd.tasks import DigitsClassifier, DigitsData
    from lightning_dsgd.trainer.callbacks import StragglerInjector

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
    trainer.fit(DigitsClassifier(lr=lr), DigitsData(batch_size=16))
    if trainer.is_global_zero:
        result = {
            "rows": history.rows,
            "bytes_sent": history.bytes_sent,
            "checkpoint": checkpoint.best_model_path,
        }
        Path(folder, "result.json").write_text(json.dumps(result))


def run_job(strategy: str, folder: Path, epochs: int, lr: float, seed: int) -> Job:
    """All ranks of one job; shows its epochs, keeps the rest in a log file."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--output", str(folder)]
    command += ["--epochs", str(epochs), "--lrs", str(lr), "--seed", str(seed)]
    command += ["--strategy", strategy]
    last_lines: collections.deque[str] = collections.deque(maxlen=40)
    print(f"\n{strategy}, learning rate {lr:g}, seed {seed}: starting {RANKS} ranks", flush=True)
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


def at_best_lr(jobs: Sequence[Job]) -> list[Job]:
    """Those with the learning rate that has the best mean of the final accuracies."""

    def mean(lr: float) -> float:
        return statistics.mean(job["rows"][-1]["accuracy"] for job in jobs if job["lr"] == lr)

    best = max(sorted({job["lr"] for job in jobs}), key=mean)
    return [job for job in jobs if job["lr"] == best]


def seconds_to(job: Job, accuracy: float) -> float:
    """When it was reached for the first time; infinite if never."""
    reached = (row["seconds"] for row in job["rows"] if row["accuracy"] >= accuracy)
    return next(reached, float("inf"))


def plot(shown: dict[str, Job], target: float, path: Path) -> None:
    """Accuracy over seconds, one line a strategy, and when each reaches the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    words = f"target: {TARGET_SHARE:.0%} of {BASELINE}'s final accuracy"
    axes.axhline(100 * target, color="grey", linewidth=1, linestyle=":", label=words)
    # Blue and orange, for those who cannot tell red from green; markers, for prints in grey.
    for (strategy, job), colour, marker in zip(
        shown.items(), ("#0072B2", "#D55E00"), ("o", "s"), strict=True
    ):
        seconds = [row["seconds"] for row in job["rows"]]
        accuracies = [100 * row["accuracy"] for row in job["rows"]]
        at = seconds_to(job, target)
        words = f"{strategy}: {at:.1f} s to the target" if at < float("inf") else strategy
        axes.plot(seconds, accuracies, color=colour, marker=marker, markersize=4, label=words)
        if at < float("inf"):
            axes.axvline(at, color=colour, linewidth=1, linestyle="--")
    lowest = min(job["rows"][min(2, len(job["rows"]) - 1)]["accuracy"] for job in shown.values())
    axes.set_ylim(100 * lowest - 1, 100.3)
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
        f"\n{'strategy':10}{'lr':>6}{'seconds':>9}{'accuracy':>10}{'s to target':>13}"
        f"{'times as soon':>15}{'MB sent by a rank':>19}"
    )
    base = {job["seed"]: seconds_to(job, targets[job["seed"]]) for job in best[BASELINE]}
    for strategy, jobs in best.items():
        to_target = {job["seed"]: seconds_to(job, targets[job["seed"]]) for job in jobs}
        seconds = statistics.median(to_target.values())
        times = statistics.median(base[seed] / mine for seed, mine in to_target.items())
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
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--lrs", default="0.05", help="learning rates, such as 0.02,0.05")
    parser.add_argument("--strategy", help=argparse.SUPPRESS)  # set for the jobs that this starts
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    output, lrs = args.output.resolve(), [float(lr) for lr in args.lrs.split(",")]
    if args.strategy:
        train(args.strategy, output, args.epochs, lrs[0], args.seed)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = [
        run_job(name, output / name, args.epochs, lr, seed)
        for seed in range(args.seeds)
        for lr in lrs
        for name in STRATEGIES
    ]
    best = {name: at_best_lr([j for j in jobs if j["strategy"] == name]) for name in STRATEGIES}
    targets = {job["seed"]: TARGET_SHARE * job["rows"][-1]["accuracy"] for job in best[BASELINE]}
    show(best, targets)
    if len(jobs) == len(STRATEGIES):
        print(
            "One seed and one learning rate.  Medians of three, each strategy at the better of two "
            "rates, take\nsix times as long: python examples/demo.py --seeds 3 --lrs 0.02,0.05"
        )
    from lightning_dsgd.results import provenance, write_result  # loads torch

    figures = [{key: job[key] for key in job if key != "checkpoint"} for job in jobs]
    write_result(provenance() | {"jobs": figures}, output / "demo.json")
    plot({name: mine[0] for name, mine in best.items()}, targets[0], output / "accuracy.png")
    print(f"Accuracy over time: {output / 'accuracy.png'}")
    print(f"Checkpoints: {', '.join(mine[-1]['checkpoint'] for mine in best.values())}")


if __name__ == "__main__":
    main()
