"""Quality at equal steps: what is applied at the places that Ok-Topk chooses, and what helps.

    python benchmarks/oktopk_rules.py --output docs/results/oktopk/oktopk_rules.json

8 ranks train the small tasks of `benchmarks target` for as many steps, with its batches and
schedules, at a density of 1%.  What is sent is computed densely here, by one process for
all ranks, with exact thresholds: `tests/algorithms/test_oktopk.py` requires that the algorithm
equals this to the bit.

    dense         the mean of all gradients
    allgather     all that a rank has selected is applied
    paper         at the chosen places, what a rank has selected
    shared        at the chosen places, all that the ranks have

    momentum=m    before the selection, and none in the optimizer (Deep Gradient Compression):
                  v <- m v + (1 - m) g is accumulated, and v becomes 0 where it has been applied;
                  the learning rate is divided by 1 - m
    local=H       each rank makes H steps by itself, and what they have changed is accumulated, at H
                  times the density
    begin=d       the density falls from d to 1%, geometrically, over the first fifth of the steps

Each cell is printed and written at once; a cell that is in the file is not computed again.
"""

from __future__ import annotations

import json
import math
import statistics

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import script
from benchmarks.compare.small_tasks import BATCH, TASKS, Networks
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.results import provenance, write_result

RANKS, DENSITY = 8, 0.01
STEPS = {"digits": 120, "language": 200}
LEARNING_RATES = {"digits": (0.1, 0.2, 0.4), "language": (0.01, 0.02)}
VARIANTS = {
    "digits": [
        *("dense", "paper", "shared", "shared:momentum=0.9", "shared:begin=0.25", "allgather"),
        "shared:local=2",
    ],
    "language": [
        *("dense", "paper:beta=0.5", "shared:beta=0.5", "paper", "shared"),
        *("shared:local=2", "shared:beta=0.5:local=2"),
    ],
}


def topk(x: Tensor, k: int) -> Tensor:
    """Marks the k largest magnitudes of each row."""
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.abs().topk(k).indices, True)


def given(acc: Tensor, k: int, rule: str) -> Tensor:
    """Marks what each rank gives of what it has accumulated."""
    local = topk(acc, k)
    if rule == "allgather":
        return local
    chosen = topk((acc * local).sum(0), k)
    return chosen.expand_as(acc) if rule == "shared" else local & chosen


def train(task_name: str, variant: str, lr: float, seed: int) -> float:
    rule, options = parse(variant)
    task, num_steps, momentum = TASKS[task_name], STEPS[task_name], options.get("momentum", 0.0)
    torch.manual_seed(seed)
    networks = Networks(task, RANKS)
    inputs, targets, *held_out = task.examples(seed)
    weights = torch.nn.Parameter(networks.weights())
    optimizer = task.optimizer([weights], lr)
    [group] = optimizer.param_groups
    if momentum:
        group["momentum"] = 0.0
    if "beta" in options:
        group["betas"] = (options["beta"], 0.999)
    local = options.get("local", 1)
    own = [torch.nn.Parameter(weights.detach().clone()) for _ in range(RANKS if local > 1 else 0)]
    optimizers = [task.optimizer([each], lr) for each in own]
    groups = [group, *(each.param_groups[0] for each in optimizers)]
    for each in groups:
        each |= {"betas": group["betas"]} if "beta" in options else {}
    gradients = vmap(grad(networks._loss), in_dims=(0 if own else None, None, 0, 0))
    acc, v = torch.zeros(2, RANKS, len(weights))
    draws = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)]
    for step in range(num_steps):
        picked = []
        for rank, draw in enumerate(draws):
            mine = torch.arange(rank, len(inputs), RANKS)
            picked.append(mine[torch.randint(len(mine), (BATCH,), generator=draw)])
        batch = torch.stack(picked)
        with sdpa_kernel(SDPBackend.MATH):
            at = torch.stack([each.detach() for each in own]) if own else weights.detach()
            g = gradients(at, {}, inputs[batch], targets[batch])
        done = (step + 1) / num_steps
        share = (1 + math.cos(math.pi * step / num_steps)) / 2
        for each in groups:
            each["lr"] = lr * (done / task.warmup if done < task.warmup else share) / (1 - momentum)
        for each, optimizer_of_it, gradient in zip(own, optimizers, g, strict=bool(own)):
            each.grad = gradient
            optimizer_of_it.step()
        if own and (step + 1) % local:
            continue
        if own:
            g = weights.detach() - torch.stack([each.detach() for each in own])
        if rule == "dense":
            weights.grad = g.mean(0)
        else:
            v.mul_(momentum).add_(g, alpha=1 - momentum)
            acc += v
            begin = options.get("begin", DENSITY)
            density = max(DENSITY, begin * (DENSITY / begin) ** (step / (num_steps / 5)))
            marks = given(acc, round(local * density * len(weights)), rule)
            weights.grad = (acc * marks).sum(0) / RANKS
            acc.masked_fill_(marks, 0)
            v.masked_fill_(marks, 0)
        if not own:
            optimizer.step()
            continue
        with torch.no_grad():
            weights -= weights.grad
            for each in own:
                each.copy_(weights)
    return networks.quality(weights.detach(), *held_out)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/oktopk_rules.json")
    parser.add_argument("--tasks", nargs="+", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads(args.output.read_text()) if args.output.exists() else {"cells": []}
    cells = {(c["task"], c["variant"], c["lr"], c["seed"]): c["quality"] for c in report["cells"]}
    for seed in range(args.seeds):
        for task in args.tasks:
            for variant in VARIANTS[task]:
                for lr in LEARNING_RATES[task]:
                    cell = task, variant, lr, seed
                    if cell in cells:
                        continue
                    cells[cell] = train(*cell)
                    print(*cell, round(cells[cell], 4), flush=True)
                    names = ("task", "variant", "lr", "seed", "quality")
                    rows = [dict(zip(names, (*c, q), strict=True)) for c, q in cells.items()]
                    write_result(provenance() | {"cells": rows}, args.output)
    for task in args.tasks:
        for variant in VARIANTS[task]:
            for lr in LEARNING_RATES[task]:
                found = [cells[task, variant, lr, seed] for seed in range(args.seeds)]
                mean, apart = statistics.mean(found), statistics.stdev(found) if found[1:] else 0
                print(f"| {task} | {variant} | {lr} | {mean:.4f} | {apart:.4f} |")


if __name__ == "__main__":
    main()
