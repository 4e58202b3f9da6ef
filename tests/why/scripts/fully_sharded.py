"""One rank waits in the forward or the backward pass of torch's FSDP, as STOPS says."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


class Stops(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if dist.get_rank() == 1 and self.step == 10:
            if os.environ["STOPS"] == "backward":
                x.register_hook(self.stop)
            else:
                self.stop(x)
        return x

    def stop(self, _: torch.Tensor) -> None:
        time.sleep(1000)  # <- culprit


model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 4), Stops(), torch.nn.Linear(4, 4))
if os.environ["FSDP"] == "1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
for _ in range(1000):
    model(torch.ones(2, 4)).sum().backward()  # <- others
