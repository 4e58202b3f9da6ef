"""One rank has fewer batches, and is through (Lightning #3325, #20404, #20561)."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
num_batches = 8 if dist.get_rank() == 1 else 10
for _ in range(num_batches):
    model(torch.ones(2, 4)).sum().backward()  # <- others
dist.barrier()  # <- culprit
