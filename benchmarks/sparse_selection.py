"""What selecting the largest entries costs beside `torch.topk` and one pass over memory.

    python benchmarks/sparse_selection.py --samples 20

All variants take turns in a shuffled order, so that noise of the machine meets them alike; times
are in milliseconds, ratios are medians of the ratios within one turn.  A copy is `b.copy_(a)`, one
read and one write of n elements.

    select        indices and values of |r_i| >= th, and zeros in their places of r
    accumulate    the same, with r += g and g <- 0 on the way: two reads and two writes at the least
    kth           the exact threshold
    pack, unpack  of what was selected

`--device cuda` measures the same on a GPU; there `copy_share` is the share of the copy's bandwidth
that r += g, g <- 0 and the selection reach: 16 n bytes, over those 8 n of the copy.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import script
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import sparse, sparse_format


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/sparse_selection.json")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n, k = args.numel, round(args.numel * args.density)
    generator = torch.Generator().manual_seed(0)
    x, g, a, b = (torch.randn(n, generator=generator).to(args.device) for _ in range(4))
    threshold, residual = sparse.kth_magnitude(x, k), x.clone()
    values, indices = sparse.select(x, threshold)
    cuts = torch.tensor([0, len(indices)], device=args.device)
    parts, _ = sparse_format.measure(values, indices, cuts, n)
    message, _ = sparse_format.pack(values, indices, parts)

    def pack() -> None:
        sparse_format.pack(values, indices, sparse_format.measure(values, indices, cuts, n)[0])

    def take_out(selected: tuple[torch.Tensor, torch.Tensor]) -> None:
        residual[selected[1]] = 0

    variants: dict[str, Callable[[], object]] = {
        "copy": lambda: b.copy_(a),
        "add": lambda: b.add_(a),
        "select": lambda: take_out(sparse.select(residual, threshold)),
        "accumulate": lambda: take_out(sparse.select(residual, threshold, g)),
        "kth": lambda: sparse.kth_magnitude(x, k),
        "topk": lambda: torch.topk(x.abs(), k),
        "pack": pack,
        "unpack": lambda: sparse_format.unpack([message], parts, x),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    order, loads = list(variants), []
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    for sample in range(args.samples + 1):
        random.Random(sample).shuffle(order)
        loads.append(os.getloadavg()[0])
        for name in order:
            g.copy_(a).mul_(1e-9)  # nothing to be selected anew: the same work in every sample
            residual[indices] = values
            wait()
            begin = time.perf_counter()
            variants[name]()
            wait()
            if sample:
                times[name].append((time.perf_counter() - begin) * 1e3)

    def ratio(name: str, base: str) -> dict[str, float]:
        ratios = [t / u for t, u in zip(times[name], times[base], strict=True)]
        best = min(times[name]) / min(times[base])
        return {"median": round(statistics.median(ratios), 2), "best": round(best, 2)}

    result = provenance() | {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in loads],
        "numel": n,
        "k": k,
        "samples": args.samples,
        "median_ms": {name: round(statistics.median(t), 2) for name, t in times.items()},
        "best_ms": {name: round(min(t), 2) for name, t in times.items()},
        "topk_over_select": ratio("topk", "select"),
        "select_over_copy": ratio("select", "copy"),
        "accumulate_over_copy": ratio("accumulate", "copy"),
        "copy_share": round(2 / ratio("accumulate", "copy")["median"], 3),
        "bytes_per_entry": round(len(message) / len(values), 3),
        "samples_ms": {name: [round(t, 2) for t in values] for name, values in times.items()},
    }
    write_result(result, args.output)


if __name__ == "__main__":
    main()
