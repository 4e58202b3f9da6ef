"""Batches are claimed in loops in plain PyTorch and in Fabric, on real processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dsgd as dsgd
from lightning_dsgd.data.claims.dealing import ClaimDealing
from tests.data.claims.test_claimed_fits import Numbered, all_once
from tests.support.fits import errors, run
from tests.support.worlds import FitWorld

SIZE, BATCH = 48, 2


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, slow_s: float = 0.2
) -> list[int]:
    """Takes longer on the last rank."""
    optimizer.zero_grad()
    model(batch / 1000).square().mean().backward()
    optimizer.step()
    is_slow = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    time.sleep(slow_s if is_slow else 0.01)
    return batch[:, 0].int().tolist()


def loader_of(size: int = SIZE, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbered(size), BATCH, **{"shuffle": True, **options})


def replica_of(model: Any, optimizer: Any, **options: Any) -> Any:
    given = {"timeout_s": 60.0, "data": "claimed", **options}
    return dsgd.decentralized(model, optimizer, dsgd.PopSGD(), **given)


def in_plain() -> Any:
    """Two epochs, with an evaluation in each; the nominal count behind each."""
    model, optimizer = make()
    loader, epochs, nominal = loader_of(), [], []
    with replica_of(model, optimizer) as replica:
        for _ in range(2):
            batches = replica.batches(loader)
            epochs.append([i for batch in batches for i in step(model, optimizer, batch)])
            nominal.append(replica.nominal_batches)
            with replica.consensus():
                pass
    return epochs, len(batches), nominal


def in_fabric() -> Any:
    strategy = dsgd.FabricStrategy(dsgd.PopSGD(), timeout_s=60.0, data="claimed")
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(*make())
    loader = fabric.setup_dataloaders(loader_of(), use_distributed_sampler=False)
    with fabric.strategy:
        epochs = [
            [i for batch in strategy.batches(loader) for i in step(model, optimizer, batch)]
            for _ in range(2)
        ]
    return epochs, 12, [12, 24]


@pytest.mark.parametrize("loop", [in_plain, in_fabric])
def test_a_loop_reads_every_sample_once_and_a_slow_rank_fewer(loop: Any) -> None:
    ranks = run(2, loop)
    samples = [epochs for epochs, *_ in ranks]
    assert all_once(samples, SIZE)
    assert all(len(slow) < len(fast) for fast, slow in zip(*samples, strict=True))
    assert [rest for _, *rest in ranks] == [[12, [12, 24]]] * 2


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(6, 10))


def resumes(folder: str) -> Any:
    """Half an epoch and a save; then another training, which goes on from there."""
    path = f"{folder}/saved.pt"
    if os.environ["RANK"] == "0":  # it deals, and takes over the checkpoint after the others
        real = ClaimDealing.resume
        ClaimDealing.resume = lambda *given: (time.sleep(0.5), real(*given))[1]
    model, optimizer = make()
    before, after = [], []
    with replica_of(model, optimizer) as replica:
        for number, batch in enumerate(replica.batches(loader_of())):
            before += step(model, optimizer, batch)
            if number == 3:
                replica.save(path)
                break
    with replica_of(*make()) as replica:
        replica.load(path)
        for _ in range(2):
            batches = replica.batches(loader_of())
            after.append([int(i) for batch in batches for i in batch[:, 0]])
        num_streamed = len(list(replica.batches(DataLoader(Stream(), 2))))
    return before, after, num_streamed


def test_an_epoch_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    ranks = run(2, resumes, str(tmp_path))
    rest = [[before + first, second] for before, (first, second), _ in ranks]
    assert all_once(rest, SIZE)
    assert [streamed for *_, streamed in ranks] == [3] * 2


def resumes_in_fabric(folder: str) -> Any:
    """The same in Fabric, whose loader makes the twin of a twin."""
    path, parts = f"{folder}/saved.ckpt", []
    for resumes in (False, True):
        strategy = dsgd.FabricStrategy(dsgd.PopSGD(), timeout_s=60.0, data="claimed")
        size = int(os.environ["WORLD_SIZE"])
        fabric = L.Fabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(*make())
        state = {"model": model, "optimizer": optimizer}
        loader = fabric.setup_dataloaders(loader_of(), use_distributed_sampler=False)
        with fabric.strategy:
            if resumes:
                assert fabric.load(path, state) == {}
            parts.append([])
            for number, batch in enumerate(strategy.batches(loader)):
                parts[-1] += step(model, optimizer, batch, slow_s=0.01)
                if (resumes, number) == (False, 3):
                    fabric.save(path, state)
                    break
    return parts


def test_an_epoch_goes_on_from_a_checkpoint_of_fabrics(tmp_path: Path) -> None:
    ranks = run(2, resumes_in_fabric, str(tmp_path))
    assert all_once([[before + after] for before, after in ranks], SIZE)


def leave_early(others_too: bool) -> Any:
    """The dealer reads on where another rank has left two epochs; then there is a whole one."""
    model, optimizer = make()
    rank, loader = int(os.environ["RANK"]), loader_of()
    with replica_of(model, optimizer) as replica:
        for _ in range(2):
            for number, batch in enumerate(replica.batches(loader), 1):
                step(model, optimizer, batch, slow_s=0.01)
                if rank == 0:
                    time.sleep(0.2)
                if number == 1 + 2 * (rank == 0) and (rank or others_too):
                    break
        batches = replica.batches(loader)
        return [[i for batch in batches for i in step(model, optimizer, batch, slow_s=0.01)]]


def test_a_loop_may_leave_its_epoch_early_if_all_do() -> None:
    assert all_once(run(2, leave_early, True), SIZE)


def test_ranks_that_do_not_leave_their_epoch_together_are_told() -> None:
    for error in errors(2, leave_early, False):
        assert "got the end of an epoch on rank 0, the next epoch, as the last one was" in error


def read_two_at_once() -> None:
    model, optimizer = make()
    with replica_of(model, optimizer) as replica:
        first, second = (replica.batches(loader_of()) for _ in range(2))
        for batch, _ in zip(first, second, strict=True):
            step(model, optimizer, batch)


def test_two_claimed_loaders_at_once_are_refused() -> None:
    for error in errors(2, read_two_at_once):
        assert "one loader must be read at a time" in error
        assert "StackDataset" in error


def make_loaders_anew() -> Any:
    """A loader with workers for each epoch, of which the second is left early."""
    model, optimizer = make()
    left = []
    with replica_of(model, optimizer) as replica:
        for epoch in range(3):
            loader = loader_of(num_workers=1, persistent_workers=epoch > 0)
            for number, batch in enumerate(replica.batches(loader)):
                step(model, optimizer, batch, slow_s=0.01)
                if (epoch, number) == (1, 1):
                    break
            known = weakref.ref(loader)
            del loader
            gc.collect()
            left.append((known() is None, len(multiprocessing.active_children())))
    return left


@pytest.mark.exhaustive
def test_loaders_and_their_workers_end_with_their_epochs() -> None:
    assert run(2, make_loaders_anew) == [[(True, 0)] * 3] * 2


def leave_together(folder: str) -> Any:
    """The first two ranks, which alone know what was trained on, leave; the others go on."""
    model, optimizer = make()
    rank, pid = int(os.environ["RANK"]), Path(folder, "pid")
    if rank == 1:
        pid.write_text(str(os.getpid()))
    options = {"on_loss": "continue", "heartbeat_timeout_s": 20.0}
    with replica_of(model, optimizer, **options) as replica, Path(folder, str(rank)).open("w") as f:
        for number, batch in enumerate(replica.batches(loader_of(1200))):
            if (rank, number) == (0, 2):
                os.kill(int(pid.read_text()), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            print(*step(model, optimizer, batch, slow_s=0.01), file=f, flush=True)


def test_what_ranks_have_trained_on_that_leave_together_is_not_trained_on_again(
    tmp_path: Path,
) -> None:
    outcomes = FitWorld(timeout_s=60.0).outcomes(5, leave_together, str(tmp_path))
    assert [outcome.error for outcome in outcomes[2:]] == ["", "", ""]
    for outcome in outcomes[:2]:
        assert "received SIGTERM and has left" in outcome.error
    made = [int(i) for rank in range(5) for i in Path(tmp_path, str(rank)).read_text().split()]
    assert sorted(made) == list(range(1200))
