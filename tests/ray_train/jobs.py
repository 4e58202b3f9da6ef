"""Ray Train starts the ranks, on a real Ray cluster of this machine: `make test-ray`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import ray
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer

from tests.support.models import Regression, loader, weights
from tests.support.mpi import ROOT

pytestmark = pytest.mark.timeout(600)

PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it asks nobody outside
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "400",
    "RAY_worker_niceness": "0",
}
"""For a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PATIENT}
    os.environ.update(PATIENT)
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


class Dies(L.Callback):
    """Kills the last rank in the third step of its first run, once the first epoch is saved."""

    def __init__(self, folder: Path) -> None:
        self.died = folder / "died"

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and trainer.current_epoch == 1 and batch_idx == 2 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    """What each worker of Ray runs."""
    torch.set_num_threads(1)
    L.seed_everything(0)
    folder = Path(config["folder"])
    context = ray.train.get_context()
    trainer = L.Trainer(
        strategy=config["strategy"],
        accelerator="cpu",
        devices=context.get_local_world_size(),
        plugins=[RayLightningEnvironment()],
        callbacks=[
            ModelCheckpoint(folder, save_last=True),
            *([Dies(folder)] if config["dies"] else []),
        ],
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = Regression()
    trainer.fit(model, loader(), ckpt_path="last")
    told = {
        "weights": weights(model),
        "steps": trainer.global_step,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "world_size": context.get_world_size(),
    }
    torch.save(told, folder / f"rank_{trainer.global_rank}.pt")


def run(folder: Path, strategy: str, dies: bool = False) -> list[Any]:
    """What each rank has told, once Ray says that all is done."""
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "strategy": strategy, "dies": dies},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    ranks = [torch.load(file) for file in sorted(folder.glob("rank_*.pt"))]
    assert {rank["environment"] for rank in ranks} == {"RayLightningEnvironment"}
    assert {rank["world_size"] for rank in ranks} == {len(ranks)}
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    return ranks


@pytest.mark.parametrize("strategy", ["wagma", "balanced"])
def test_ranks_of_ray_train_one_model(strategy: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, strategy)
    assert [rank["steps"] for rank in ranks] == [16, 16]


@pytest.mark.parametrize("strategy", ["wagma", "balanced"])
def test_ray_starts_all_again_and_they_resume(strategy: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, strategy, dies=True)
    assert (tmp_path / "died").exists()
    assert [rank["steps"] for rank in ranks] == [16, 16]
