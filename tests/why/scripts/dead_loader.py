"""A worker of one rank's loader hangs (Lightning #18149, #10389)."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> torch.Tensor:
        if dist.get_rank() == 1 and row == 20:
            time.sleep(1000)
        return torch.ones(4)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for batch in DataLoader(Rows(), batch_size=2, num_workers=1):  # <- culprit
    model(batch).sum().backward()  # <- others
