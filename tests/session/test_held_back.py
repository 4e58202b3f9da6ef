"""What sparse strategies hold back is not lost: at the end of training, and by other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dsgd as dsgd
from tests.support.models import trainer
from tests.support.worlds import FitWorld

exhaustive = pytest.mark.exhaustive
LR = 0.5
COUNTS = (7, 3, 5)
"""Batches of each rank, in every epoch."""
FIRST = "first.ckpt"


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(400, generator=torch.Generator().manual_seed(100 * rank + step))


def batches_of(rank: int) -> list[Tensor]:
    return [gradient_of(rank, step) for step in range(COUNTS[rank])]


def way(world_size: int, local_steps: int) -> Tensor:
    """What an epoch changes where every gradient counts once."""
    ranks = [torch.stack(batches_of(rank)) for rank in range(world_size)]
    if local_steps > 1:
        return -LR * torch.stack([each.sum(0) for each in ranks]).mean(0)
    steps = range(max(map(len, ranks)))
    means = [torch.stack([g[step] for g in ranks if step < len(g)]).mean(0) for step in steps]
    return -LR * torch.stack(means).sum(0)


class Known(L.LightningModule):
    """Its gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(400))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self.w @ batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR)


def by_trainer(folder: str, options: dict[str, Any], first: bool) -> Tensor:
    model, strategy = Known(), dsgd.OkTopkStrategy(**options, timeout_s=60.0)
    saving = ModelCheckpoint(folder, Path(FIRST).stem)
    run = trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=1 if first else 2,
        use_distributed_sampler=False,
        enable_checkpointing=first,
        callbacks=[saving] if first else [],
    )
    data = DataLoader(batches_of(int(os.environ["RANK"])), None)
    run.fit(model, data, ckpt_path=None if first else f"{folder}/{FIRST}")
    return model.w.detach()


def steps(batches: Iterable[Tensor], model: Known, step: Callable[[Tensor], None]) -> None:
    for batch in batches:
        model.zero_grad()
        step(model.training_step(batch))


def by_loop(folder: str, options: dict[str, Any], first: bool) -> Tensor:
    model = Known()
    optimizer = model.configure_optimizers()

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    with dsgd.decentralized(model, optimizer, dsgd.OkTopk(**options), timeout_s=60.0) as replica:
        if not first:
            replica.load(f"{folder}/{FIRST}")
        steps(batches_of(replica.rank), model, step)
        if first:
            replica.save(f"{folder}/{FIRST}")
    return model.w.detach()


def by_fabric(folder: str, options: dict[str, Any], first: bool) -> Tensor:
    strategy = dsgd.FabricStrategy(dsgd.OkTopk(**options), timeout_s=60.0)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = Known()
    net, optimizer = fabric.setup(model, model.configure_optimizers())
    net.mark_forward_method("training_step")
    state = {"model": net, "optimizer": optimizer}
    if not first:
        fabric.load(f"{folder}/{FIRST}", state)
    with fabric.strategy:
        for batch in batches_of(fabric.global_rank):
            optimizer.zero_grad()
            fabric.backward(net.training_step(batch))
            optimizer.step()
        if first:
            fabric.save(f"{folder}/{FIRST}", state)
    return model.w.detach()


@pytest.mark.parametrize("local_steps", [1, pytest.param(4, marks=exhaustive)])
@pytest.mark.parametrize("train", [by_trainer, by_loop, pytest.param(by_fabric, marks=exhaustive)])
def test_every_gradient_is_applied_once_all_have_trained(
    train: Callable[..., Tensor], local_steps: int, tmp_path: Path
) -> None:
    """Three ranks with different numbers of batches, two of which go on from a checkpoint."""
    options, goal = {"density": 0.02, "local_steps": local_steps}, torch.zeros(400)
    for world_size in (3, 2):
        first = world_size == 3
        goal += way(world_size, local_steps)
        for end in FitWorld().run(world_size, train, str(tmp_path), options, first):
            torch.testing.assert_close(end, goal, rtol=0, atol=1e-4)
    where = "model" if train is by_fabric else "state_dict"
    saved = next(iter(torch.load(tmp_path / FIRST, weights_only=True)[where].values()))
    assert (saved - way(3, local_steps)).norm() > 0.2 * saved.norm()  # what was held back
