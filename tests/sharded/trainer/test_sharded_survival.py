"""`ShardedStrategy` goes on without a replica that has lost a rank, at whatever moment."""

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
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.sharded import together
from tests.sharded.trainer.test_sharded import Sharded, whole
from tests.support.doomed import Doomed, Plan
from tests.support.models import loader, trainer
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome

exhaustive = pytest.mark.exhaustive
WORLD = FitWorld()
NUM_EPOCHS = 4
ALGORITHMS = {"local_sgd": lambda: dsgd.LocalSGD(sync_period=3), "wagma": dsgd.WAGMA}


class Unlucky(Doomed, Sharded):
    """Follows its plans; `gathers` says whether its own hook gathers all shards."""

    gathers = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("mean", torch.ones(()), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.gathers:
            whole(self)


def fit(
    name: str, folder: str, lost: int, hook: str, at: int, parallel: str = "fsdp"
) -> dict[str, Any]:
    """Trains, evaluates and saves; returns what this rank has come to."""
    module = Unlucky(folder, (Plan(lost, "SIGKILL", hook, at),))
    module.parallel, module.gathers = parallel, hook == "on_validation_epoch_end"
    gathered = together.gathered

    def gather(checkpoint: Any) -> Any:
        module.act("gather")
        return gathered(checkpoint)

    together.gathered = gather
    strategy = ShardedStrategy(
        ALGORITHMS[name](),
        num_replicas=2,
        tensor_parallel_size=1 if parallel == "fsdp" else 2,
        timeout_s=60.0,
        heartbeat_timeout_s=20.0,
        on_loss="continue",
    )
    train = trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=NUM_EPOCHS,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        enable_checkpointing=True,
        gradient_clip_val=1.0,
    )
    train.fit(module, loader(), loader(32))
    return {
        "weights": whole(module),
        "epoch": train.current_epoch,
        "is_first": train.is_global_zero,
        "members": strategy.session.ranks.members,
        "num_batches": train.num_training_batches,
        "samples": sorted(module.ids[-train.num_training_batches :]),
        "val_loss": float(train.callback_metrics["val_loss"]),
    }


def check_left(outcomes: list[Outcome], lost: int, folder: Path) -> list[dict[str, Any]]:
    """The replica that is whole has trained to the end, together; returns its ranks' results."""
    ranks = (2, 3) if lost < 2 else (0, 1)
    assert [outcomes[rank].error for rank in ranks] == ["", ""]
    first, second = left = [outcomes[rank].result for rank in ranks]
    assert torch.equal(first["weights"], second["weights"])
    assert first["val_loss"] == second["val_loss"] < 4  # of 10, the variance of the target
    for result in left:
        assert result["epoch"] == NUM_EPOCHS
        assert result["members"] == ranks
        assert result["is_first"] == (result is first)
    for epoch in range(NUM_EPOCHS):  # what was gathered before the loss is not written after it
        saved = torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)
        assert saved["epoch"] == epoch
        assert saved["state_dict"].keys() == Sharded().state_dict().keys()
    mark = record.save_of(saved)
    assert mark is not None
    assert (mark.num_shards, mark.world_size) == (2, 2)
    return left


@cases(
    "name, lost, hook, at, parallel",
    now=[],
    later=[
        ("wagma", 3, "training_step", 6, "fsdp"),
        ("local_sgd", 0, "validation_step", 3, "fsdp"),
        ("local_sgd", 1, "gather", 2, "fsdp"),
        ("local_sgd", 0, "training_step", 10, "tensor"),
    ],
)
def test_a_rank_is_killed_and_the_other_replica_trains_to_the_end(
    name: str, lost: int, hook: str, at: int, parallel: str, tmp_path: Path
) -> None:
    outcomes = WORLD.outcomes(4, fit, name, str(tmp_path), lost, hook, at, parallel)
    first, second = check_left(outcomes, lost, tmp_path)
    partner = lost ^ 1
    assert outcomes[partner].error.startswith(f"PeerLost: rank {lost} ")
    assert f"rank {partner} cannot go on without rank {lost}" in outcomes[partner].error
    # From the next epoch on the data are divided among those that are left.
    assert first["num_batches"] == second["num_batches"] == (8 if parallel == "fsdp" else 16)
    assert (first["samples"] == second["samples"]) == (parallel != "fsdp")


@exhaustive
def test_a_users_collective_fails_and_the_other_replica_goes_on(tmp_path: Path) -> None:
    hook = "on_validation_epoch_end"
    outcomes = WORLD.outcomes(4, fit, "local_sgd", str(tmp_path), 3, hook, 3)
    check_left(outcomes, 3, tmp_path)
    assert outcomes[2].error.startswith("RuntimeError")
