"""A two-layer network trained on scikit-learn's digits by ranks of the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica import flat

BATCH = 16
TEST = 360


@cache
def data() -> tuple[Tensor, Tensor]:
    """All images and labels, in a random order; the first `TEST` are not trained on."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    return images, torch.tensor(digits.target)[order]


def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) != labels).float().mean())


def train(
    net: Any,
    algorithm: Algorithm,
    num_steps: int,
    lr: float,
    watch: Callable[[int, nn.Module, Tensor], Any],
    compute_s: Callable[[int, int], float] = lambda step, rank: 0.0,
    num_decays: int = 2,
    seed: int = 0,
) -> list[Any]:
    """Nesterov momentum, lr divided by ten so often; what `watch` makes of each step, in a list."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    [weights] = flat.flatten(model.named_parameters())
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    algorithm.start(net, weights.x)
    images, labels = data()
    images, labels = (
        images[TEST + net.rank :: net.world_size],
        labels[TEST + net.rank :: net.world_size],
    )
    generator = torch.Generator().manual_seed(1000 * seed + net.rank)
    seen = []
    for k in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.1 ** ((num_decays + 1) * k // num_steps)
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        net.compute(compute_s(k, net.rank))
        with torch.no_grad():
            algorithm.before_update(weights.x, weights.x[:0])
            optimizer.step()
            algorithm.after_update(weights.x)
        seen.append(watch(k, model, weights.x))
    with torch.no_grad():
        algorithm.settle(weights.x)
        algorithm.finish(weights.x)
    return seen
