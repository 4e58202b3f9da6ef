"""What a step costs under gossip, next to all-reduce, as P grows: in the simulated world.

10M parameters in fp32, links of 1 Gbit/s in both directions, 0.1 ms; compute is a virtual sleep.
The
algorithms are the package's own; a tensor of 1,000 elements stands for all 10M.

    PYTHONPATH=. python benchmarks/gossip_step_time.py [--ranks 4 8 16] [--compute-ms 200 400]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.transport.simulated import SimulatedWorld

PARAMETERS, STAND_IN = 10_000_000, 1_000
STEPS, WARM_UP = 42, 10

MAKE: dict[str, Callable[[], Algorithm]] = {
    "no_sync": NoSync,
    "allreduce": AllReduce,
    "dpsgd": DPSGD,
    "sgp": SGP,
    "sgp, num_peers=2": lambda: SGP(num_peers=2),
    "sgp, overlap=1": lambda: SGP(overlap=1),
    "popsgd": PopSGD,
    "popsgd, wire_dtype=bfloat16": lambda: PopSGD(wire_dtype="bfloat16"),
    "popsgd, local_steps=4": lambda: PopSGD(local_steps=4),
    "popsgd, blocking=False": lambda: PopSGD(blocking=False),
    "adpsgd": ADPSGD,
}


def step_time(net: Any, make: Callable[[], Algorithm], compute_s: float) -> float:
    """Seconds a step, without the first ones."""
    algorithm, x, g = make(), torch.zeros(STAND_IN), torch.zeros(STAND_IN)
    algorithm.start(net, x)
    times = []
    for _ in range(STEPS):
        net.compute(compute_s)
        algorithm.before_update(x, g)
        algorithm.after_update(x)
        times.append(net.now())
    algorithm.settle(x)
    algorithm.finish(x)
    return (times[-1] - times[WARM_UP - 1]) / (STEPS - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[200, 400])
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for compute_ms in options.compute_ms:
        print(f"seconds a step, {compute_ms:g} ms of compute, P = {options.ranks}")
        table = results.setdefault(f"{compute_ms:g} ms", {})
        for name, make in MAKE.items():
            table[name] = []
            for world_size in options.ranks:
                world = SimulatedWorld(world_size, 1e-4, 125e6, size_scale=PARAMETERS / STAND_IN)
                slowest = max(world.run(step_time, make, compute_ms / 1000))
                table[name].append(round(slowest, 4))
            print(f"  {name:28}" + "".join(f"{value:8.3f}" for value in table[name]))
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"ranks": options.ranks, "seconds a step": results}, indent=1)
    (options.output / "gossip_step_time.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
