"""Trains one network with DDP and with a decentralised strategy, and shows both side by side.

    python examples/demo.py [--output FOLDER]

Four ranks on this machine classify handwritten digits.  In every step one random rank is held up
for a few milliseconds, as happens in clusters: DDP waits for it in every step, `wagma` only where
it averages over all ranks, every tenth step.  Both train for the same number of epochs.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "wagma")
RANKS = 4
EPOCHS = 20
DELAY_S = 0.02
EPOCH_LINE = "  epoch"


def train(strategy: str, folder: Path, epochs: int) -> None:
    """One rank of one job: Lightning starts this script again for each of the others."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_dsgd.callbacks import StragglerInjector
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
    L.seed_everything(0, verbose=False)
    history = History()
    checkpoint = ModelCheckpoint(
        folder, "digits", every_n_epochs=epochs, enable_version_counter=False
    )
    straggler = StragglerInjector(delay_s=DELAY_S, num_ranks=1, seed=0)
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
    trainer.fit(DigitsClassifier(), DigitsData(batch_size=16))
    if trainer.is_global_zero:
        result = {
            "rows": history.rows,
            "bytes_sent": history.bytes_sent,
            "checkpoint": checkpoint.best_model_path,
        }
        Path(folder, "result.json").write_text(json.dumps(result))


def run_job(strategy: str, folder: Path, epochs: int) -> dict[str, Any]:
    """All ranks of one job; shows its epochs, keeps the rest in a log file."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--output", str(folder)]
    command += ["--epochs", str(epochs), "--strategy", strategy]
    last_lines: collections.deque[str] = collections.deque(maxlen=40)
    print(f"\n{strategy}: starting {RANKS} ranks", flush=True)
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
    return dict(json.loads(result.read_text()))


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss over seconds, one line a strategy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    # Blue and orange, for those who cannot tell red from green; markers, for prints in grey.
    for (strategy, result), colour, marker in zip(
        results.items(), ("#0072B2", "#D55E00"), ("o", "s"), strict=True
    ):
        seconds = [row["seconds"] for row in result["rows"]]
        losses = [row["loss"] for row in result["rows"]]
        axes.plot(seconds, losses, color=colour, marker=marker, markersize=4, label=strategy)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss")
    axes.set_title(
        f"Digits, {RANKS} ranks, one random rank {DELAY_S * 1000:.0f} ms late in each step"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def show(results: dict[str, dict[str, Any]], image: Path) -> None:
    """The table at the end."""
    print(f"\n{'strategy':12}{'seconds':>9}{'accuracy':>10}{'MB sent a rank':>16}   checkpoint")
    for strategy, result in results.items():
        last = result["rows"][-1]
        sent = result["bytes_sent"]
        print(
            f"{strategy:12}{last['seconds']:9.1f}{last['accuracy']:10.1%}"
            f"{'not counted' if sent is None else f'{sent / 1e6:.1f}':>16}   {result['checkpoint']}"
        )
    print(f"\nLoss over time: {image}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Decentralised SGD beside DDP, on digits.")
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write to"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)  # set for the jobs that this starts
    args = parser.parse_args()
    output = args.output.resolve()
    if args.strategy:
        train(args.strategy, output, args.epochs)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = {name: run_job(name, output / name, args.epochs) for name in STRATEGIES}
    image = output / "loss.png"
    plot(results, image)
    show(results, image)


if __name__ == "__main__":
    main()
