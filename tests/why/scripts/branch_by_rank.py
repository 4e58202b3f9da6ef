"""One rank alone waits for a file (Lightning #19604: what depends on the rank deadlocks)."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def wait_for_a_file() -> None:
    time.sleep(1000)  # <- culprit


def train() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(1000):
        if dist.get_rank() == 2 and step == 10:
            wait_for_a_file()
        model(torch.ones(2, 4)).sum().backward()  # <- others


train()
