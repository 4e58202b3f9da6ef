"""What sparse strategies hold back is not lost: at the end of training, and by other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_dsgd as dsgd
from tests.support.faces import FACES, Loop
from tests.support.thorough import cases
from tests.support.worlds import FitWorld

LR = 0.5
COUNTS = (7, 3, 5)
"""Batches of each rank, in every epoch."""


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

    def loss(self, batch: Tensor) -> Tensor:
        return self.w @ batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR)


def train(face: str, path: str, options: dict[str, Any], first: bool) -> Tensor:
    model, where = Known(), {"saves" if first else "resumes": path}
    loop = Loop(model, dsgd.OkTopk(**options), batches_of(dist.get_rank()), **where)
    loop.epochs = 1 if first else 2
    FACES[face](loop)
    return model.w.detach()


@cases("local_steps", now=[1], later=[4])
@cases("face", now=["Trainer", "plain"], later=["Fabric"])
def test_every_gradient_is_applied_at_last(face: str, local_steps: int, tmp_path: Path) -> None:
    """Three ranks with different numbers of batches, two of which go on from a checkpoint."""
    path = tmp_path / "first"
    options, goal = {"density": 0.02, "local_steps": local_steps}, torch.zeros(400)
    for world_size in (3, 2):
        first = world_size == 3
        goal += way(world_size, local_steps)
        for end in FitWorld().run(world_size, train, face, str(path), options, first):
            torch.testing.assert_close(end, goal, rtol=0, atol=1e-4)
    where = "model" if face == "Fabric" else "state_dict"
    saved = torch.load(path, weights_only=True)[where]["w"]
    assert (saved - way(3, local_steps)).norm() > 0.2 * saved.norm()  # what was held back
