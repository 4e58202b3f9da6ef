"""A metric is computed on rank 0 alone (TerraTorch #1219, Lightning #19106)."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
metric = MeanMetric()
for step in range(1000):
    loss = model(torch.ones(2, 4)).sum()
    metric.update(loss)
    if step == 10 and dist.get_rank() == 0:
        print("mean", metric.compute())  # <- culprit
    loss.backward()  # <- others
