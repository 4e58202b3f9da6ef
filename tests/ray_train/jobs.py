"""Ray Train starts the ranks, on a real Ray cluster of this machine: `make test-ray`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import ray
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer

from tests.support.fits import Plain, strategy
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import ROOT
from tests.support.worlds import FitWorld

pytestmark = pytest.mark.timeout(600)

PATIENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it asks nobody outside
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "40",  # Ray may count on a machine that is gone
    "RAY_worker_niceness": "0",
}
"""For a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """One machine for two workers, to which tests add others."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PATIENT}
    os.environ.update(PATIENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=cluster.address, runtime_env={"env_vars": variables})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


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


# ---- as many workers as there are machines for ----


class Waits(L.Callback):
    """Waits in the second epoch of the first run until Ray ends this worker."""

    def __init__(self, folder: Path) -> None:
        self.waits = folder / "waits"

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.is_first_run = trainer.current_epoch == 0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.is_first_run and trainer.current_epoch == 1 and batch_idx == 2:
            self.waits.touch()
            threading.Event().wait(300)
            raise TimeoutError("Ray has not ended a worker within 300 s")


def fit_plain(folder: str, devices: int, **options: Any) -> tuple[Any, int]:
    """The weights, and the number of steps, of a training that may go on from its last epoch."""
    model = Plain()
    ran = trainer(strategy("balanced"), devices, max_epochs=3, default_root_dir=folder, **options)
    ran.fit(model, loader(128, shuffle=True), ckpt_path="last")
    return weights(model), ran.global_step


def train_on_any(config: dict[str, Any]) -> None:
    """What each worker runs, of however many."""
    torch.set_num_threads(1)
    folder, context = Path(config["folder"]), ray.train.get_context()
    x, num_steps = fit_plain(
        str(folder),
        context.get_local_world_size(),
        plugins=[RayLightningEnvironment()],
        callbacks=[ModelCheckpoint(folder, save_last=True), Waits(folder)],
        enable_checkpointing=True,
    )
    told = {"weights": x, "steps": num_steps, "world_size": context.get_world_size()}
    torch.save(told, folder / f"rank_{context.get_world_rank()}.pt")


def test_a_step_keeps_its_batches_on_another_number_of_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A machine goes, and Ray goes on with fewer workers; the weights are as if it had stayed."""
    machine = cluster.add_node(num_cpus=1)
    has_ended = threading.Event()

    def take_away() -> None:
        while not (tmp_path / "waits").exists():
            if has_ended.wait(0.5):
                return
        cluster.remove_node(machine)

    threading.Thread(target=take_away, daemon=True).start()
    TorchTrainer(
        train_on_any,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=(1, 8)),
        run_config=RunConfig(
            storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    has_ended.set()
    ranks = [torch.load(file) for file in sorted(tmp_path.glob("rank_*.pt"))]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    undisturbed = FitWorld().run(3, fit_plain, str(tmp_path / "undisturbed"), 3)
    for rank in ranks:
        assert rank["steps"] == undisturbed[0][1]
        torch.testing.assert_close(rank["weights"], undisturbed[0][0], rtol=1e-5, atol=1e-6)
