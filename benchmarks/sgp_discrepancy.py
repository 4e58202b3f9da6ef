"""How far the ranks' models are apart while SGP trains: the paper's figure B.12, on digits.

A two-layer network on scikit-learn's digits, Nesterov momentum, the learning rate divided by
ten after one and two thirds of the steps; ranks in the simulated world, each with its own
part of the data.  Plots mean, minimum and maximum over the ranks of the errors of their own models.

    PYTHONPATH=. python benchmarks/sgp_discrepancy.py [--ranks 4 32] [--steps 450]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_dsgd import flat
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.transport.simulated import SimulatedWorld

EVERY = 10
BATCH = 16


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    return images, torch.tensor(digits.target)[order]


X, Y = data()
TEST = 360


def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) != labels).float().mean())


def train(net: Any, num_steps: int, lr: float, num_peers: int) -> list[tuple[float, float]]:
    """This rank's (training, test) errors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    [weights] = flat.flatten(model.named_parameters())
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    algorithm = SGP(num_peers=num_peers)
    algorithm.start(net, weights.x)
    images, labels = X[TEST + net.rank :: net.world_size], Y[TEST + net.rank :: net.world_size]
    generator = torch.Generator().manual_seed(net.rank)
    errors = []
    for k in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.1 ** (3 * k // num_steps)
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        with torch.no_grad():
            algorithm.before_update(weights.x, weights.x[:0])
            optimizer.step()
            algorithm.after_update(weights.x)
        if k % EVERY == EVERY - 1:
            errors.append((error(model, X[TEST:], Y[TEST:]), error(model, X[:TEST], Y[:TEST])))
    with torch.no_grad():
        algorithm.settle(weights.x)
        algorithm.finish(weights.x)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--num-peers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(options.ranks), figsize=(12, 4.2), sharey=True)
    steps = range(EVERY, options.steps + 1, EVERY)
    results = {}
    for world_size, axis in zip(options.ranks, axes, strict=True):
        world = SimulatedWorld(world_size)
        ranks = world.run(train, options.steps, options.lr, options.num_peers)
        errors = 100 * torch.tensor(ranks)  # rank, time, (training, test)
        for which, (name, style) in enumerate((("training", "-"), ("test", "--"))):
            e = errors[:, :, which]
            axis.plot(steps, e.mean(0), style, label=f"{name}: mean")
            axis.fill_between(steps, e.amin(0), e.amax(0), alpha=0.3)
        spread = errors[:, :, 1].amax(0) - errors[:, :, 1].amin(0)
        third = len(spread) // 3
        results[world_size] = {
            "test error at the end, mean, %": float(errors[:, -1, 1].mean()),
            "spread of test errors (max - min), mean over each third, %": [
                float(spread[i * third : (i + 1) * third].mean()) for i in range(3)
            ],
        }
        axis.set(title=f"SGP, {world_size} ranks", xlabel="steps", ylabel="error in %")
        axis.set_yscale("log")
        axis.legend()
    figure.tight_layout()
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "sgp_discrepancy.png", dpi=110)
    text = json.dumps(results, indent=1)
    (options.output / "sgp_discrepancy.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
