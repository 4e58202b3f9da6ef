"""A loop in plain PyTorch, in Fabric or in FSDP that is slow in one way, which SLOW names.

FACE is "fabric", "fully_shard", "fsdp" (its first version) or empty, for DDP in plain PyTorch.

loader      rank 1's loader takes its time (Lightning #20702: DDP is slower than one GPU)
late        rank 1 computes for longer
copies      rank 1 brings its batches to the device for longer; Fabric does it
validation  rank 0 validates, for longer than it takes to train
saving      rank 0 saves in each step
"""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SLOW = os.environ.get("SLOW", "")
STEPS = 40


def is_slow(what: str, rank: int) -> bool:
    return what == SLOW and rank == dist.get_rank()


def take_time(what: str, rank: int, seconds: float = 0.05) -> None:
    """Makes a rank slow in this, where it is to be."""
    if is_slow(what, rank):
        time.sleep(seconds)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * dist.get_world_size()

    def __getitem__(self, row: int) -> torch.Tensor:
        take_time("loader", 1)
        return torch.ones(32)


class Batch:
    """A batch that takes its time to come to a device; Fabric calls `to` of any object."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = torch.stack(rows)

    def to(self, device: torch.device) -> torch.Tensor:
        take_time("copies", 1)
        return self.rows.to(device)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        take_time("late", 1)
        return self.layer(x)


class Slow:
    """A checkpoint that takes its time to be written."""

    def __reduce__(self) -> Any:
        time.sleep(0.05)
        return str, ()


def wrapped(model: torch.nn.Module, by: str) -> Any:
    if by == "fsdp":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if by == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(model)


def main() -> None:
    model: Any = Model()
    fabric: Any = None
    if os.environ.get("FACE") == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
        fabric.launch()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = fabric.setup(model, optimizer)
        loader: Any = fabric.setup_dataloaders(DataLoader(Rows(), collate_fn=Batch))
    else:
        dist.init_process_group("gloo")
        model = wrapped(model, os.environ.get("FACE", ""))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(Rows(), sampler=DistributedSampler(Rows()))
    for step, x in enumerate(loader):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward() if fabric is None else fabric.backward(loss)
        optimizer.step()
        if is_slow("saving", 0):
            torch.save(Slow(), os.devnull)
        if step % 4 == 3 and dist.get_rank() == 0:
            model.eval()
            take_time("validation", 0, 0.2)
            model.train()


main()
