"""Ranks use two groups in different orders (a deadlock of pipelines and tensor parallelism)."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
for group in groups:
    dist.barrier(group)
first, second = groups if dist.get_rank() == 0 else groups[::-1]
dist.all_reduce(torch.ones(1), group=first)  # <- others
dist.all_reduce(torch.ones(1), group=second)
