"""How near Ok-Topk's selections come to k, and the paper's Assumption 1, over training runs.

    python benchmarks/oktopk_accuracy.py --output docs/results/oktopk/oktopk_accuracy.json

Ranks in the simulated world train a classifier of digits (SGD with momentum) and a causal language
model (AdamW), at each density.  Plotted are, over the steps, as in the paper's Figure 5:

    xi = |Topk(1/P sum_i acc_i) - Topk(1/P sum_i Topk(acc_i))| / |1/P sum_i g_i|

and as in its Figure 6 how many entries were selected, in units of k: by a rank, in all, and how
many a Gaussian threshold would have let through.  Deviations are the means of |count / k - 1| over
the steps that reuse their thresholds.

Legend: acc_i what rank i has accumulated, gradient included, g_i its gradient, P ranks.  (With the
paper's learning rate in both, xi is the same.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from benchmarks import script
from benchmarks.text_pieces import pieces
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import sparse
from lightning_dsgd.replica import flat
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData
from lightning_dsgd.tasks.language import CausalLanguageModel

Loss = Callable[[Tensor], Tensor]
"""Of the samples with these numbers."""


def digits() -> tuple[nn.Module, torch.optim.Optimizer, Loss, int]:
    data = DigitsData()
    data.setup("fit")
    images, labels = (torch.stack(column) for column in zip(*data.splits["train"], strict=True))
    model = DigitsClassifier()

    def loss(picked: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images[picked]), labels[picked])

    return model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), loss, len(images)


def language() -> tuple[nn.Module, torch.optim.Optimizer, Loss, int]:
    train = pieces("train", seq_len=64, max_chars=200_000)
    model = CausalLanguageModel(dim=64, depth=2, seq_len=64)

    def loss(picked: Tensor) -> Tensor:
        return nn.functional.cross_entropy(*model.logits_and_targets(train[picked], None))

    return model, torch.optim.AdamW(model.parameters(), 3e-3), loss, len(train)


TASKS = {"digits": digits, "language": language}


def topk(x: Tensor, k: int) -> Tensor:
    """Zeros but for the k largest."""
    first = x.abs().topk(k).indices
    return torch.zeros_like(x).index_copy_(0, first, x[first])


def xi_of(accumulated: list[Tensor], gradients: list[Tensor], k: int) -> float:
    dense = topk(torch.stack(accumulated).mean(0), k)
    sparse_one = topk(torch.stack([topk(acc, k) for acc in accumulated]).mean(0), k)
    return float((dense - sparse_one).norm() / torch.stack(gradients).mean(0).norm())


def gaussian_count(acc: Tensor, k: int) -> int:
    """How many entries the threshold lets through that k of n normal ones would reach."""
    deviation, mean = torch.std_mean(acc, correction=0)
    quantile = math.sqrt(2) * torch.erfinv(torch.tensor(1 - k / len(acc)))
    return len(sparse.select(acc, mean.abs() + deviation * quantile)[0])


def train(net: Any, task: str, density: float, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What is to be plotted, of each step on this rank."""
    with torch.random.fork_rng():
        torch.manual_seed(settings["seed"])
        model, optimizer, loss_of, num_samples = TASKS[task]()
    [weights] = flat.flatten(model.named_parameters())
    period = settings["threshold_period"]
    algorithm = OkTopk(density=density, threshold_period=period, rule="paper")
    algorithm.start(net, weights.x)
    generator = torch.Generator().manual_seed(1000 * settings["seed"] + net.rank)
    history = []
    for step in range(settings["steps"]):
        picked = torch.randint(num_samples, (settings["batch_size"],), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(picked)
        loss.backward()
        with torch.no_grad():
            g = weights.gather()
            acc = algorithm.residual + g
            row = {"loss": loss.item(), "gaussian": gaussian_count(acc, algorithm.k) / algorithm.k}
            if step % settings["xi_every"] == 0:
                everyones = (net.all_gather(x).wait() for x in (acc, g.clone()))
                row["xi"] = xi_of(*everyones, algorithm.k)
            algorithm.before_update(weights.x, g)
            weights.scatter()
            optimizer.step()
        row["local"] = algorithm.num_selected / algorithm.k
        row["global"] = algorithm.num_applied / algorithm.k
        history.append(row)
    return history


def summarize(ranks: list[list[dict[str, Any]]], settings: dict[str, Any]) -> dict[str, Any]:
    """Means over the ranks of each step; deviations over the steps without exact thresholds."""

    def series(name: str) -> list[float]:
        return [
            sum(rank[step][name] for rank in ranks) / len(ranks)
            for step in range(settings["steps"])
            if name in ranks[0][step]
        ]

    def deviation(name: str) -> float:
        far = [
            abs(row[name] - 1)
            for rank in ranks
            for step, row in enumerate(rank)
            if step % settings["threshold_period"]
        ]
        return sum(far) / len(far)

    xi = series("xi")
    return {
        "deviation_local": deviation("local"),
        "deviation_global": deviation("global"),
        "deviation_gaussian": deviation("gaussian"),
        "xi_mean": sum(xi) / len(xi),
        "xi_max": max(xi),
        "series": {name: series(name) for name in ("loss", "local", "global", "gaussian", "xi")},
    }


def plot(results: dict[str, dict[str, Any]], settings: dict[str, Any], file: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    columns = 1 + max(map(len, results.values()))
    figure, axes = pyplot.subplots(
        len(results), columns, figsize=(4.5 * columns, 3.6 * len(results)), squeeze=False
    )
    for row, (task, runs) in zip(axes, results.items(), strict=True):
        row[0].set(title=f"{task}: Assumption 1", xlabel="steps", ylabel="xi")
        for axis, (density, run) in zip(row[1:], runs.items(), strict=True):
            steps = range(0, settings["steps"], settings["xi_every"])
            row[0].plot(steps, run["series"]["xi"], label=f"density {density}")
            for name, style in (("gaussian", ":"), ("local", "-"), ("global", "-")):
                axis.plot(run["series"][name], style, label=name, linewidth=0.9)
            axis.axhline(1.0, color="black", linewidth=0.5)
            axis.set(
                title=f"{task}, density {density}: selections",
                xlabel="steps",
                ylabel="count / k",
                ylim=(0, 2),
            )
            axis.legend()
        row[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/oktopk_accuracy.json")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.02])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threshold-period", type=int, default=32)
    parser.add_argument("--xi-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    results: dict[str, dict[str, Any]] = {}
    for task in args.tasks:
        for density in args.densities:
            ranks = SimulatedWorld(args.ranks).run(train, task, density, settings)
            run = summarize(ranks, settings)
            results.setdefault(task, {})[str(density)] = run
            print(
                f"{task}, density {density}: deviation from k {run['deviation_local']:.1%} of a "
                f"rank, {run['deviation_global']:.1%} in all, {run['deviation_gaussian']:.1%} with "
                f"a Gaussian threshold; xi {run['xi_mean']:.2f} (at most {run['xi_max']:.2f})"
            )
    plot(results, settings, args.output.with_suffix(".png"))
    write_result(provenance() | {"settings": settings, "results": results}, args.output)


if __name__ == "__main__":
    main()
