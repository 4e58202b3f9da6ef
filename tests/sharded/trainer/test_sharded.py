"""What holds of `ShardedStrategy`: 2 replicas x 2 shards under the Trainer, in real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd import ShardedStrategy
from tests.support.fits import errors, run
from tests.support.models import Regression, loader, trainer
from tests.support.thorough import cases
from tests.support.worlds import FitWorld

exhaustive = pytest.mark.exhaustive


class Sharded(Regression):
    def __init__(self, parallel: str = "fsdp") -> None:
        super().__init__(momentum=0.9)
        self.parallel = parallel
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        self.ids: list[float] = []

    def configure_model(self) -> None:
        if isinstance(next(self.net.parameters()), DTensor):
            return  # as it has been called for another of the Trainer's functions
        if self.parallel == "fsdp":
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        else:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ids.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)


def whole(module: nn.Module) -> Tensor:
    """All weights; the ranks of a replica call it together."""
    state = module.state_dict().values()
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in state]
    return torch.cat([t.reshape(-1) for t in full])


def strategy_of(algorithm: Any, **sizes: Any) -> ShardedStrategy:
    return ShardedStrategy(algorithm, num_replicas=2, timeout_s=20.0, **sizes)


def fit(algorithm: Any, folder: Path, parallel: str = "fsdp", **options: Any) -> Any:
    L.seed_everything(0, verbose=False)
    module = Sharded(parallel)
    sizes = {} if parallel == "fsdp" else {"tensor_parallel_size": 2}
    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
    ckpt_path = options.pop("ckpt_path", None)
    own = trainer(
        strategy_of(algorithm, **sizes),
        dist.get_world_size(),
        callbacks=[saver],
        enable_checkpointing=True,
        **{"max_epochs": 2, **options},
    )
    own.fit(module, loader(), loader(32), ckpt_path=ckpt_path)
    return module, own


def train(name: str, folder: Path, parallel: str) -> tuple[Any, ...]:
    algorithm = {"local_sgd": dsgd.LocalSGD(sync_period=3), "wagma": dsgd.WAGMA(group_size=2)}[name]
    module, own = fit(algorithm, folder, parallel, gradient_clip_val=1.0, max_epochs=4)
    loss = float(own.callback_metrics["val_loss"])
    samples = module.ids[: len(module.ids) // 4]
    [after] = own.validate(module, loader(32), verbose=False)
    own.save_checkpoint(folder / "end.ckpt")
    return loss, after["val_loss"], whole(module), sorted(samples)


@cases(
    "name, parallel",
    now=[("wagma", "fsdp")],
    later=[("local_sgd", "tensor"), ("local_sgd", "fsdp")],
)
def test_replicas_learn_and_agree(name: str, parallel: str, tmp_path: Path) -> None:
    ranks = run(4, train, name, tmp_path, parallel)
    for loss, after, weights, _ in ranks:
        assert torch.equal(weights, ranks[0][2])
        assert (loss, after) == ranks[0][:2]
        assert after == pytest.approx(loss, rel=1e-4)
        assert loss < 2  # of 10, the variance of the target
    distinct = {tuple(samples) for *_, samples in ranks}
    assert len(distinct) == (4 if parallel == "fsdp" else 2)
    for name in ("epoch=3.ckpt", "end.ckpt"):
        plain = Regression()
        plain.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        saved = torch.load(tmp_path / name, weights_only=True)
        plain.load_state_dict(saved["state_dict"])
        x = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        assert torch.equal(x, ranks[0][2])


def resume(folder: Path) -> tuple[Tensor, Tensor]:
    algorithm = dsgd.LocalSGD(sync_period=7)
    straight, _ = fit(algorithm, folder / "straight", max_epochs=3)
    module, _ = fit(algorithm, folder / "first", max_epochs=1)
    path = folder / "first" / "epoch=0.ckpt"
    module, _ = fit(algorithm, folder / "second", max_epochs=3, ckpt_path=str(path))
    return whole(straight), whole(module)


def go_on(path: Path) -> tuple[Tensor, Tensor, int]:
    module = Sharded()
    strategy = ShardedStrategy(dsgd.LocalSGD(sync_period=7), num_replicas=1, timeout_s=20.0)
    own = trainer(strategy, dist.get_world_size(), max_epochs=2)
    own.validate(module, loader(32), ckpt_path=str(path), verbose=False)
    loaded = whole(module)
    module = Sharded()
    own.fit(module, loader(), ckpt_path=str(path))
    return loaded, whole(module), own.global_step


@exhaustive
def test_a_checkpoint_goes_on_with_the_same_bits_and_from_other_numbers(tmp_path: Path) -> None:
    for straight, resumed in run(4, resume, tmp_path):
        assert torch.equal(straight, resumed)
    path = tmp_path / "first" / "epoch=0.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    weights = torch.cat([value.reshape(-1) for value in saved.values()])
    for loaded, after, num_steps in run(2, go_on, path):
        assert torch.equal(loaded, weights)
        assert not torch.equal(after, weights)
        assert num_steps == 4 + 8


# ---- different numbers of batches ----
def fit_uneven(numbers: tuple[int, ...], algorithm: Any) -> Tensor:
    x = torch.randn(8 * numbers[dist.get_rank()], 10)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    module = Sharded()
    own = trainer(strategy_of(algorithm), 4, use_distributed_sampler=False, max_epochs=2)
    own.fit(module, data)
    return whole(module)


def test_replicas_may_have_different_numbers_of_batches() -> None:
    ranks = run(4, fit_uneven, (4, 4, 7, 7), dsgd.WAGMA(group_size=2))
    assert all(torch.equal(x, ranks[0]) for x in ranks)


# ---- what cannot work ----
def uneven_within() -> None:
    fit_uneven((4, 5, 4, 5), dsgd.LocalSGD())


def wrong_sizes() -> None:
    trainer(ShardedStrategy(dsgd.LocalSGD(), num_replicas=3), 4).fit(Sharded(), loader())


def wagma_with_tensor() -> None:
    strategy = strategy_of(dsgd.WAGMA(group_size=2), tensor_parallel_size=2)
    trainer(strategy, 4).fit(Sharded("tensor"), loader())


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (uneven_within, "got 4 batches on ranks 0 and 2, 5 batches on ranks 1 and 3"),
        (wrong_sizes, "must be the number of ranks, got num_replicas=3, data_parallel_size=1"),
        (wagma_with_tensor, "must not depend on which rank comes first"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(fn: Any, text: str) -> None:
    for error in errors(4, fn):
        assert error.startswith("ValueError")
        assert text in error


@pytest.mark.parametrize(
    ("algorithm", "options", "text"),
    [
        (dsgd.AllReduce(), {}, "an algorithm must exchange weights, got 'allreduce'"),
        ("allreduce", {}, "an algorithm must exchange weights, got 'allreduce'"),
        ("wagam", {}, "got 'wagam'; did you mean wagma"),
        (dsgd.LocalSGD(), {"num_replicas": 0}, "num_replicas must be a number of ranks"),
        (dsgd.LocalSGD(), {"min_ranks": 2}, 'min_ranks needs on_loss="continue"'),
        (dsgd.LocalSGD(), {"max_ranks": 2}, "got max_ranks=2; leave it out"),
        (dsgd.LocalSGD(), {"start_method": "fork"}, "has no option start_method"),
        (dsgd.LocalSGD(), {"save_distributed_checkpoint": True}, "has no option save_distr"),
    ],
)
def test_options_are_refused_when_it_is_made(algorithm: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardedStrategy(algorithm, **{"num_replicas": 2, **options})


def test_it_takes_the_name_of_an_algorithm() -> None:
    assert ShardedStrategy("wagma", 2).algorithm == dsgd.WAGMA()


# ---- a lost rank ----
class Failing(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (dist.get_rank(), self.current_epoch, batch_idx) == (3, 1, 2):
            os._exit(7)
        return super().training_step(batch, batch_idx)


def lose_one(folder: Path, **options: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    strategy = ShardedStrategy(dsgd.LocalSGD(3), num_replicas=2, timeout_s=60.0, **options)
    own = trainer(strategy, 4, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
    module = Failing()
    own.fit(module, loader(), loader(32))
    return {
        "weights": whole(module),
        "members": strategy.session.ranks.members,
        "is_first": own.is_global_zero,
        "samples": sorted(module.ids[-own.num_training_batches :]),
        "val_loss": float(own.callback_metrics["val_loss"]),
    }


def test_a_lost_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    *others, last = FitWorld().outcomes(4, lose_one, tmp_path)
    assert last.exitcode == 7
    for outcome in others:
        assert outcome.error.startswith("PeerLost: rank 3 died")


def lose_one_and_go_on(folder: Path) -> dict[str, Any]:
    return lose_one(folder, on_loss="continue", heartbeat_timeout_s=20.0)


def test_the_other_replica_may_go_on_without_one_that_has_lost_a_rank(tmp_path: Path) -> None:
    *left, partner, _ = FitWorld().outcomes(4, lose_one_and_go_on, tmp_path)
    assert partner.error.startswith("PeerLost: rank 3 ")
    assert "rank 2 cannot go on without rank 3" in partner.error
    assert [outcome.error for outcome in left] == ["", ""]
    first, second = (outcome.result for outcome in left)
    assert torch.equal(first["weights"], second["weights"])
    assert first["members"] == second["members"] == (0, 1)
    assert [first["is_first"], second["is_first"]] == [True, False]
    assert first["val_loss"] == second["val_loss"]
    # From the next epoch on the data are divided among those that are left.
    assert len(first["samples"]) == len(second["samples"]) == 8
    assert first["samples"] != second["samples"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"] == 2
