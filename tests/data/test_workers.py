"""Workers of a loader outlive the signal by which a job is told to stop, and no second one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_dsgd.data.workers import spare_workers

LATER = pytest.mark.exhaustive
HOWS = ["fork", pytest.param("spawn", marks=LATER), pytest.param("forkserver", marks=LATER)]


class Seeds(Dataset[Tensor]):
    """In place of samples: the seed of NumPy's that a worker was given."""

    def __init__(self) -> None:
        self.given = -1

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.given)


def give(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.given = worker + 7


def loader(how: str) -> DataLoader[Tensor]:
    return DataLoader(
        Seeds(), num_workers=1, multiprocessing_context=how, worker_init_fn=give, prefetch_factor=2
    )


def worker_of(made: Any) -> Any:
    (worker,) = made._workers
    return worker


@pytest.mark.parametrize("how", HOWS)
def test_a_worker_outlives_one_sigterm_and_one_ctrl_c(how: str) -> None:
    spared = loader(how)
    spare_workers(spared)
    batches = iter(spared)
    seen = [next(batches)]
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker_of(batches).pid, signum)
        seen += [next(batches) for _ in range(10)]
    assert [*map(int, seen + list(batches))] == [7] * 60  # the user's function was called


def end_beside_a_worker(hangs: bool, context: Any) -> None:
    begun, rank = context.Event(), os.getpid()

    def begin(worker: int) -> None:
        begun.set()
        while hangs and os.getppid() == rank:
            signal.sigtimedwait((), 0.5)

    loaded: DataLoader[Tensor] = DataLoader(
        Seeds(), num_workers=2, multiprocessing_context="fork", worker_init_fn=begin
    )
    spare_workers(loaded)
    loaded.kept = iter(loaded)  # type: ignore[attr-defined]
    assert begun.wait(30)
    still_there.append(loaded)


still_there: list[Any] = []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_ends_does_not_wait_for_its_workers(hangs: bool) -> None:
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=end_beside_a_worker, args=(hangs, context))
    process.start()
    process.join(40)
    has_ended = process.exitcode
    process.kill()
    assert has_ended == 0


def test_a_loader_is_as_its_user_made_it_when_it_is_prepared_again() -> None:
    given = []
    spared = loader("fork")
    for _ in range(2):
        spare_workers(spared, lambda each: given.append(each.worker_init_fn))
    assert given == [give, give]
    assert spared.worker_init_fn is not give
    spare_workers(range(3))
