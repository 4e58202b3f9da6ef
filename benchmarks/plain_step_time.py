"""What `decentralized` adds to a step of a plain loop, against the same loop without it.

    python benchmarks/plain_step_time.py --output docs/results/plain_pytorch/step_time.json

One rank and `NoSync`, so that nothing is sent: what is left is the face itself.  A step takes about
50 ms.  Steps with it and without it take turns in one process, so that whatever else the machine
does slows both alike: in a block of a few steps the hooks are there, in the next they are not.  A
sample is the ratio of two neighbouring blocks' shortest steps, in time on the clock and in time of
the processor; the result is the median.  As other work on the machine blurs that, what runs around
a step is also timed by itself, in its place, between backward pass and update, where no cache holds
it any more.  One torch thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_dsgd as dsgd
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.plain.steps import Steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--width", type=int, default=1856)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # that one process trains alone
    result = measure(args)
    write_result(
        provenance() | {"options": vars(args) | {"output": str(args.output)}} | result, args.output
    )
    print(
        f"{result['plain_ms']:.1f} ms a step; with decentralized {100 * result['added']:+.2f}% on "
        f"the clock, {100 * result['added_processor']:+.2f}% of the processor's time; what runs "
        f"around a step {result['around_us']:.0f} us, {100 * result['around']:.2f}% of it"
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [m for _ in range(args.depth) for m in (nn.Linear(args.width, args.width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(args.width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(args.batch_size, args.width), torch.randint(10, (args.batch_size,))

    def step() -> tuple[float, float]:
        begin = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    def block(loader: Any) -> list[float]:
        times = [step() for _ in loader]
        return [min(column) for column in zip(*times, strict=True)]

    stamps: list[float] = []

    def stamp(*args: Any) -> None:
        stamps.append(time.perf_counter())

    def hook() -> Steps:
        """Between two stamps on either side of the step."""
        optimizer.register_step_pre_hook(stamp)
        optimizer.register_step_post_hook(stamp)
        steps = Steps(replica._session, [optimizer], None)
        optimizer.register_step_pre_hook(stamp)
        optimizer.register_step_post_hook(stamp)
        return steps

    def around() -> list[float]:
        """What ran between the stamps of each step, and between two batches."""
        pairs = [b - a for a, b in zip(stamps[::2], stamps[1::2], strict=True)]
        stamps.clear()
        return [1e6 * (x + y) for x, y in zip(pairs[::2], pairs[1::2], strict=True)]

    def unhook() -> None:
        assert replica._steps is not None
        replica._steps.give_back()
        optimizer._optimizer_step_pre_hooks.clear()
        optimizer._optimizer_step_post_hooks.clear()

    blocks: list[dict[str, float]] = []
    around_us: list[float] = []
    with dsgd.decentralized(model, optimizer, dsgd.NoSync()) as replica:
        for number in range(args.blocks):
            pair = {}
            for kind in ("plain", "ours") if number % 2 else ("ours", "plain"):
                unhook()
                if kind == "ours":
                    replica._steps = hook()
                    times = block(replica.batches(range(args.steps)))
                    around_us += around()
                else:
                    times = block(range(args.steps))
                pair |= {f"{kind}_ms": 1e3 * times[0], f"{kind}_processor_ms": 1e3 * times[1]}
            blocks.append(pair)
    blocks = blocks[2:]  # the first warm up
    plain_ms = statistics.median(b["plain_ms"] for b in blocks)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "plain_ms": plain_ms,
        "around_us": statistics.median(around_us),
        "around": statistics.median(around_us) / 1e3 / plain_ms,
        "added": statistics.median(b["ours_ms"] / b["plain_ms"] for b in blocks) - 1,
        "added_processor": statistics.median(
            b["ours_processor_ms"] / b["plain_processor_ms"] for b in blocks
        )
        - 1,
        "blocks": blocks,
    }


if __name__ == "__main__":
    main()
