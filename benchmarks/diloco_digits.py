"""What local SGD and DiLoCo send, how long they take and what they reach.

    python benchmarks/diloco_digits.py

A two-layer network on scikit-learn's digits: 4 ranks of the simulated world, 480 steps of 1 s, lr
0.05 with Nesterov momentum, divided by ten twice; 360 images that are not trained on; an all-reduce
takes as long as three steps.  Means over the seeds.

error    of the consensus at the end, in percent
KB       that a rank sends per step
peak KB  that a rank sends in the step in which it sends the most, after the first period
seconds  of virtual time
"""

from __future__ import annotations

import statistics
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import script
from benchmarks.simulated_digits import TEST, data, error, train
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.simulated import SimulatedWorld

RANKS, STEPS, LR = 4, 480, 0.05
NUM_WEIGHTS = 64 * 64 + 64 + 64 * 10 + 10
SKIPPED = 120
"""Steps before what is sent in a step is looked at: the longest first period."""
SPECS = (
    "local_sgd:sync_period=1",
    "local_sgd:sync_period=8",
    "local_sgd:sync_period=8:wire_dtype=bfloat16",
    "local_sgd:sync_period=8:wire_dtype=int8",
    "local_sgd:sync_period=8:wire_dtype=int4",
    "local_sgd:sync_period=8:num_fragments=4:overlap_steps=2",
    "local_sgd:sync_period=8:num_fragments=4:overlap_steps=2:wire_dtype=int4",
    "diloco:sync_period=8",
    "diloco:sync_period=40",
    "diloco:sync_period=40:outer_momentum=0.5",
    "diloco:sync_period=40:outer_momentum=0.5:num_fragments=4:overlap_steps=4:wire_dtype=int4",
)


def run(net: Any, spec: str, seed: int) -> tuple[float, float, float, float]:
    name, options = parse(spec)
    models: list[nn.Module] = []

    def watch(step: int, model: nn.Module, x: Tensor) -> int:
        models[:] = [model]
        return net.counters.bytes_sent

    sent = train(net, ALGORITHMS[name](**options), STEPS, LR, watch, lambda k, rank: 1.0, seed=seed)
    images, labels = data()
    late = [after - before for before, after in pairwise(sent[SKIPPED:])]
    wrong = error(models[0], images[:TEST], labels[:TEST])
    return 100 * wrong, sent[-1] / STEPS / 1e3, max(late) / 1e3, net.now()


def measure(spec: str, seeds: list[int]) -> dict[str, Any]:
    rows = []
    for seed in seeds:
        world = SimulatedWorld(RANKS, bandwidth_bytes_s=2 * 3 / 4 * NUM_WEIGHTS * 4 / 3.0)
        ranks = world.run(run, spec, seed)
        wrong, kb, peak, _ = ranks[0]
        rows.append((wrong, kb, peak, max(seconds for *_, seconds in ranks)))
    errors, kbs, peaks, seconds = zip(*rows, strict=True)
    return {
        "spec": spec,
        "errors": [round(e, 2) for e in errors],
        "error": round(statistics.mean(errors), 2),
        "kb_per_step": round(statistics.mean(kbs), 3),
        "peak_kb": round(max(peaks), 2),
        "seconds": round(statistics.mean(seconds), 1),
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/diloco/diloco_digits.json")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # one row is there to show what the warning is about
    rows = []
    for spec in SPECS:
        rows.append(measure(spec, list(range(args.seeds))))
        row = rows[-1]
        print(
            f"| `{spec}` | {row['error']:.2f}% | {row['kb_per_step']:.2f} | {row['peak_kb']:.1f} "
            f"| {row['seconds']:.0f} |",
            flush=True,
        )
    command = f"python benchmarks/diloco_digits.py --seeds {args.seeds}"
    write_result(provenance(command) | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
