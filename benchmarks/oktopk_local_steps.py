"""Validation loss against bytes: sparse all-reduces with local steps beside dense algorithms.

    python benchmarks/oktopk_local_steps.py --tasks language

Ranks in the simulated world train a causal language model (AdamW) or a classifier of digits (SGD
with momentum) for the same number of steps: a linear warm-up of the learning rate, then a cosine
to zero.  Every algorithm tries the learning rates of its task with the first seed; the other seeds
run at the one with the lowest loss.  The loss is that of the consensus on the validation split, of
the digits the accuracy too; the bytes are the mean over the ranks.

`powersgd:rank=4` is PowerSGD (Vogels et al. 2019, https://arxiv.org/abs/1905.13727), which sums two
factors of low rank in place of each matrix of gradients; one-dimensional parameters are summed.

Each run is written to the file at once, and a run that is there already is not made again: the
command can be interrupted, and given a part of the algorithms.  At the end the mean loss of the
seeds is drawn against the bytes, beside the file, for all that the file has all seeds of.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from benchmarks import script
from benchmarks.text_pieces import pieces
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Traits
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.hyperparameters import at_least, parse
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import step_scaling
from lightning_dsgd.replica import flat
from lightning_dsgd.replica.part import Part
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData
from lightning_dsgd.tasks.language import CausalLanguageModel

WARMUP_STEPS = 40
STRATEGIES = [
    "allreduce",
    "local_sgd:sync_period=4",
    "powersgd:rank=4",
    "powersgd:rank=1",
    "topk_allgather:density=0.01",
    "oktopk:density=0.01",
    "topk_allgather:local_steps=4:density=0.04",
    "oktopk:local_steps=4:density=0.04",
    "oktopk:local_steps=4:density=0.125",
    "oktopk:local_steps=4:density=0.2:wire_dtype=bfloat16",
    "oktopk:local_steps=4:density=0.4:wire_dtype=int4",
    "oktopk:local_steps=4:density=0.1:wire_dtype=int4",
    "oktopk:local_steps=3:density=0.4:wire_dtype=int4",
    "oktopk:local_steps=2:density=0.2:wire_dtype=int4",
    "oktopk:local_steps=4:density=0.4:wire_dtype=int4:scale_steps=true",
    "oktopk:local_steps=2:density=0.4:wire_dtype=int4:scale_steps=true",
    "oktopk:local_steps=2:density=0.2:wire_dtype=int4:scale_steps=true",
    "local_sgd:sync_period=4:scale_steps=true",
    "local_sgd:sync_period=2:scale_steps=true",
]


@dataclass
class Task:
    """A model, its optimizer at a learning rate of 1, and its loss on a split's samples."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module, str, Tensor], Tensor]
    accuracy: Callable[[nn.Module], float] | None
    num_samples: Callable[[str], int]
    batch_size: int
    learning_rates: list[float]


def digits() -> Task:
    data = DigitsData()
    data.setup("fit")
    splits = {
        name: tuple(torch.stack(column) for column in zip(*data.splits[name], strict=True))
        for name in ("train", "val")
    }

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DigitsClassifier()
        return model, torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)

    def loss(model: nn.Module, split: str, picked: Tensor) -> Tensor:
        images, labels = splits[split]
        return nn.functional.cross_entropy(model(images[picked]), labels[picked])

    def accuracy(model: nn.Module) -> float:
        images, labels = splits["val"]
        return float((model(images).argmax(1) == labels).float().mean())

    rates = [0.01, 0.02, 0.04, 0.08]
    return Task(make, loss, accuracy, lambda split: len(splits[split][0]), 16, rates)


def language() -> Task:
    text = {"seq_len": 64, "max_chars": 200_000}
    splits = {name: pieces(name, **text) for name in ("train", "val")}

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = CausalLanguageModel(dim=40, depth=1, seq_len=64)
        return model, torch.optim.AdamW(model.parameters(), 1.0)

    def loss(model: nn.Module, split: str, picked: Tensor) -> Tensor:
        return nn.functional.cross_entropy(*model.logits_and_targets(splits[split][picked], None))  # type: ignore[operator]

    rates = [0.01, 0.02, 0.04]
    return Task(make, loss, None, lambda split: len(splits[split]), 8, rates)


