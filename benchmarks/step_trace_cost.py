"""What `StepTrace` adds to a training step.

    python benchmarks/step_trace_cost.py
    python benchmarks/step_trace_cost.py --strategy ddp --sleep-ms 45 --output \\
        docs/results/know_before_you_choose/step_trace_cost_ddp.json

1. The recorder alone: microseconds per step, with as many waits as a step of 2 and of 64 ranks has.
2. Two ranks that train a small network with `allreduce`: short fits with and without the callback
   alternate within one job; a sample is the ratio of the two median step times of a round, and the
   result is the median of the ratios.  The processor's time of a step, with and without, does not
   depend on what else the machine does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import script
from benchmarks.compare import contestants
from lightning_dsgd import StepTrace
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.timeline.recorder import Recorder

RANKS = 2
KEYS = ("steps", "width", "batch_size", "strategy", "sleep_ms")
CALLS = {"2 ranks": 2, "64 ranks": 126}
"""Waits of an all-reduce in a step: the first also has its exchange and its fetch."""


def recorder_us(num_waits: int, num_steps: int = 2000) -> float:
    """Of one step: the calls, the line of text, and the file."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0, RANKS, time.monotonic, max_mb=1000)
        begin = time.perf_counter()
        for number in range(num_steps):
            now = time.monotonic()
            recorder.fetched(now, now + 1e-3)
            for src in range(num_waits):
                recorder.waited(now, now + 1e-3, src, in_lane=False)
            recorder.exchanged(now, now + 1e-3)
            recorder.end_step(number)
        took = time.perf_counter() - begin
        recorder.close("")
    return 1e6 * took / num_steps


class Network(L.LightningModule):
    def __init__(self, width: int, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        layers = (m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU()))
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cores: list[float] = []  # of the processor, all threads

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cores.append(time.process_time())

    def core_s(self, warm_up: int = 5) -> float:
        cores = self.cores[warm_up:]
        return (cores[-1] - cores[0]) / (len(cores) - 1)

    def median_s(self, warm_up: int = 5) -> float:
        return statistics.median(b - a for a, b in pairwise(self.ends[warm_up:]))


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One short fit: the median time of a step."""
    L.seed_everything(0, verbose=False)
    model = Network(settings["width"], 1e-3 * settings["sleep_ms"])
    count = settings["batch_size"] * 64
    data = TensorDataset(torch.randn(count, settings["width"]), torch.randint(10, (count,)))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = contestants.trainer(
            settings["strategy"],
            RANKS,
            max_steps=settings["steps"],
            max_epochs=-1,
            callbacks=[clock, *([StepTrace(folder)] if cell["traced"] else [])],
        )
        trainer.fit(model, DataLoader(data, settings["batch_size"]))
    return {"step_s": clock.median_s(), "core_s": clock.core_s()}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/know_before_you_choose/step_trace_cost.json")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--strategy", default="allreduce", help="allreduce or ddp")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="in each step")
    args = parser.parse_args()
    alone = {name: statistics.median(recorder_us(n) for _ in range(5)) for name, n in CALLS.items()}
    for name, us in alone.items():
        print(f"the recorder alone, a step of {name}: {us:.0f} us")
    settings = {key: getattr(args, key) for key in KEYS}
    job = Job(f"{__file__}:run_cell", settings, RANKS)
    plan: list[Cell] = [
        {"round": turn, "traced": traced}
        for turn in range(args.rounds + 1)
        for traced in ((False, True) if turn % 2 else (True, False))
    ]
    samples: dict[int, dict[bool, float]] = {}
    cores: dict[int, dict[bool, float]] = {}
    for result in job.run(plan, args.output)[2:]:  # the first round warms up
        step_s = statistics.mean(rank["step_s"] for rank in result["ranks"])
        samples.setdefault(result["round"], {})[result["traced"]] = step_s
        core_s = statistics.mean(rank["core_s"] for rank in result["ranks"])
        cores.setdefault(result["round"], {})[result["traced"]] = core_s
    ratios = [sample[True] / sample[False] for sample in samples.values()]
    without_s = statistics.median(sample[False] for sample in samples.values())
    print(
        f"a step of {1e3 * without_s:.1f} ms: {statistics.median(ratios):.3f} of its time with "
        f"StepTrace (from {min(ratios):.3f} to {max(ratios):.3f})"
    )
    core_us = 1e6 * statistics.median(each[True] - each[False] for each in cores.values())
    print(f"of a core: {core_us:.0f} us a step, {1e-6 * core_us / without_s:.2%} of its time")
    report = job.provenance() | {
        "core_us": core_us,
        "core_share": 1e-6 * core_us / without_s,
        "recorder_us": alone,
        "step_ms_without": 1e3 * without_s,
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    finish(report, args.output)


if __name__ == "__main__":
    main()
