"""One rank runs out of memory, the others are in a sum (Lightning #8130, #5243, #9303)."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(1000):
    if step == 10 and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")  # <- culprit
    model(torch.ones(2, 4)).sum().backward()  # <- others
