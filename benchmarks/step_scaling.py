"""What scaled steps cost beside the optimizer's step: computation, without the network.

    python benchmarks/step_scaling.py

AdamW steps on flat weights, and `StepScaling` compares one message and encodes another, as it does
in every step of `wagma`.  Messages are there at once.  The two take turns; times are in
milliseconds, and the ratio is the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks import script
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives.rounding import encode
from lightning_dsgd.primitives.step_scaling import EVERY, WIRE, StepScaling


class AtHand:
    """A network of 8 ranks, each of which answers at once: a receipt of itself."""

    rank, world_size = 0, 8

    def __init__(self, message: Tensor) -> None:
        self.message = message
        self.was_taken = True

    def send(self, message: Tensor, rank: int) -> None:
        """One message comes back."""
        self.source = rank
        self.was_taken = False

    def recv(self, like: Tensor, rank: int) -> AtHand:
        return self

    def done(self) -> bool:
        return not self.was_taken

    def wait(self) -> Tensor:
        self.was_taken = True
        return self.message


def milliseconds(num_weights: int, samples: int) -> tuple[list[float], list[float]]:
    """Of the optimizer's steps, and of what scales them."""
    weights = torch.nn.Parameter(torch.randn(num_weights))
    weights.grad = torch.randn(num_weights)
    optimizer = torch.optim.AdamW([weights], 1e-3)
    x = weights.detach()
    net: Any = AtHand(encode(torch.randn(num_weights // EVERY), WIRE))
    scaling = StepScaling(net, x)
    times: tuple[list[float], list[float]] = ([], [])
    for sample in range(samples + 5):
        clock = [time.perf_counter()]
        scaling.update_begins(x, [([slice(0, num_weights)], 1e-5)])
        clock.append(time.perf_counter())
        optimizer.step()
        clock.append(time.perf_counter())
        scaling.update_ends(x)
        clock.append(time.perf_counter())
        if sample >= 5:
            begins, step, ends = (b - a for a, b in pairwise(clock))
            times[0].append(step * 1e3)
            times[1].append((begins + ends) * 1e3)
    return times


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/step_scaling.json")
    parser.add_argument("--weights", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--samples", type=int, default=40)
    args = parser.parse_args()
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num_weights in args.weights:
            steps, scalings = milliseconds(num_weights, args.samples)
            ratios = [b / a for a, b in zip(steps, scalings, strict=True)]
            row = {
                "threads": threads,
                "weights": num_weights,
                "adamw_ms": round(statistics.median(steps), 3),
                "scaling_ms": round(statistics.median(scalings), 3),
                "ratio": round(statistics.median(ratios), 3),
            }
            print(row)
            rows.append(row)
    write_result(provenance() | {"samples": args.samples, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
