"""What watching costs: steps of 50 ms of DDP, with and without the recorder, in turns.

    python benchmarks/why_cost.py [ROUNDS]

Each rank's training thread computes for 50 ms of its processor's time, then sums a gradient.  The
cost is what the rank's other threads use more of the processor with the recorder on, as a share of
the time that has passed.  The steps' length is not compared: other work on the machine changes it
by more.  It also tells the size of what each rank has written.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 2
STEPS = 120
STEP_S = 0.05
JOB = f"""
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
x, y = torch.ones(8, 64), torch.randn(64, 64)

def step():
    until = time.thread_time() + {STEP_S}
    while time.thread_time() < until:
        torch.tanh(y @ y)
    model(x).sum().backward()

for _ in range(10):
    step()
began, wall, own = time.process_time(), time.monotonic(), time.thread_time()
for _ in range({STEPS}):
    step()
used = time.process_time() - began, time.thread_time() - own, time.monotonic() - wall
if dist.get_rank() == 0:
    print(json.dumps(used))
"""


def run(folder: Path, is_watched: bool) -> tuple[float, float, float]:
    """Returns the processor's time of rank 0's process, of its main thread, and the time passed."""
    script = folder / "job.py"
    script.write_text(JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={RANKS}", str(script)]
    if is_watched:
        why = [sys.executable, "-m", "lightning_dsgd", "why", "--to", str(folder / "run"), "--"]
        command = why + command
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    process_s, own_s, passed_s = json.loads(done.stdout.splitlines()[-1])
    return process_s, own_s, passed_s


def main() -> None:
    """Prints the median over the rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    costs, sizes = [], []
    for _ in range(rounds):
        used = {}
        for is_watched in (False, True):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                process_s, own_s, passed_s = run(folder, is_watched)
                # The main thread's own work is the same; what is beside it is what may differ.
                used[is_watched] = (process_s - own_s) / passed_s, own_s
                if is_watched:
                    files = list((folder / "run").iterdir())
                    sizes.append(sum(file.stat().st_size for file in files) / RANKS)
        beside = used[True][0] - used[False][0]
        own = used[True][1] / used[False][1] - 1
        costs.append(beside)
        print(
            f"beside the training thread {100 * beside:+.2f}% of the time; in it {100 * own:+.2f}%"
        )
    print(
        f"watched: {100 * statistics.median(costs):+.2f}% of the time (median of {rounds}); "
        f"{max(sizes) / 1e3:.0f} kB a rank; load {os.getloadavg()[0]:.0f}"
    )


if __name__ == "__main__":
    main()
