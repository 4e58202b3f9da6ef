"""How good is a model that `balanced` has trained, beside one process that makes the same steps?

    python benchmarks/balanced_quality.py

The simulated world: 4 ranks, of which one takes twice as long and each stalls now and then, compute
real gradients of small networks, 2 micro-batches a rank and step.  The other training has the same
weights, batches and order of steps, and its gradient is the mean over all micro-batches of a step,
summed by rank as DDP with accumulation sums them.  Its best rate of a grid, on seeds that are not
reported, trains both.  Transformers have AdamW and their figure is the validation loss; a network
of two layers and a ResNet have momentum, and accuracy.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import script
from benchmarks.compare.small_tasks import BATCH, TASKS, Networks, Task
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.dealing import UnitDealing
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.simulated import SimulatedWorld

RANKS: Final = 4
SLOTS: Final = 2
"""Micro-batches of a rank in a step."""
RATES: Final = {
    "digits": (0.2, 0.4, 0.8, 1.6),
    "resnet": (0.1, 0.2, 0.4, 0.8),
    "language": (0.005, 0.01, 0.02, 0.04),
    "translation": (0.005, 0.01, 0.02, 0.04),
}
TUNING_SEEDS: Final = (1000, 1001)
LATENCY_S: Final = 1e-3
STALL: Final = 0.02
"""How likely a micro-batch takes ten times as long."""


def _task(name: str) -> Task:
    """A task whose figure is the validation loss, where it trains a Transformer."""
    is_transformer = TASKS[name].warmup > 0
    return replace(TASKS[name], higher_is_better=not is_transformer)


class Run:
    """One training: its data, network and schedule.

    Args:
        name: of the task
        lr: the highest rate
        seed: of weights, data and stalls
        num_steps: how many steps it makes
    """

    def __init__(self, name: str, lr: float, seed: int, num_steps: int) -> None:
        self.task = _task(name)
        self.lr, self.seed, self.num_steps = lr, seed, num_steps
        torch.manual_seed(seed)
        self.networks = Networks(self.task, RANKS)
        self.inputs, self.targets, *self.held_out = self.task.examples(seed)
        draw = torch.Generator().manual_seed(seed)
        shape = num_steps, RANKS * SLOTS, BATCH
        self.examples = torch.randint(len(self.inputs), shape, generator=draw)

    def gradient(self, x: Tensor, rank: int, step: int, unit: int) -> Tensor:
        """The gradient of a micro-batch, at weights x."""
        examples = self.examples[step, unit][None]
        batches = self.inputs[examples], self.targets[examples]
        return self.networks.gradients(x[None], [rank], batches)[0]

    def steps(self) -> Iterator[tuple[int, Tensor, torch.nn.Parameter]]:
        """Yields each step with the weights; whoever takes it leaves the gradient in them."""
        weights = torch.nn.Parameter(self.networks.weights())
        optimizer = self.task.optimizer([weights], self.lr)
        for step in range(self.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.task.share_of_lr(step, self.num_steps)
            yield step, weights.detach(), weights
            optimizer.step()

    def quality(self, x: Tensor) -> float:
        """The validation loss of a Transformer, else the accuracy."""
        return self.networks.quality(x, *self.held_out)


def in_one_process(run: Run) -> float:
    """Trains as DDP with accumulation does; returns the quality."""
    x = torch.empty(0)
    for step, x, weights in run.steps():
        own = torch.zeros(RANKS, len(x))
        for unit in range(RANKS * SLOTS):
            own[unit % RANKS] += run.gradient(x, unit % RANKS, step, unit) / SLOTS
        weights.grad = own.mean(0)
    return run.quality(x)


def balanced(run: Run) -> tuple[float, int]:
    """Trains on all ranks; returns the quality, and how many units were computed in vain."""
    chance = random.Random(run.seed)

    def train(net: Any) -> tuple[Tensor, int]:
        algorithm, num_void = Balanced(), 0
        flags = Conditions(gradient_counts=torch.zeros(1).long())
        algorithm.start(net.sub("sums"), run.networks.weights(), flags)
        dealing = UnitDealing(net.sub("units"), backups=True, on_closed=algorithm.close_step)
        homes = [rank for _ in range(SLOTS) for rank in range(RANKS)]
        dealing.know(0, [homes] * run.num_steps)
        x = torch.empty(0)
        for step, x, weights in run.steps():
            dealing.begin_step(step)
            while (unit := dealing.take(waits=True)) != NONE:
                usual = (2.0 if net.rank == 1 else 1.0) / SLOTS
                net.compute(usual * (10.0 if chance.random() < STALL else 1.0))
                g = [run.gradient(x, net.rank, step, unit)]
                entered = dealing.finish(
                    lambda: algorithm.add(step, unit, lambda flat: [flat], g, 1 / SLOTS)  # noqa: B023
                )
                num_void += not entered
            weights.grad = algorithm.take_sum(step)[0].clone()
        net.sub("end").barrier().wait()
        dealing.close()
        algorithm.stop()
        return x, num_void

    world = SimulatedWorld(RANKS, latency_s=LATENCY_S, strict=False, timeout_s=math.inf)
    with on_one_core():
        ends = world.run(train)
    assert all(torch.equal(x, ends[0][0]) for x, _ in ends), "ranks hold different weights"
    return run.quality(ends[0][0]), sum(num_void for _, num_void in ends)


def best_rate(name: str, num_steps: int) -> float:
    """The rate of the grid with which one process ends best; never one at the grid's edge."""

    def mean(lr: float) -> float:
        ends = [in_one_process(Run(name, lr, seed, num_steps)) for seed in TUNING_SEEDS]
        sign = -1 if _task(name).higher_is_better else 1
        return sign * statistics.mean(ends)

    best = min(RATES[name], key=mean)
    if best in (RATES[name][0], RATES[name][-1]):
        raise SystemExit(f"{name}: the best rate, {best}, is at the edge of {RATES[name]}")
    return best


def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "docs/results/balanced/quality.json")
    parser.add_argument("--tasks", default=",".join(RATES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = {"ranks": RANKS, "slots": SLOTS, "steps": args.steps, "batch": BATCH}
    told = {"settings": settings, "hyperparameters": in_force(["balanced"], [RANKS])}
    told, rows = {**provenance(), **told}, []
    for name in args.tasks.split(","):
        lr = best_rate(name, args.steps)
        for seed in range(1, args.seeds + 1):
            expected = in_one_process(Run(name, lr, seed, args.steps))
            found, num_void = balanced(Run(name, lr, seed, args.steps))
            row = {"task": name, "lr": lr, "seed": seed, "one_process": expected}
            rows.append(row | {"balanced": found, "void": num_void})
            print(rows[-1], flush=True)
        write_result({**told, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
