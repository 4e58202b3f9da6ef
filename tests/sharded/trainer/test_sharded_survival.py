"""`ShardedStrategy` goes on without a replica that has lost a rank: real processes, killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_dsgd as dsgd
from lightning_dsgd import ShardedStrategy
from lightning_dsgd.session import record
from lightning_dsgd.sharded import together
from tests.sharded.trainer.test_sharded import Sharded, whole
from tests.support.doomed import Doomed, Plan
from tests.support.killed import kill_after, kill_at_random
from tests.support.models import loader, trainer
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome

exhaustive = pytest.mark.exhaustive
WORLD = FitWorld(timeout_s=60.0)
NUM_EPOCHS = 4
ALGORITHMS = {
    "local_sgd": lambda: dsgd.LocalSGD(sync_period=3),
    "wagma": dsgd.WAGMA,
    "sgp": dsgd.SGP,
}


class Unlucky(Doomed, Sharded):
    gathers = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("mean", torch.ones(()), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.gathers:
            whole(self)


def fit(
    name: str,
    folder: str,
    lost: int,
    hook: str = "",
    at: int = 0,
    parallel: str = "fsdp",
    after_s: float | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves; what this rank has come to."""
    module = Unlucky(folder, (Plan(lost, "SIGKILL", hook, at),))
    module.parallel, module.gathers = parallel, hook == "on_validation_epoch_end"
    gathered = together.gathered

    def gather(checkpoint: Any) -> Any:
        module.act("gather")
        return gathered(checkpoint)

    together.gathered = gather
    if after_s is not None and dist.get_rank() == lost:
        kill_after(after_s, Path(folder, f"batches_{lost}").exists)
    strategy = ShardedStrategy(
        ALGORITHMS[name](),
        num_replicas=2,
        tensor_parallel_size=1 if parallel == "fsdp" else 2,
        timeout_s=60.0,
        heartbeat_timeout_s=20.0,
        on_loss="continue",
    )
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    train = trainer(
        *(strategy, dist.get_world_size()),
        max_epochs=NUM_EPOCHS,
        callbacks=[saver],
        enable_checkpointing=True,
        gradient_clip_val=1.0,
    )
    train.fit(module, loader(), loader(32))
    last = module.ids[-train.num_training_batches :]
    return {
        "weights": whole(module),
        "epoch": train.current_epoch,
        "is_first": train.is_global_zero,
        "members": strategy.session.ranks.members,
        "num_batches": train.num_training_batches,
        "samples": sorted(last),
        "val_loss": float(train.callback_metrics["val_loss"]),
    }


def fit_until_killed(name: str, folder: str, lost: int, after_s: float) -> dict[str, Any]:
    return fit(name, folder, lost, after_s=after_s)


def check_left(outcomes: list[Outcome], lost: list[int], folder: Path) -> list[int]:
    """Whole replicas have trained to the end, together; gives their ranks."""
    ranks = [rank for rank in range(4) if rank // 2 not in [r // 2 for r in lost]]
    left = [outcomes[rank] for rank in ranks]
    assert [outcome.error for outcome in left] == [""] * len(left)
    for outcome in left:
        assert torch.equal(outcome.result["weights"], left[0].result["weights"])
        assert outcome.result["epoch"] == NUM_EPOCHS
        assert outcome.result["members"] == left[0].result["members"]
        assert outcome.result["val_loss"] == left[0].result["val_loss"] < 4  # of 10
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    assert saved["epoch"] == NUM_EPOCHS - 1
    mark = record.save_of(saved)
    assert mark is not None
    assert 4 >= mark.world_size >= len(left)
    return ranks


@cases(
    "name, lost, hook, at, parallel",
    now=[],
    later=[
        ("local_sgd", 1, "on_before_optimizer_step", 6, "fsdp"),
        ("wagma", 3, "training_step", 6, "fsdp"),
        ("local_sgd", 0, "validation_step", 3, "fsdp"),
        ("local_sgd", 0, "on_save_checkpoint", 3, "fsdp"),
        ("local_sgd", 1, "gather", 2, "fsdp"),
        ("local_sgd", 0, "training_step", 10, "tensor"),
    ],
)
def test_a_rank_is_killed_and_the_other_replica_trains_to_the_end(
    name: str, lost: int, hook: str, at: int, parallel: str, tmp_path: Path
) -> None:
    args = name, str(tmp_path), lost, hook, at, parallel
    outcomes = WORLD.outcomes(4, fit, *args)
    ranks = check_left(outcomes, [lost], tmp_path)
    partner = lost ^ 1
    assert outcomes[partner].error.startswith(f"PeerLost: rank {lost} ")
    assert f"rank {partner} cannot go on without rank {lost}" in outcomes[partner].error
    left = [outcomes[rank].result for rank in ranks]
    assert [result["members"] for result in left] == [tuple(ranks)] * 2
    assert [result["is_first"] for result in left] == [True, False]
    # From the next epoch on the data are divided among those that are left.
    assert [result["num_batches"] for result in left] == [8 if parallel == "fsdp" else 16] * 2
    assert (left[0]["samples"] == left[1]["samples"]) == (parallel != "fsdp")


@exhaustive
def test_a_users_collective_fails_and_the_other_replica_goes_on(tmp_path: Path) -> None:
    args = "local_sgd", str(tmp_path), 3, "on_validation_epoch_end", 3
    outcomes = WORLD.outcomes(4, fit, *args)
    assert check_left(outcomes, [3], tmp_path) == [0, 1]
    assert outcomes[0].result["members"] == (0, 1)
    assert outcomes[2].error.startswith("RuntimeError")


@exhaustive
@pytest.mark.timeout(3600)
def test_any_rank_is_killed_at_any_time(tmp_path: Path) -> None:
    for fit in kill_at_random(WORLD, fit_until_killed, "sgp", tmp_path, latest_s=2.0):
        check_left(*fit)
