"""What watching costs: steps of 50 ms of DDP, alone, with the recorder and with timed steps.

    python benchmarks/why_cost.py [ROUNDS]

Each rank's training thread takes a batch of a loader, computes for 50 ms of its processor's time,
sums a gradient and steps.  The cost is what the rank uses more of the processor than alone: its
training thread in a step, and its other threads as a share of the time that has passed.  The steps'
length is not compared: other work on the machine changes it by more.  It also tells the size of
what each rank has written.

At last it tells what a step's marks on a device cost of Python, with events that do nothing: what
torch's own events take on a GPU is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_dsgd.lab.accelerators import DeviceTimes
from lightning_dsgd.lab.timeline.device_parts import DeviceParts
from lightning_dsgd.lab.timeline.recorder import Recorder

RANKS = 2
WARM_UP, STEPS = 10, 120
STEP_S = 0.05
JOB = f"""
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
y = torch.randn(64, 64)
loader = torch.utils.data.DataLoader(torch.ones(8 * {WARM_UP + STEPS}, 64), 8)
computed = 0.0

for number, x in enumerate(loader):
    if number == {WARM_UP}:
        began, wall, own = time.process_time(), time.monotonic(), time.thread_time()
        computed = 0.0
    begin = time.thread_time()
    while time.thread_time() < begin + {STEP_S}:
        torch.tanh(y @ y)
    computed += time.thread_time() - begin
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
passed = time.monotonic() - wall
beside = time.process_time() - began - (time.thread_time() - own)
used = beside / passed, (time.thread_time() - own - computed) / {STEPS}
if dist.get_rank() == 0:
    print(json.dumps(used))
"""


WATCHED = {
    "alone": None,
    "recorder": ["--only-stuck"],
    "timed steps": [],
}
"""How `lightning-dsgd why` is told to watch."""


def run(folder: Path, options: list[str] | None) -> tuple[float, float]:
    """Returns what rank 0 uses of the processor, beside its pure computing.

    Its other threads' as a share of the time that has passed, and its training thread's in a step.
    """
    script = folder / "job.py"
    script.write_text(JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={RANKS}", str(script)]
    if options is not None:
        why = [sys.executable, "-m", "lightning_dsgd", "why", *options, "--to", str(folder / "run")]
        command = [*why, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    beside, in_step_s = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("["))
    )
    return beside, in_step_s


class Event:
    """An event that has passed, and does nothing."""

    def record(self, stream: None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1.0


def marks_s(steps: int = 2000) -> float:
    """Returns what the marks of a step take of the training thread, and their record."""
    parts = DeviceParts(DeviceTimes(Event, lambda: None))
    parts.begin()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0, RANKS, time.monotonic, max_mb=1000)
        costs = []
        for is_timed in (False, True):
            began_s = time.thread_time()
            for number in range(steps):
                for part in ("copy", "forward", "backward", "optimizer", "") if is_timed else ():
                    parts.turn_to(part)
                for kind, begin_s, end_s, step in parts.end_step(number):
                    recorder.did(kind, begin_s, end_s, step)
                recorder.end_step(number)
            costs.append((time.thread_time() - began_s) / steps)
        recorder.close("")
    return costs[1] - costs[0]


def main() -> None:
    """Prints the medians over the rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in WATCHED}
    sizes: dict[str, list[float]] = {name: [] for name in WATCHED}
    for _ in range(rounds):
        used = {}
        for name, options in WATCHED.items():
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                used[name] = run(folder, options)
                if options is not None:
                    files = [file for file in (folder / "run").rglob("*") if file.is_file()]
                    sizes[name].append(sum(file.stat().st_size for file in files) / RANKS)
        for name in WATCHED:
            beside, in_step_s = (
                mine - own for mine, own in zip(used[name], used["alone"], strict=True)
            )
            costs[name].append((beside, in_step_s / STEP_S))
    for name in WATCHED:
        if name != "alone":
            beside, in_step = (statistics.median(each) for each in zip(*costs[name], strict=True))
            print(
                f"{name}: {100 * in_step:+.2f}% of a step in the training thread, "
                f"{100 * beside:+.2f}% of the time beside it (medians of {rounds}); "
                f"{max(sizes[name]) / 1e3:.0f} kB a rank for {WARM_UP + STEPS} steps; "
                f"load {os.getloadavg()[0]:.0f}"
            )
    took_s = statistics.median(marks_s() for _ in range(max(5, rounds)))
    print(f"marks on a device: {1e6 * took_s:.0f} us a step, {100 * took_s / STEP_S:.2f}% of it")


if __name__ == "__main__":
    main()
