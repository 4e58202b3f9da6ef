"""Models in FSDP, in its two versions, are recorded from the outside, in processes of their own."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_dsgd.lab.timeline.trace import read_folder
from lightning_dsgd.why import job, slow
from tests.support.models import Regression, loader, trainer
from tests.support.worlds import FitWorld

SLOW_S = 0.2
STEPS = 28


class Rows(Dataset[torch.Tensor]):
    def __init__(self, slow: str) -> None:
        self.is_slow = slow == "loader" and dist.get_rank() == 1

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(SLOW_S * self.is_slow)
        return torch.ones(10)


class Sleeps(nn.Module):
    def __init__(self, slow: str) -> None:
        super().__init__()
        self.is_slow = slow == "late" and dist.get_rank() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S * self.is_slow)
        return x


def sharded(version: str, slow: str = "", sizes: tuple[int, ...] = (2,)) -> Any:
    model = nn.Sequential(nn.Linear(10, 4), Sleeps(slow), nn.Linear(4, 1))
    if version == "fsdp":
        return FullyShardedDataParallel(
            nn.Sequential(FullyShardedDataParallel(model, device_id=torch.device("cpu"))),
            device_id=torch.device("cpu"),
        )
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "columns")[: len(sizes)])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def watched(folder: Path) -> list[str]:
    """Lets this process be recorded as a rank of a watched job; returns what it tells."""
    os.environ |= job.environment(os.environ, folder, 1.0, with_steps=True)
    sys.path.insert(0, str(job.INSIDE))
    from lightning_dsgd_rank import loops  # type: ignore[import-not-found]

    said: list[str] = []
    for name, hook in loops.hooks(said.append).items():
        if name in sys.modules:
            hook(sys.modules[name])
    return said


def train(folder: Path, version: str, slow: str) -> list[str]:
    said = watched(folder)
    model = sharded(version, slow)
    with torch.no_grad():
        model(torch.ones(1, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x in DataLoader(Rows(slow)):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    sys.modules["lightning_dsgd_rank.loops"]._the_loop.end("training has ended")
    return said


@pytest.mark.parametrize(
    ("version", "what", "says"),
    [
        ("fully_shard", "late", "rank 1 computes longer than the others"),
        ("fsdp", "loader", "rank 1 waits for the data loader"),
    ],
)
def test_a_late_rank_is_named_with_its_cause(
    version: str, what: str, says: str, tmp_path: Path
) -> None:
    assert FitWorld().run(2, train, tmp_path, version, what) == [[], []]
    said = slow.diagnosed(tmp_path)
    assert said[0].startswith(f"Verdict: {says}"), said
    (following,) = [line for line in said if line.startswith("Next:")]
    assert ("mend what" if what == "late" else "more loader workers") in following
    num_sums = 2 if version == "fully_shard" else 1
    for trace in read_folder(tmp_path / slow.STEPS):
        assert trace.about["strategy"] == version
        assert trace.about["parameters"] == pytest.approx(49, abs=3)  # the shards are padded
        assert [step.number for step in trace.steps] == list(range(1, STEPS + 1))
        for step in trace.steps:
            assert [len(s) for s in (step.forward, step.backward, step.optimizer)] == [1, 1, 1]
            assert len(step.sum) == num_sums
            assert len(step.gather) >= num_sums
            assert sum(size for *_, size in step.sum) == pytest.approx(4 * 49, abs=4 * 8)
            assert step.items == 10


def train_two(folder: Path) -> list[str]:
    said = watched(folder)
    models = sharded("fully_shard"), sharded("fully_shard")
    for _ in range(3):
        sum(model(torch.ones(1, 10)).sum() for model in models).backward()
    return said


def train_in_two_dimensions(folder: Path) -> list[str]:
    said = watched(folder)
    sharded("fully_shard", sizes=(2, 1))(torch.ones(1, 10)).sum().backward()
    return said


class InTwoDimensions(Regression):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh)


def fit_in_two_dimensions(folder: Path) -> list[str]:
    said = watched(folder)
    from lightning_dsgd_rank import callbacks, entering

    entering.tell_of_steps = said.append
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    train = trainer(strategy, 2, callbacks=callbacks.callbacks())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train.fit(InTwoDimensions(), loader())
    assert train.global_step > 0
    assert not {type(each).__name__ for each in train.callbacks} & {"Watched", "_First", "_Last"}
    return said


@pytest.mark.parametrize(
    ("trains", "reason"),
    [
        (fit_in_two_dimensions, "must be sharded among all ranks, got shards among 2 x 1 of 2"),
        (train_two, "the job uses more than one model in DDP or FSDP"),
        (train_in_two_dimensions, "must be sharded among all ranks, got shards among 2 x 1 of 2"),
    ],
)
def test_what_is_not_recorded_is_told(trains: Any, reason: str, tmp_path: Path) -> None:
    for (said,) in FitWorld().run(2, trains, tmp_path):
        assert reason in said
    assert not list((tmp_path / slow.STEPS).glob("*")) or trains is train_two


def train_alone(folder: Path, version: str) -> list[str]:
    said = watched(folder)
    (sharded("fully_shard", sizes=(1,)) if version else DistributedDataParallel(nn.Linear(10, 1)))(
        torch.ones(1, 10)
    )
    return said


@pytest.mark.parametrize("version", ["", "fully_shard"])
def test_a_rank_alone_is_told_that_it_is_one(version: str, tmp_path: Path) -> None:
    assert FitWorld().run(1, train_alone, tmp_path, version) == [
        ["the job has one rank, which waits for nobody"]
    ]