TASKS = {"language": language, "digits": digits}


@dataclass
class PowerSGD(Algorithm):
    """Algorithms 1 and 2 of the paper, on gradients; the residual is what no factor holds."""

    name: ClassVar[str] = "powersgd"
    traits = Traits(uses_gradient=True, averages_weights=False)
    rank: int = at_least(1, default=4, doc="number of columns of each factor")
    parameters: list[Tensor] = field(default_factory=list)

    def start(self, net: Any, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.residual = torch.zeros_like(x)
        self.places = [(p.data_ptr() - x.data_ptr()) // x.itemsize for p in self.parameters]
        generator = torch.Generator().manual_seed(0)
        self.q = [
            torch.randn(m[0].numel(), self.rank, generator=generator) for m in self.parts(x)[0]
        ]

    def parts(self, g: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices of g, and its vectors."""
        pairs = zip(self.places, self.parameters, strict=True)
        parts = [g[at : at + p.numel()].view_as(p) for at, p in pairs]
        matrices = [part.view(len(part), -1) for part in parts if part.dim() > 1]
        return matrices, [part.view(-1) for part in parts if part.dim() <= 1]

    def before_update(self, x: Tensor, g: Tensor) -> None:
        g += self.residual
        self.residual.copy_(g)
        matrices, vectors = self.parts(g)
        self.average(vectors)
        p = [m @ q for m, q in zip(matrices, self.q, strict=True)]
        self.average(p)
        p = [torch.linalg.qr(each).Q for each in p]
        self.q = [m.T @ each for m, each in zip(matrices, p, strict=True)]
        self.average(self.q)
        for m, left, right in zip(matrices, p, self.q, strict=True):
            torch.mm(left, right.T, out=m)
        self.residual -= g
        for vector in self.parts(self.residual)[1]:
            vector.zero_()

    def average(self, tensors: list[Tensor]) -> None:
        """In one sum."""
        flat = torch.cat([each.reshape(-1) for each in tensors])
        self.net.all_reduce(flat).wait()
        flat /= self.net.world_size
        for each, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            each.copy_(mean.view_as(each))


def make(spec: str, model: nn.Module) -> Algorithm:
    """The algorithm of a strategy, or PowerSGD."""
    name, options = parse(spec)
    if name == PowerSGD.name:
        return PowerSGD(**options, parameters=[p.detach() for p in model.parameters()])
    return make_algorithm(spec)


def learning_rate(step: int, num_steps: int) -> float:
    """Of the peak."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (num_steps - WARMUP_STEPS)))


def train(net: Any, task: Task, spec: str, lr: float, seed: int, steps: int) -> dict[str, float]:
    """One rank's run: the validation loss of the consensus, and what this rank has sent."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, optimizer = task.make()
    [weights] = flat.flatten(model.named_parameters())
    algorithm = make(spec, model)
    algorithm.start(net, weights.x)
    scaling = step_scaling.made_for(algorithm, net.sub("steps"), weights.x)
    part: Any = SimpleNamespace(weights=weights, optimizer=optimizer)
    before = net.counters.bytes_sent
    generator = torch.Generator().manual_seed(1000 * seed + net.rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate(step, steps)
        picked = torch.randint(task.num_samples("train"), (task.batch_size,), generator=generator)
        optimizer.zero_grad()
        task.loss(model, "train", picked).backward()
        with torch.no_grad():
            uses_gradient = algorithm.traits.uses_gradient
            algorithm.before_update(weights.x, weights.gather() if uses_gradient else weights.x[:0])
            if uses_gradient:
                weights.scatter()
            scaling.update_begins(weights.x, Part.decays(part))
            optimizer.step()
            scaling.update_ends(weights.x)
            algorithm.after_update(weights.x)
    sent = net.counters.bytes_sent - before
    with torch.no_grad():
        algorithm.settle(weights.x)
        scaling.settle()
        algorithm.finish(weights.x)
        model.eval()
        everything = torch.arange(task.num_samples("val"))
        loss = task.loss(model, "val", everything).item() if net.rank == 0 else 0.0
        found = {"loss": loss, "bytes": sent}
        if task.accuracy is not None and net.rank == 0:  # whose quality counts
            found["accuracy"] = task.accuracy(model)
    return found


class Runs:
    """All that has been run, in the file and here."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings = file, settings
        self.cells: list[dict[str, Any]] = []
        if file.exists():
            old = json.loads(file.read_text())
            if old["settings"] != settings:
                raise ValueError(
                    f"{file} must have been made with the same settings, got {old['settings']} "
                    f"there and {settings} now; choose another --output"
                )
            self.cells = old["cells"]

    def loss(self, name: str, task: Task, spec: str, lr: float, seed: int) -> float:
        key = {"task": name, "strategy": spec, "lr": lr, "seed": seed}
        for cell in self.cells:
            if key.items() <= cell.items():
                return float(cell["loss"])
        world = SimulatedWorld(self.settings["ranks"])
        ranks = world.run(train, task, spec, lr, seed, self.settings["steps"])
        sent = statistics.mean(rank["bytes"] for rank in ranks)
        quality = {k: round(v, 5) for k, v in ranks[0].items() if k != "bytes"}
        cell = key | quality | {"mb": round(sent / 1e6, 4)}
        print(cell, flush=True)
        self.cells.append(cell)
        command = " ".join(f"--{name} {value}" for name, value in self.settings.items())
        made = provenance(f"python benchmarks/oktopk_local_steps.py {command}")
        write_result(made | {"settings": self.settings, "cells": self.cells}, self.file)
        return float(cell["loss"])

    def points(self, name: str, seeds: list[int]) -> dict[str, tuple[float, float]]:
        """Mean MB and loss of each algorithm at its best learning rate, where all seeds are."""
        points = {}
        of_task = [cell for cell in self.cells if cell["task"] == name]
        for spec in dict.fromkeys(cell["strategy"] for cell in of_task):
            own = [cell for cell in of_task if cell["strategy"] == spec]
            first = [cell for cell in own if cell["seed"] == seeds[0]]
            lr = min(first, key=lambda cell: float(cell["loss"]))["lr"]
            best = [cell for cell in own if cell["lr"] == lr and cell["seed"] in seeds]
            if len(best) == len(seeds):
                mb = statistics.mean(cell["mb"] for cell in best)
                points[spec] = mb, statistics.mean(cell["loss"] for cell in best)
        return points


def draw(best: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    """MB and loss of each algorithm, one picture for each task."""
    figure, every = plt.subplots(1, len(best), figsize=(7.5 * len(best), 6), squeeze=False)
    for axes, (task, points) in zip(every[0], best.items(), strict=True):
        for place, (spec, (mb, loss)) in enumerate(points.items()):
            axes.semilogx(mb, loss, "os^"[place // 10], label=spec)  # there are ten colors
        axes.set_title(task)
        axes.set_xlabel("MB that a rank sent")
        axes.set_ylabel("validation loss")
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/oktopk_local_steps.json")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--lrs", type=float, nargs="+", help="by default those of the task")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.output, {"ranks": args.ranks, "steps": args.steps})
    for name in args.tasks:
        task = TASKS[name]()
        for spec in args.strategies:
            lrs = args.lrs or task.learning_rates
            first = {lr: runs.loss(name, task, spec, lr, args.seeds[0]) for lr in lrs}
            best = min(first, key=first.__getitem__)
            losses = [runs.loss(name, task, spec, best, seed) for seed in args.seeds]
            mb, _ = runs.points(name, args.seeds)[spec]
            mean = statistics.mean(losses)
            print(f"{name}, {spec}: {mean:.4f}, {mb:.1f} MB, at a learning rate of {best}")
    found = {name: runs.points(name, args.seeds) for name in TASKS}
    draw({name: of for name, of in found.items() if of}, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
