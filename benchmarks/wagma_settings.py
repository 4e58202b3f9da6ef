"""How soon training is as good as all-reduce's, for settings of `wagma` and `eager_sgd`.

    python benchmarks/wagma_settings.py

A perceptron with one hidden layer on scikit-learn's digits: 8 ranks of the simulated world, groups
of 4, 120 steps of 1 s, SGD with momentum 0.9 and a cosine schedule; 720 images that are not trained
on.  The situations are those of `updates_kept.py`.

reached    virtual seconds until the consensus has 99% of the accuracy that all-reduce ends with,
           the median of the seeds; in brackets how many seeds do not get there
seconds    until the last rank has made its last step, the median
points     of the consensus at the end, from all-reduce's with the same seed, the mean
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import script
from benchmarks.updates_kept import HELD_OUT, PERIOD, RANKS, SITUATIONS, SIZE, digits, step_s
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.replica import flat
from lightning_dsgd.simulated import SimulatedWorld

BATCH, HIDDEN, EVERY = 16, 64, 2
RULES: dict[str, Any] = {
    "allreduce": AllReduce,
    "local_sgd": lambda: LocalSGD(8),
    "wagma": lambda: WAGMA(SIZE, PERIOD),
    "wagma:grace_s=0": lambda: WAGMA(SIZE, PERIOD, grace_s=0.0),
    "wagma:grace_s=0.125": lambda: WAGMA(SIZE, PERIOD, grace_s=0.125),
    "wagma:grace_s=0.25": lambda: WAGMA(SIZE, PERIOD, grace_s=0.25),
    "wagma:sync_period=5": lambda: WAGMA(SIZE, 5),
    "wagma:sync_period=20": lambda: WAGMA(SIZE, 20),
    "wagma:group_period=2": lambda: WAGMA(SIZE, PERIOD, group_period=2),
    "wagma:group_period=4:sync_period=20": lambda: WAGMA(SIZE, 20, group_period=4),
    "wagma:overlap=true": lambda: WAGMA(SIZE, PERIOD, overlap=True),
    "wagma:overlap=true:sync_period=5": lambda: WAGMA(SIZE, 5, overlap=True),
    "wagma:overlap=true:sync_period=20": lambda: WAGMA(SIZE, 20, overlap=True),
    "wagma:overlap=true:group_period=2": lambda: WAGMA(SIZE, PERIOD, overlap=True, group_period=2),
    "wagma:overlap=true:group_period=4:sync_period=20": lambda: WAGMA(
        SIZE, 20, overlap=True, group_period=4
    ),
    "eager_sgd:grace_s=0": lambda: EagerSGD(grace_s=0.0),
    "eager_sgd": EagerSGD,
}

Trail = list[tuple[float, Tensor]]


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def train(net: Any, rule: str, situation: str, seed: int, options: Any) -> tuple[Trail, Trail]:
    """When which weights were there, and at the end."""
    model = build(seed)
    [weights] = flat.flatten(model.named_parameters())
    x = weights.x
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    algorithm = RULES[rule]()
    algorithm.start(net, x)
    images, labels = digits(seed)
    mine = slice(HELD_OUT + net.rank, None, net.world_size)
    images, labels = images[mine].flatten(1), labels[mine]
    draw = torch.Generator().manual_seed(1000 * seed + net.rank)
    trail: Trail = [(0.0, x.clone())]
    for k in range(options.steps):
        batch = torch.randint(len(labels), (BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        net.compute(step_s(situation, seed, k, net.rank))
        with torch.no_grad():
            g = weights.gather() if algorithm.traits.uses_gradient else x[:0]
            algorithm.before_update(x, g)
            if algorithm.traits.uses_gradient:
                weights.scatter(None)
            optimizer.step()
            algorithm.after_update(x)
        schedule.step()
        if k % EVERY == EVERY - 1:
            trail.append((net.now(), x.detach().clone()))
    ended = net.now()
    with torch.no_grad():
        algorithm.settle(x)
        algorithm.finish(x)
    return trail, [(ended, x.detach().clone())]


def curve(trails: list[Trail], ends: list[Trail], seed: int) -> list[tuple[float, float]]:
    """The accuracy of the consensus at the times at which all ranks have come further."""
    model = build(seed)
    [weights] = flat.flatten(model.named_parameters())
    images, labels = digits(seed)
    images, labels = images[:HELD_OUT].flatten(1), labels[:HELD_OUT]

    def accuracy(x: Tensor) -> float:
        weights.x.copy_(x)
        return 100 * float((model(images).argmax(1) == labels).float().mean())

    found = []
    with torch.no_grad():
        for at in zip(*trails, strict=True):
            t = max(seconds for seconds, _ in at)
            newest = [trail[bisect_right(trail, t, key=lambda e: e[0]) - 1][1] for trail in trails]
            found.append((t, accuracy(torch.stack(newest).mean(0))))
        found.append((max(end[0][0] for end in ends), accuracy(ends[0][0][1])))
    return found


def measure(rule: str, situation: str, seed: int, options: Any) -> list[tuple[float, float]]:
    num_bytes = 4 * sum(p.numel() for p in build(seed).parameters())
    # An all-reduce sends 2 |x| (P-1)/P.
    allreduce_s = 3.0 if situation == "slow link" else 0.02
    bandwidth = 2 * num_bytes * (RANKS - 1) / RANKS / allreduce_s
    world = SimulatedWorld(RANKS, latency_s=1e-3, bandwidth_bytes_s=bandwidth)
    trails, ends = zip(*world.run(train, rule, situation, seed, options), strict=True)
    return curve(trails, ends, seed)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/wagma/settings.json")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--rules", nargs="*", default=[*RULES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| | " + " | ".join(SITUATIONS) + " |\n|---" + "|---" * len(SITUATIONS) + "|")
    for rule in options.rules:
        cells = []
        for situation in SITUATIONS:
            for seed in range(options.seeds):
                found = measure(rule, situation, seed, options)
                rows.append(row(rule, situation, seed, found, rows))
            cells.append(cell(rows[-options.seeds :]))
        print(f"| `{rule}` | " + " | ".join(cells) + " |", flush=True)
    settings = {"steps": options.steps, "lr": options.lr, "ranks": RANKS, "group_size": SIZE}
    write_result(provenance() | {"options": settings, "samples": rows}, options.output)


def row(
    rule: str, situation: str, seed: int, found: list[tuple[float, float]], rows: list[Any]
) -> dict[str, Any]:
    seconds, accuracy = found[-1]
    baselines = [
        each["accuracy"]
        for each in rows
        if (each["rule"], each["situation"], each["seed"]) == ("allreduce", situation, seed)
    ]
    goal = 0.99 * (baselines[0] if baselines else accuracy)
    reached = next((t for t, each in found if each >= goal), None)
    return {
        "rule": rule,
        "situation": situation,
        "seed": seed,
        "reached": reached,
        "seconds": seconds,
        "accuracy": accuracy,
        "points": accuracy - goal / 0.99,
    }


def cell(rows: list[dict[str, Any]]) -> str:
    reached = statistics.median(math.inf if r["reached"] is None else r["reached"] for r in rows)
    never = sum(r["reached"] is None for r in rows)
    seconds = statistics.median(r["seconds"] for r in rows)
    points = statistics.mean(r["points"] for r in rows)
    shown = "never" if math.isinf(reached) else f"{reached:.0f} s"
    return f"{shown}{f' ({never})' if never else ''}; {points:+.1f}; {seconds:.0f} s"


if __name__ == "__main__":
    main()
