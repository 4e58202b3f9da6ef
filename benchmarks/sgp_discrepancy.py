"""How far the ranks' models are apart while SGP trains: the paper's figure B.12, on digits.

A two-layer network on scikit-learn's digits, Nesterov momentum, the learning rate divided by
ten after one and two thirds of the steps; ranks in the simulated world, each with its own
part of the data.  Plots mean, minimum and maximum over the ranks of the errors of their own models.

    python benchmarks/sgp_discrepancy.py [--ranks 4 32] [--steps 450]
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from benchmarks import script, simulated_digits
from benchmarks.simulated_digits import TEST, error
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.simulated import SimulatedWorld

EVERY = 10


def train(net: Any, num_steps: int, lr: float, num_peers: int) -> list[tuple[float, float]]:
    """This rank's (training, test) errors."""
    images, labels = simulated_digits.data()

    def errors(k: int, model: nn.Module, x: Tensor) -> tuple[float, float] | None:
        if k % EVERY != EVERY - 1:
            return None
        return error(model, images[TEST:], labels[TEST:]), error(
            model, images[:TEST], labels[:TEST]
        )

    seen = simulated_digits.train(net, SGP(num_peers=num_peers), num_steps, lr, errors)
    return [pair for pair in seen if pair is not None]


def main() -> None:
    parser = script.parser(__doc__, "docs/results/sgp/sgp_discrepancy.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--num-peers", type=int, default=1)
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
    print(json.dumps(results, indent=1))
    write_result(provenance() | {"ranks": results}, options.output)
    figure.savefig(options.output.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
