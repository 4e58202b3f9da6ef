"""One rank waits, among ranks that mpiexec or srun has started.

python started_by_others.py STORE
"""

import os
import sys
import time

import torch.distributed as dist

names = (
    ("PMI_RANK", "PMI_SIZE")
    if "SLURM_STEP_ID" not in os.environ
    else (
        "SLURM_PROCID",
        "SLURM_NTASKS",
    )
)
rank, size = (int(os.environ[name]) for name in names)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
dist.barrier()
if rank == 1:
    time.sleep(1000)  # <- culprit
dist.barrier()  # <- others
