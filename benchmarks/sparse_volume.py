"""The bytes that a rank sends in a step of every sparse all-reduce, between real processes.

    PYTHONPATH=. python benchmarks/sparse_volume.py --output docs/results/oktopk/sparse_volume.json

Entries as in the tests: normal ones, which lie everywhere; all large ones in one region; the global
top-k on one rank.  Counted are all bytes that the transport is given, headers, counts and flags
included, in steps with exact thresholds and between them; the table has the most that any rank sent
in any step, in KB.  The bound is the paper's, 6k (P-1)/P words of 4 bytes.  The committed results
of `oktopk` are those of `oktopk:rule=paper`; those of its default are in sparse_volume_shared.json.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import script
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.algorithms.test_oktopk import GRADIENTS

SPARSE = ["oktopk", "oktopk:rule=paper", "topk_allgather", "gaussian_topk", "topk_dsa", "gtopk"]


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """What this rank has sent in each step."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net = ProcessGroupTransport()
    n = settings["numel"]
    of_density = "" if cell["algorithm"] == "allreduce" else f":density={settings['density']}"
    algorithm: Any = make_algorithm(cell["algorithm"] + of_density)
    if isinstance(algorithm, OkTopk):
        algorithm.threshold_period = 4
    algorithm.start(net, torch.zeros(n))
    sent = []
    for step in range(settings["steps"]):
        g = GRADIENTS[cell["gradient"]](net.rank, step, n, net.world_size)
        before = net.counters.bytes_sent
        algorithm.before_update(torch.empty(0), g)
        sent.append(net.counters.bytes_sent - before)
    net.close()
    return {"bytes": sent}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/sparse_volume.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--numel", type=int, default=400_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--algorithms", nargs="+", default=SPARSE)
    args = parser.parse_args()
    settings = {"numel": args.numel, "density": args.density, "steps": args.steps}
    cells = [
        {"algorithm": spec, "gradient": gradient}
        for spec in args.algorithms
        for gradient in GRADIENTS
    ] + [{"algorithm": "allreduce", "gradient": "normal"}]
    most: dict[str, dict[int, float]] = {}
    report: dict[str, Any] = {}
    words = 6 * round(args.density * args.numel)
    for ranks in args.ranks:
        output = args.output.with_suffix(f".{ranks}.json")
        job = Job(f"{__file__}:run_cell", settings, ranks)
        for result in job.run(cells, output):
            name = f"{result['algorithm']}, {result['gradient']}"
            sent = [rank["bytes"] for rank in result["ranks"]]
            most.setdefault(name, {})[ranks] = max(map(max, sent)) / 1e3
            report.setdefault(name, {})[ranks] = sent
        most.setdefault("the bound", {})[ranks] = words * (ranks - 1) / ranks * 4 / 1e3
    print("\n|  |" + "".join(f" P = {ranks} |" for ranks in args.ranks))
    print("|---|" + "---|" * len(args.ranks))
    for name, row in most.items():
        print(f"| {name} |" + "".join(f" {row[ranks]:.0f} |" for ranks in args.ranks))
    command = " ".join(["PYTHONPATH=. python benchmarks/sparse_volume.py", *sys.argv[1:]])
    finish(job.provenance(command) | {"most_kb": most, "bytes": report}, args.output)
    for ranks in args.ranks:
        args.output.with_suffix(f".{ranks}.json.cells").unlink()


if __name__ == "__main__":
    main()
