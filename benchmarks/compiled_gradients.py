"""When in a backward pass a compiled model has its gradients: what `overlap=True` can send then.

    python benchmarks/compiled_gradients.py

On one rank and one thread.  A row says at which share of the backward pass the first gradient was
there, and the median one.  All forms compute in fp32 with `torch.compile`'s default.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # before what is installed, if anything is

from benchmarks import script
from lightning_dsgd.lab.results import provenance, save

WIDTH, LAYERS, SAMPLES = 600, 8, 512
FORMS = ("not compiled", "the whole model compiled", "each layer compiled")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def shares(form: str, repeats: int) -> dict[str, float]:
    """Returns when the first and the median gradient are there, and how long a pass takes."""
    torch.manual_seed(0)
    model = Layers()
    if form == FORMS[1]:
        model.compile()
    elif form == FORMS[2]:
        for layer in model.layers:
            layer.compile()
    x, made = torch.randn(SAMPLES, WIDTH), list[float]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: made.append(time.perf_counter()))
    firsts, medians, passes = list[float](), list[float](), list[float]()
    for number in range(repeats + 2):
        model.zero_grad()
        loss = model(x)
        made.clear()
        begin = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - begin
        if number >= 2:
            firsts.append((made[0] - begin) / took)
            medians.append((statistics.median(made) - begin) / took)
            passes.append(1e3 * took)
    found = {"first": firsts, "median": medians, "backward_ms": passes}
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/compiled_gradients.json")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [{"form": form, **shares(form, args.repeats)} for form in FORMS]
    for row in rows:
        print(row)
    save({**provenance(), "rows": rows}, args.output)


if __name__ == "__main__":
    main()
