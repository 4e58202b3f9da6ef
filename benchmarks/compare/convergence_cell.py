"""What each rank does for one cell of `benchmarks convergence`: a fit of one strategy and seed."""

from __future__ import annotations

import time
from typing import Any, Final

import lightning as L
import torch

from benchmarks.compare import contestants
from benchmarks.compare.workloads import WORKLOADS
from lightning_dsgd.lab.callbacks import StragglerInjector
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.jobs.fit import communication
from lightning_dsgd.lab.jobs.run_cells import load

_SHOWN: Final = ("consensus_distance", "late_share", "staleness", "wait_s")
"""Figures of a strategy that are stored after each epoch."""


def run(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns a row per evaluation."""
    workload = WORKLOADS[settings["task"]]
    L.seed_everything(cell["seed"], verbose=False)
    model = load(workload.model)(**{**workload.model_options, **settings["model"]})
    data = load(workload.data)(**{**workload.data_options, **settings["data"]})
    history = History(workload.monitor)
    straggler = StragglerInjector(settings["delay_s"], settings["delayed_ranks"], cell["seed"])
    trainer = contestants.trainer(
        cell["strategy"],
        settings["world_size"],
        max_epochs=settings["epochs"],
        check_val_every_n_epoch=settings["val_every"],
        callbacks=[straggler, Paced(settings["compute_s"]), history],  # the delay comes on top
    )
    trainer.fit(model, data)
    return {"rows": history.rows}


class Paced(L.Callback):
    """Makes forward and backward together take at least so long, delays not counted."""

    def __init__(self, compute_s: float) -> None:
        self.compute_s = compute_s
        self.begin = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin = time.perf_counter()

    def on_after_backward(self, *_: Any) -> None:
        time.sleep(max(0.0, self.compute_s - (time.perf_counter() - self.begin)))


class History(L.Callback):
    """Records steps, seconds of training, bytes sent and validation value at evaluations."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.rows: list[dict[str, float]] = []
        self.trained_s = self.begin = 0.0
        self.sent_before = 0.0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.distributed.barrier()
        self.sent_before = communication(trainer).get("bytes_sent", 0.0)
        self.begin = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Before anybody waits for the slowest at the end of the epoch.
        self.trained_s += time.perf_counter() - self.begin
        sent = communication(trainer).get("bytes_sent")
        self.rows.append(
            {
                "step": trainer.global_step,
                "seconds": self.trained_s,
                "mb_sent": -1.0 if sent is None else (sent - self.sent_before) / 1e6,
            }
        )

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        figures = communication(trainer)
        self.rows[-1]["value"] = float(trainer.callback_metrics[self.monitor])
        self.rows[-1] |= {name: figures[name] for name in _SHOWN if name in figures}
        self.begin = time.perf_counter()
