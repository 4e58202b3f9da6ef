"""How much of what the ranks learn reaches the consensus, and what that is worth.

    python benchmarks/updates_kept.py
    python benchmarks/updates_kept.py --rules eager_sgd    # that alone; the file keeps the others

A residual network with BatchNorm on scikit-learn's digits: 8 ranks of the simulated world, groups
of 4, a global average every 10 steps, 100 steps of 1 s, a cosine schedule; 720 images that are not
trained on.  Each row is a rule, each situation a way to be late:

    random     two random ranks 80% of a step late in every step
    one slow   one rank takes twice as long for every step
    heavy      each step takes 0.7 s and a Pareto time (shape 1.5) of 0.3 s, 8 s at most
    slow link  an all-reduce takes as long as three steps

kept       the consensus' way, projected on the sum of all ranks' updates over P, and divided by it;
           1: no update is lost.  Of `eager_sgd`, the share of gradients that are in a sum, mean
           over the ranks
accuracy   of the consensus at the end, in points from all-reduce's with the same seed
seconds    of virtual time
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks import script
from benchmarks.ablations import PapersRule
from lightning_dsgd.agreement import average
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.replica import flat
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.networks import build

RANKS, SIZE, PERIOD, BATCH, HELD_OUT = 8, 4, 10, 16, 720
RULES: dict[str, Any] = {
    "allreduce": AllReduce,
    "wagma:rule=paper": lambda: PapersRule(SIZE, PERIOD),
    "wagma": lambda: WAGMA(SIZE, PERIOD),
    "wagma:grace_s=0": lambda: WAGMA(SIZE, PERIOD, grace_s=0.0),
    "wagma:overlap=true": lambda: WAGMA(SIZE, PERIOD, overlap=True),
    "local_sgd": lambda: LocalSGD(8),
    "eager_sgd": EagerSGD,
    "hpsgd": HPSGD,
    "adpsgd": ADPSGD,
    "popsgd": PopSGD,
    "sgp": SGP,
    "sgp:overlap=1": lambda: SGP(overlap=1),
    "dpsgd": DPSGD,
}
SITUATIONS = ("random", "one slow", "heavy", "slow link")


def step_s(situation: str, seed: int, step: int, rank: int) -> float:
    draw = random.Random(f"{seed}/{step}")
    if situation == "random":
        return 1.8 if rank in draw.sample(range(RANKS), 2) else 1.0
    if situation == "one slow":
        return 2.0 if rank == RANKS - 1 else 1.0
    if situation == "heavy":
        times = [draw.paretovariate(1.5) for _ in range(RANKS)]
        return 0.7 + min(8.0, 0.3 * times[rank])
    return draw.uniform(0.97, 1.03)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]


def train(net: Any, rule: str, situation: str, seed: int, num_steps: int, lr: float) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build("resnet8", (1, 8, 8), 10)
    [weights] = flat.flatten(model.named_parameters())
    x = weights.x
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    algorithm = RULES[rule]()
    begin, updates = x.detach().clone(), torch.zeros_like(x)
    counts = weights.num_gradients() if algorithm.traits.counts_gradients else None
    algorithm.start(net, x, Conditions(gradient_counts=counts))
    images, labels = digits(seed)
    mine = slice(HELD_OUT + net.rank, None, net.world_size)
    draw = torch.Generator().manual_seed(1000 * seed + net.rank)
    for k in range(num_steps):
        batch = torch.randint(len(labels[mine]), (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine][batch]), labels[mine][batch])
        loss.backward()
        net.compute(step_s(situation, seed, k, net.rank))
        with torch.no_grad():
            g = weights.gather() if algorithm.traits.uses_gradient else x[:0]
            if counts is not None:
                counts.copy_(weights.num_gradients())
            algorithm.before_update(x, g)
            if algorithm.traits.uses_gradient:
                weights.scatter(counts)
            updates -= x
            optimizer.step()
            updates += x
            algorithm.after_update(x)
        schedule.step()
    with torch.no_grad():
        algorithm.settle(x)
        seconds = net.now()
        algorithm.finish(x)
        for tensor in [updates, *(b for b in model.buffers() if b.is_floating_point())]:
            average(net, tensor.view(-1))
        model.eval()
        hits = model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
    kept = float(torch.dot(x - begin, updates) / torch.dot(updates, updates))
    if isinstance(algorithm, EagerSGD):  # whose ranks all make the updates of the sums
        kept = algorithm.metrics()["updates_kept"]
    return kept, 100 * float(hits.float().mean()), seconds


def measure(rule: str, situation: str, seed: int, num_steps: int, lr: float) -> dict[str, float]:
    num_bytes = 4 * sum(p.numel() for p in build("resnet8", (1, 8, 8), 10).parameters())
    # An all-reduce sends 2 |x| (P-1)/P.
    allreduce_s = 3.0 if situation == "slow link" else 0.02
    bandwidth = 2 * num_bytes * (RANKS - 1) / RANKS / allreduce_s
    world = SimulatedWorld(RANKS, latency_s=1e-3, bandwidth_bytes_s=bandwidth)
    ranks = world.run(train, rule, situation, seed, num_steps, lr)
    kept = statistics.mean(kept for kept, _, _ in ranks)
    return {"kept": kept, "accuracy": ranks[0][1], "seconds": max(s for _, _, s in ranks)}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/wagma/updates_kept.json")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    options = {"steps": args.steps, "lr": args.lr, "ranks": RANKS, "group_size": SIZE}
    options |= {"sync_period": PERIOD, "seeds": args.seeds}
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    if len(args.rules) < len(RULES) and args.output.exists():
        before = json.loads(args.output.read_text())
        if before["options"] != options:
            parser.error(f"--output has results of {before['options']}, and these are {options}")
        samples = before["samples"]
    if "allreduce" not in [*samples, *args.rules]:
        parser.error(f"--rules must have allreduce, to compare with, got {args.rules}")
    print("| | " + " | ".join(SITUATIONS) + " |\n|---" + "|---" * len(SITUATIONS) + "|")
    for rule in sorted(args.rules, key=list(RULES).index):  # all-reduce is first
        cells = []
        for situation in SITUATIONS:
            runs = [
                measure(rule, situation, seed, args.steps, args.lr) for seed in range(args.seeds)
            ]
            samples.setdefault(rule, {})[situation] = runs
            cells.append(cell(runs, samples["allreduce"][situation]))
        print(f"| `{rule}` | " + " | ".join(cells) + " |", flush=True)
    write_result(
        provenance("python benchmarks/updates_kept.py") | {"options": options, "samples": samples},
        args.output,
    )


def cell(runs: list[dict[str, float]], baseline: list[dict[str, float]]) -> str:
    points = [
        run["accuracy"] - other["accuracy"] for run, other in zip(runs, baseline, strict=True)
    ]
    seconds = statistics.median(run["seconds"] for run in runs)
    kept = statistics.mean(run["kept"] for run in runs)
    if runs is baseline:
        return f"{statistics.mean(run['accuracy'] for run in runs):.2f}, {seconds:.0f} s"
    listed = " / ".join(f"{p:+.1f}" for p in points)
    return f"{kept:.3f}; {listed}; {seconds:.0f} s"


if __name__ == "__main__":
    main()
