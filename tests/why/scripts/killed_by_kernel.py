"""The kernel kills one rank (Lightning #9303)."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(10):
    model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 1:
    time.sleep(3)  # <- culprit
    os.kill(os.getpid(), signal.SIGKILL)
model(torch.ones(2, 4)).sum().backward()  # <- others
