"""What a step costs under gossip, next to all-reduce, as P grows: in the simulated world.

10M parameters in fp32, links of 1 Gbit/s in both directions, 0.1 ms; compute is a virtual sleep.

    python benchmarks/gossip_step_time.py [--ranks 4 8 16] [--compute-ms 200 400]
"""

from __future__ import annotations

from benchmarks import script
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.model import run

STEPS, WARM_UP = 42, 10

SPECS = (
    "no_sync",
    "allreduce",
    "dpsgd",
    "sgp",
    "sgp:num_peers=2",
    "sgp:overlap=1",
    "popsgd:blocking=true",
    "popsgd:blocking=true:wire_dtype=bfloat16",
    "popsgd:blocking=true:local_steps=4",
    "popsgd",
    "adpsgd",
)


def step_time(spec: str, world_size: int, compute_s: float) -> float:
    """Seconds per step of the slowest rank, without the first steps."""
    done_s = run(spec, world_size, Machine(1e-4, 125e6, compute_s, 10_000_000), STEPS).done_s
    return float((done_s[:, -1] - done_s[:, WARM_UP - 1]).max()) / (STEPS - WARM_UP)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/sgp/gossip_step_time.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[200, 400])
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for compute_ms in options.compute_ms:
        print(f"seconds per step, {compute_ms:g} ms of compute, P = {options.ranks}")
        table = results.setdefault(f"{compute_ms:g} ms", {})
        for spec in SPECS:
            table[spec] = [round(step_time(spec, p, compute_ms / 1e3), 4) for p in options.ranks]
            print(f"  {spec:28}" + "".join(f"{value:8.3f}" for value in table[spec]))
    report = {"ranks": options.ranks, "seconds a step": results}
    write_result(provenance() | report, options.output)


if __name__ == "__main__":
    main()
