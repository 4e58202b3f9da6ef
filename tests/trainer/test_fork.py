"""A child that a rank forks is none: it ends without a word to the others, who train on."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dsgd import STRATEGIES
from lightning_dsgd.transport import ANY, TransportError
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import SIZE, MPIFitWorld, MPIJob, every_mpi
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, ProcessWorld

EMPTY = torch.empty(0)
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
    name: str, folder: str, num_workers: int = 0, world_size: int = 2
) -> tuple[Any, int, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    model = Forking()
    fitter = trainer(
        STRATEGIES[name](timeout_s=60.0),
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


@cases("name, num_workers", now=[("hpsgd", 1)], later=[*((n, 0) for n in ("wagma", "eager_sgd"))])
def test_children_end_and_their_ranks_train_on(name: str, num_workers: int, tmp_path: Path) -> None:
    check_ends(FitWorld().run(2, fit_forking, name, str(tmp_path), num_workers), tmp_path)


@pytest.mark.exhaustive
@every_mpi
def test_children_of_ranks_of_mpi_end_too(
    python: str, mpi_jobs: Callable[[str], MPIJob], tmp_path: Path
) -> None:
    """They do not come to MPI_Finalize, for which they would wait for all ranks."""
    world = MPIFitWorld(job=mpi_jobs(python))
    check_ends(world.run(SIZE, fit_forking, "wagma", str(tmp_path), 0, SIZE), tmp_path)


def end_in_a_step(folder: str) -> list[Any]:
    """As a signal that goes to all processes: the workers of loaders are not ended by the first."""
    strategy = STRATEGIES["local_sgd"](timeout_s=60.0)
    model = Interrupted()
    with pytest.raises(SystemExit):
        trainer(strategy, 2, max_epochs=1000).fit(model, forked_loader(128, 1))
    return [model.end, model.num_steps]


class Interrupted(Regression):
    num_steps = 0
    end: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == 20 and self.global_rank == 1:
            (worker,) = active_children()
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(write, b"here")
                wait_for_a_signal()
            os.read(read, 4)
            for pid in (child, worker.pid, os.getpid()):
                assert pid is not None
                os.kill(pid, signal.SIGINT)
            self.end = end_of(child)
        return super().training_step(batch, batch_idx)


def test_an_interrupt_of_all_processes_leaves_the_ranks_their_workers(tmp_path: Path) -> None:
    first, second = FitWorld().run(2, end_in_a_step, str(tmp_path))
    assert first[1] == second[1] > 20
    assert second[0] == 1


def use_in_a_child(net: Any) -> list[str]:
    """What a child that was forked while its rank's lane talks gets from all that waits."""
    lane = net.spawn_lane(talk)
    receipt = net.recv(EMPTY, ANY, tag=1)
    texts = []
    for _ in range(6):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with os.fdopen(write, "w") as pipe:
                json.dump(errors_of_all(net, lane, receipt), pipe)
            os._exit(0)
        os.close(write)
        assert end_of(pid) == 0
        with os.fdopen(read) as pipe:
            texts += json.load(pipe)
        net.barrier().wait()
    lane.stop()
    net.barrier().wait()
    return texts


def errors_of_all(net: Any, lane: Any, receipt: Any) -> list[str]:
    net.fail("failed: it is a child")
    net.close()
    lane.stop()
    lane.join()
    texts = []
    for use in (
        net.check,
        receipt.wait,
        lambda: net.send(EMPTY, 0),
        lambda: net.send(EMPTY, 1),
        lambda: net.recv(EMPTY, 0),
        lambda: net.barrier(),
        lambda: net.spawn_lane(talk),
        lambda: net.sub("more").all_reduce(torch.ones(100)),
    ):
        try:
            use()
        except TransportError as error:
            texts.append(str(error))
        else:
            texts.append("nothing")
    return texts


def talk(net: Any) -> None:
    x, other = torch.ones(10_000), 1 - net.rank
    while True:
        net.send(x, other)
        net.recv(x, other).wait()


def test_a_child_can_use_nothing_of_the_network() -> None:
    for rank, texts in enumerate(ProcessWorld().run(2, use_in_a_child)):
        assert len(texts) == 6 * 8
        for text in texts:
            assert re.match(rf"only process \d+ may train as rank {rank}, got process", text)
            assert "end a forked process where it was forked" in text
