"""What the passes of `lightning_dsgd.replica.flat` cost beside plain copies of the same bytes.

    python benchmarks/flat_passes.py --samples 100

All variants take turns in a shuffled order, so that noise of the machine meets them alike; times
are in milliseconds.  `gather_share_of_copy` is the time of `a.copy_(b)` over that of `gather()`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import script
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.replica import flat


def mixed_parameters() -> list[tuple[str, nn.Parameter]]:
    """60 parameters, 12.2 million numbers: matrices, biases, convolutions."""
    draw = random.Random(0)
    shapes: list[tuple[int, ...]] = []
    for _ in range(20):
        shapes.append((512, draw.choice([300, 512, 1024])))
        shapes.append((draw.choice([10, 100, 512]),))
        shapes.append((draw.choice([128, 256]), draw.choice([64, 128, 256]), 3, 3))
    named = [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return named


def interleaved(
    variants: dict[str, Callable[[], object]], samples: int, *, cold: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each variant, `samples` times; the first round warms up.

    When cold, caches hold nothing of use as the clock starts, as after the backward pass of a large
    model; else variants that share tensors would look faster than those that have their own.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    evict = torch.zeros(1 << 25)
    for sample in range(samples + 1):
        for name in random.sample(list(variants), len(variants)):
            if cold:
                evict.add_(1)
            begin = time.perf_counter()
            variants[name]()
            if sample:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def passes(samples: int) -> dict[str, object]:
    """Gathering against copy_; the averaging step; the check."""
    named = mixed_parameters()
    (weights,) = flat.flatten(named)
    gradients = [parameter.grad for _, parameter in named]
    x, g = weights.x, weights.g
    a, b = torch.randn_like(x), torch.randn_like(x)

    def scatter() -> None:
        weights.scatter()
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = gradient

    times = interleaved(
        {
            "copy": lambda: a.copy_(b),
            "gather": weights.gather,
            "div": lambda: g.div_(8),
            "scatter_and_undo": scatter,
            "is_intact": weights.is_intact,
            "refresh": weights.refresh,
        },
        samples,
        cold=True,
    )
    median = {name: statistics.median(values) for name, values in times.items()}
    step = median["gather"] + median["div"]
    return {
        "numel": weights.numel,
        "gap_elements": x.numel() - weights.numel,
        "parameters": len(named),
        "median_ms": {name: round(value, 4) for name, value in median.items()},
        "copy_gb_per_s": round(2 * x.nbytes / median["copy"] / 1e6, 2),
        "gather_share_of_copy": round(median["copy"] / median["gather"], 3),
        "div_share_of_gather_and_div": round(median["div"] / step, 3),
        "is_intact_us_per_parameter": round(median["is_intact"] * 1e3 / len(named), 3),
        "samples_ms": {name: [round(t, 4) for t in values] for name, values in times.items()},
    }


def alignment(samples: int) -> dict[str, object]:
    """A training step with separate parameters, flat ones, and flat ones without gaps."""
    kept = flat.ALIGNMENT_BYTES
    variants: dict[str, Callable[[], object]] = {}
    data = torch.randn(64, 512)
    for layout in ("separate", "flat", "packed"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
        )
        if layout != "separate":
            first = (
                "one number, so that packed ones begin at odd places",
                nn.Parameter(torch.ones(1)),
            )
            flat.ALIGNMENT_BYTES = kept if layout == "flat" else 4
            flat.flatten([first, *model.named_parameters()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

        def backward(model: nn.Module = model) -> None:
            model.zero_grad()
            model(data).square().mean().backward()

        variants[f"{layout}_forward_backward"] = backward
        variants[f"{layout}_adamw_foreach"] = optimizer.step
    flat.ALIGNMENT_BYTES = kept
    for name, variant in variants.items():
        if name.endswith("backward"):
            variant()
    times = interleaved(variants, samples)
    return {
        "median_ms": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "samples_ms": {name: [round(t, 4) for t in values] for name, values in times.items()},
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/flat_passes.json")
    parser.add_argument("--samples", type=int, default=100)
    args = parser.parse_args()
    result = provenance() | {
        "threads": torch.get_num_threads(),
        "samples": args.samples,
        "passes": passes(args.samples),
        "alignment": alignment(args.samples),
    }
    write_result(result, args.output)


if __name__ == "__main__":
    main()
