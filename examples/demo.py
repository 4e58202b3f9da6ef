"""How much sooner is `balanced` at DDP's loss, where one of four ranks is slow?

    python examples/demo.py [--output FOLDER] [--seeds N] [--strategies ddp,balanced,popsgd]

Four ranks on this machine classify handwritten digits, with `accumulate_grad_batches=4`.  Each
micro-batch sleeps for 80 milliseconds, which stand for the work of an accelerator, so that four
ranks can be tried on a machine with two cores; on rank 1 it sleeps for 160.  DDP waits for rank 1
in every step.  With `balanced` the others take micro-batches of its share.  Both have the same
optimizer, rate, seeds and data, and their losses are equal but for rounding, which grows where
training is unsteady.

The table has medians over the seeds; the share of DDP's time is the median of each seed's share.
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

STRATEGIES = ("ddp", "balanced")
BASELINE = "ddp"
RANKS = 4
SLOW_RANK = 1
ACCUMULATE = 4
EPOCHS = 18
EPOCHS_A_ROW = 3
LR = 0.1
CLIP = 1.0
BATCH = 16
SPLIT = (1024, 773, 0)
"""An epoch is four steps of all ranks' micro-batches."""
MICRO_BATCH_S = 0.08
EPOCH_LINE = "  epoch"

Job = dict[str, Any]


def train(strategy: str, folder: Path, epochs: int, seed: int) -> None:
    """One rank of one job: Lightning starts this script again for each of the others."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_dsgd.tasks import DigitsClassifier, DigitsData

    class Digits(DigitsClassifier):
        """Takes its time; has no BatchNorm, whose statistics DDP takes from one rank."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            times = 2 if self.trainer.global_rank == SLOW_RANK else 1
            time.sleep(times * MICRO_BATCH_S)
            return super().training_step(batch, batch_idx)

    class History(L.Callback):
        """One line and one row an epoch, on rank 0."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.rows: list[dict[str, float]] = []
            self.begin = time.monotonic()

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            row = {
                "epoch": trainer.current_epoch + 1,
                "seconds": time.monotonic() - self.begin,
                "loss": float(trainer.callback_metrics["val_loss"]),
                "accuracy": float(trainer.callback_metrics["val_accuracy"]),
            }
            self.rows.append(row)
            if trainer.is_global_zero:
                print(
                    f"{EPOCH_LINE} {row['epoch']:2}/{epochs}  {row['seconds']:5.1f} s  "
                    f"validation loss {row['loss']:.4f}  accuracy {row['accuracy']:6.1%}",
                    flush=True,
                )

    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    history = History()
    checkpoint = ModelCheckpoint(
        folder, "digits", every_n_epochs=epochs, enable_version_counter=False
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        max_epochs=epochs,
        check_val_every_n_epoch=EPOCHS_A_ROW,
        callbacks=[history, checkpoint],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(lr=LR, batch_norm=False), DigitsData(batch_size=BATCH, split=SPLIT))
    if trainer.is_global_zero:
        result = {"rows": history.rows, "checkpoint": checkpoint.best_model_path}
        Path(folder, "result.json").write_text(json.dumps(result))


def run_job(strategy: str, folder: Path, epochs: int, seed: int, progress: str) -> Job:
    """All ranks of one job; shows its epochs, keeps the rest in a log file."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--output", str(folder)]
    command += ["--epochs", str(epochs), "--seed", str(seed), "--strategy", strategy]
    last_lines: collections.deque[str] = collections.deque(maxlen=40)
    print(f"\n{progress}: {strategy}, seed {seed}, {RANKS} ranks", flush=True)
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
    return {"strategy": strategy, "seed": seed} | json.loads(result.read_text())


def median(jobs: Sequence[Job], figure: str) -> float:
    """A figure at the end of training, over the seeds."""
    return statistics.median(job["rows"][-1][figure] for job in jobs)


