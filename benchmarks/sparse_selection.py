"""What selecting the largest entries costs beside `torch.topk` and one pass over memory, as JSON.

    python benchmarks/sparse_selection.py --samples 20 > docs/results/sparse_selection.json

All variants take turns in a shuffled order, so that noise of the machine meets them alike; times
are in milliseconds.  The share of the copy bandwidth is the time of `b.copy_(a)`, one read and one
write of n elements, over that of a variant.

    select        marks of |r_i| >= th, their indices and values, and zeros in their places of r
    accumulate    the same, with r += g and g <- 0 on the way: two reads and two writes at the least
    kth           the exact threshold
    exchange      pack and unpack of what was selected
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

import torch

from lightning_dsgd import sparse


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    args = parser.parse_args()
    n, k = args.numel, round(args.numel * args.density)
    generator = torch.Generator().manual_seed(0)
    x, g, a, b = (torch.randn(n, generator=generator) for _ in range(4))
    threshold = sparse.kth_magnitude(x, k)
    marks, residual = sparse.marks_for(x), x.clone()
    values, indices = sparse.select(x, threshold)
    message = sparse.pack(values, indices, torch.float32)

    taken: list[torch.Tensor] = []

    def take_out() -> None:
        indices = sparse.marked(marks)
        taken.append(residual.index_select(0, indices))
        residual.index_fill_(0, indices, 0)

    def select() -> None:
        sparse.mark(residual, threshold, marks)
        take_out()

    def accumulate() -> None:
        sparse.accumulate_and_mark(residual, g, threshold, marks)
        take_out()

    variants: dict[str, Callable[[], object]] = {
        "copy": lambda: b.copy_(a),
        "add": lambda: b.add_(a),
        "mark": lambda: sparse.mark(residual, threshold, marks),
        "select": select,
        "accumulate": accumulate,
        "kth": lambda: sparse.kth_magnitude(x, k),
        "topk": lambda: torch.topk(x.abs(), k),
        "pack": lambda: sparse.pack(values, indices, torch.float32),
        "unpack": lambda: sparse.unpack(message, torch.float32, torch.float32),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    order, loads = list(variants), []
    for sample in range(args.samples + 1):
        random.Random(sample).shuffle(order)
        loads.append(os.getloadavg()[0])
        for name in order:
            g.copy_(a).mul_(1e-9)  # nothing to be selected anew: the same work in every sample
            begin = time.perf_counter()
            variants[name]()
            if sample:
                times[name].append((time.perf_counter() - begin) * 1e3)
            if taken:
                residual[indices] = taken.pop()
    median = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    result = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in loads],
        "torch": torch.__version__,
        "numel": n,
        "k": k,
        "samples": args.samples,
        "median_ms": {name: round(value, 2) for name, value in median.items()},
        "best_ms": {name: round(value, 2) for name, value in best.items()},
        "topk_over_select": {
            "median": round(median["topk"] / median["select"], 2),
            "best": round(best["topk"] / best["select"], 2),
        },
        "select_over_copy": {
            "median": round(median["select"] / median["copy"], 2),
            "best": round(best["select"] / best["copy"], 2),
        },
        "accumulate_over_copy": {
            "median": round(median["accumulate"] / median["copy"], 2),
            "best": round(best["accumulate"] / best["copy"], 2),
        },
        "mark_share_of_copy": round(median["copy"] / median["mark"], 3),
        "bytes_per_entry": round(len(message) / len(values), 3),
        "samples_ms": {name: [round(t, 2) for t in values] for name, values in times.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
