"""A child that a rank forks is none: it ends without a word to the others, who train on."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import SIZE, MPIFitWorld, MPIJob, every_mpi
from tests.support.worlds import FitWorld

SOON_S = 30.0
WAYS = {"exit": 3, "raise": 1, "go on": 1, "os._exit": 7, "SIGTERM": -signal.SIGTERM}
"""What a child does, and the exit code that it ends with."""


def end_of(pid: int) -> int | None:
    handle = os.pidfd_open(pid)
    ended, _, _ = select.select([handle], [], [], SOON_S)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if ended else None


def forked_loader(num_samples: int, num_workers: int) -> Any:
    """Its workers are forked from the rank, as Python does it by default."""
    context = "fork" if num_workers else None
    return loader(num_samples, num_workers=num_workers, multiprocessing_context=context)


class Forking(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[str, int | None]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        way = list(WAYS)[batch_idx % len(WAYS)]
        pid = os.fork()
        if pid == 0:
            leave(way)
        else:
            self.ends.append((way, end_of(pid)))
        return super().training_step(batch, batch_idx)


def leave(way: str) -> None:
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise ValueError("no such luck in a child")
    if way == "os._exit":
        os._exit(7)
    if way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_a_signal()


def wait_for_a_signal() -> None:
    """In short waits: Python calls no handler in one that begins just after the signal came."""
    while not threading.Event().wait(0.1):
        pass


def fit_forking(
    name: str, folder: str, num_workers: int = 1, world_size: int = 2
) -> tuple[Any, int, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    model = Forking()
    fitter = trainer(
        strategy_of(name, timeout_s=60.0),
        world_size,
        callbacks=[ModelCheckpoint(folder, "saved", save_on_exception=True)],
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    fitter.fit(model, forked_loader(8 * 3 * len(WAYS) * world_size, num_workers))
    return model.ends, fitter.global_step, weights(model)


def check_ends(ranks: list[tuple[Any, int, torch.Tensor]], folder: Path) -> None:
    for ends, steps, ended_with in ranks:
        assert steps == len(ends) > len(WAYS)
        assert all(code == WAYS[way] for way, code in ends), ends
        assert torch.equal(ended_with, ranks[0][2])
    assert [file.name for file in folder.glob("*.ckpt")] == ["saved.ckpt"]


def test_children_end_and_their_ranks_train_on(tmp_path: Path) -> None:
    check_ends(FitWorld().run(2, fit_forking, "hpsgd", str(tmp_path)), tmp_path)


@pytest.mark.exhaustive
@every_mpi
def test_children_of_ranks_of_mpi_end_too(
    python: str, mpi_jobs: Callable[[str], MPIJob], tmp_path: Path
) -> None:
    """They do not come to MPI_Finalize, for which they would wait for all ranks."""
    world = MPIFitWorld(job=mpi_jobs(python))
    check_ends(world.run(SIZE, fit_forking, "wagma", str(tmp_path), 0, SIZE), tmp_path)


class Telling(Regression):
    """Tells its loaders' workers to end, as SLURM tells all processes of a job."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit_telling() -> tuple[int, str]:
    L.seed_everything(0, workers=True, verbose=False)
    fitter = trainer(strategy_of("allreduce", timeout_s=60.0), 2, limit_val_batches=0)
    fitter.fit(Telling(), forked_loader(8 * 2 * 20, 1))
    L.seed_everything(0, workers=False, verbose=False)
    assert fitter.train_dataloader is not None
    return fitter.global_step, fitter.train_dataloader.worker_init_fn.then.func.__name__


def test_workers_that_the_trainer_seeds_outlive_a_signal() -> None:
    """Ranks that are told to stop go on to a common batch, for which they need their loaders."""
    assert FitWorld().run(2, fit_telling) == [(20, "pl_worker_init_function")] * 2