def share_of_time(jobs: Sequence[Job], baseline: Sequence[Job]) -> float:
    """How long training takes beside the baseline's of the same seed, over the seeds."""
    base = {job["seed"]: job["rows"][-1]["seconds"] for job in baseline}
    return statistics.median(job["rows"][-1]["seconds"] / base[job["seed"]] for job in jobs)


def show(of: dict[str, list[Job]]) -> None:
    """Prints a row for each strategy: its medians over the seeds, and its share of DDP's time."""
    heads = ("final loss", "accuracy", "seconds", f"of {BASELINE}'s time")
    print("strategy  " + "".join(f"{head:>16}" for head in heads))
    for strategy, jobs in of.items():
        print(
            f"{strategy:10}{median(jobs, 'loss'):16.4f}{median(jobs, 'accuracy'):16.1%}"
            f"{median(jobs, 'seconds'):16.1f}{share_of_time(jobs, of[BASELINE]):16.2f}"
        )


def plot(of: dict[str, list[Job]], path: Path) -> None:
    """Loss against epochs, which is one curve for both, and against seconds, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_epoch, by_time) = plt.subplots(
        1, 2, figsize=(10, 4.5), layout="constrained", sharey=True
    )
    # Colours for those who cannot tell red from green; markers, for prints in grey.
    colours, markers = ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), "osD^"
    for place, (strategy, jobs) in enumerate(of.items()):
        words = f"{strategy}: {median(jobs, 'seconds'):.1f} s"
        style = {"color": colours[place % 4], "marker": markers[place % 4], "alpha": 0.7}
        for job in jobs:
            losses = [row["loss"] for row in job["rows"]]
            epochs = [row["epoch"] for row in job["rows"]]
            size = max(2, 8 - 4 * place)  # so that one shows behind the other
            by_epoch.plot(epochs, losses, markersize=size, **style)
            seconds = [row["seconds"] for row in job["rows"]]
            by_time.plot(seconds, losses, markersize=4, label=words, **style)
            words = "_"  # one entry in the legend for all seeds
    by_epoch.set_yscale("log")
    by_epoch.yaxis.set_major_formatter("{x:g}")
    by_epoch.yaxis.set_minor_formatter("{x:g}")
    by_epoch.set_xlabel("epochs")
    by_epoch.set_ylabel("validation loss")
    by_time.set_xlabel("seconds of training")
    by_time.set_xlim(left=0)
    for axes in (by_epoch, by_time):
        axes.grid(alpha=0.3, which="both")
    by_time.legend(loc="upper right")
    figure.suptitle(f"Digits, {RANKS} ranks, rank {SLOW_RANK} twice as slow")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write to"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help=f"what to compare with {BASELINE}"
    )
    parser.add_argument("--strategy", help=argparse.SUPPRESS)  # set for the jobs that this starts
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    output = args.output.resolve()
    if args.strategy:
        train(args.strategy, output, args.epochs, args.seed)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    strategies = list(dict.fromkeys([BASELINE, *args.strategies.split(",")]))
    asked = [(name, seed) for seed in range(args.seeds) for name in strategies]
    jobs = [
        run_job(name, output / f"{name}-seed{seed}", args.epochs, seed, f"{number} of {len(asked)}")
        for number, (name, seed) in enumerate(asked, 1)
    ]
    of = {name: [job for job in jobs if job["strategy"] == name] for name in strategies}
    print(f"\nMedians over the seeds ({args.seeds}):")
    show(of)
    from lightning_dsgd.lab.in_force import in_force  # loads torch
    from lightning_dsgd.lab.results import provenance, write_result

    figures = [{key: job[key] for key in job if key != "checkpoint"} for job in jobs]
    made = provenance() | {"hyperparameters": in_force(strategies, [RANKS])}
    write_result(made | {"jobs": figures}, output / "demo.json")
    plot(of, output / "loss.png")
    print(f"Loss over epochs and over time: {output / 'loss.png'}")
    print(f"Checkpoints: {', '.join(mine[-1]['checkpoint'] for mine in of.values())}")


if __name__ == "__main__":
    main()
