"""One rank waits for a lock before it joins (Lightning #21367: stuck at "Initializing")."""

import os
import time

if os.environ["RANK"] == "1":
    time.sleep(1000)  # <- culprit

import torch.distributed as dist

dist.init_process_group("gloo")  # <- others
