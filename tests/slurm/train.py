"""What a job trains: `python train.py FOLDER [OPTIONS]`; each rank writes what it has there."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, weights

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--strategy", choices=("wagma", "balanced"), default="wagma")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--nodes", type=int, default=2)
parser.add_argument("--endless", action="store_true", help="in the job's first run")
parser.add_argument("--on-loss", choices=("end", "continue"), default="end")
parser.add_argument("--startup-timeout-s", type=float, default=300.0)
parser.add_argument("--dies", type=int, default=-1, help="the rank that is killed")
parser.add_argument("--saves", action="store_true", help="when it ends by a signal; and resumes")
parser.add_argument("--workers", type=int, default=0, help="processes that load data")
parser.add_argument("--requeue-signal", default="SIGUSR1")
args = parser.parse_args()
MORE_STEPS = 4
"""After a resume."""

torch.set_num_threads(1)
L.seed_everything(0)
run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
told: dict[str, Any] = {"first_step": None}


class Slow(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)  # it computes
        return super().training_step(batch, batch_idx)


class Watch(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        told["first_step"] = trainer.global_step
        told["transport"] = type(trainer.strategy.session.net).__name__

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        done = trainer.global_step - told["first_step"]
        if done == 4 and trainer.global_rank == args.dies and not run:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == 5:
            Path(args.folder, f"trains_{run}_{trainer.global_rank}").touch()
        if done >= MORE_STEPS and (run or not args.endless) and args.saves:
            trainer.should_stop = True

    def on_exception(
        self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException
    ) -> None:
        told["exception"] = f"{type(exception).__name__}: {exception}"


args.folder.mkdir(parents=True, exist_ok=True)
callbacks: list[L.Callback] = [Watch()]
if args.saves:
    folder = args.folder / "checkpoints"
    callbacks.append(ModelCheckpoint(folder, save_last=True, save_on_exception=True))
plugins: list[Any] = []
if args.requeue_signal != "SIGUSR1":
    asked = signal.Signals[args.requeue_signal]
    plugins = [SLURMEnvironment(requeue_signal=asked)]
trainer = L.Trainer(
    strategy=strategy_of(
        args.strategy,
        on_loss=args.on_loss,
        startup_timeout_s=args.startup_timeout_s,
        heartbeat_timeout_s=5.0,
    ),
    accelerator="cpu",
    devices=args.devices,
    num_nodes=args.nodes,
    max_epochs=100_000 if args.endless else 1,
    logger=False,
    callbacks=callbacks,
    plugins=plugins,
    enable_checkpointing=args.saves,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=args.folder,
)
model = Slow()
try:
    trainer.fit(
        model,
        loader(num_workers=args.workers),
        ckpt_path="last" if args.saves else None,
    )
finally:
    told |= {
        "weights": weights(model),
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "steps": trainer.global_step,
        "place": (trainer.node_rank, trainer.local_rank),
    }
    torch.save(told, args.folder / f"run_{run}_rank_{trainer.global_rank}.pt")
