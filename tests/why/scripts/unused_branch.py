"""One rank skips a layer, whose gradient the others wait for (Lightning #6798)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        x = self.first(x)
        return x if skips else self.second(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(Net())
for step in range(20):
    skips = step == 10 and dist.get_rank() == 1
    model(torch.ones(2, 4), skips).sum().backward()  # <- culprit
