"""The time of one exchange of every sparse all-reduce, between nodes with links of 1 Gbit/s.

    sudo PYTHONPATH=. python benchmarks/sparse_exchange.py --ranks 4 8 \
        --output docs/results/oktopk/sparse_exchange.json

Ranks are processes in network namespaces; all of them share the cores of one machine, which no
cluster's do.  So a step is taken apart where the local entries are selected: there all ranks wait
for each other.

measured    a rank's processor time up to there, as if it had a core of its own, and the time from
            there to the end, the slowest rank's, all ranks' sums on the shared cores included; of
            the dense all-reduce the whole
computed    a step of ranks with cores of their own, if nothing overlapped: processor time of one
            rank and its bytes at the rate of the link; of the dense all-reduce its bytes alone

Medians over steps and rounds; all algorithms take turns.  Entries are normal and new in each step;
residuals are as they are after many steps, so that thresholds are used again as in training.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import script
from benchmarks.sparse_volume import SPARSE
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.link import Link
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.process_group import ProcessGroupTransport


class Watch:
    """When an algorithm has selected what it is to send: there all ranks meet, once a step."""

    def __init__(self, net: Transport, algorithm: ErrorFeedback) -> None:
        self.net = net
        name = "split_and_reduce" if isinstance(algorithm, OkTopk) else "local_topk"
        self.go_on = getattr(algorithm, name)
        setattr(algorithm, name, self._meet)

    def _meet(self, *selected: Any) -> Any:
        found = None if selected else self.go_on()  # the selection itself
        self.selected_cpu = time.process_time()
        self.net.barrier().wait()
        self.met_at, self.met_cpu = time.perf_counter(), time.process_time()
        return self.go_on(*selected) if selected else found


def residual_of_many_steps(n: int, density: float, seed: int) -> Tensor:
    """What error feedback has left after so many steps that it no longer grows; in copies."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.zeros(min(n, 100_000))
    for _ in range(round(4 / density)):
        residual += torch.randn(len(residual), generator=generator)
        residual[residual.abs().topk(round(density * len(residual))).indices] = 0
    return residual.repeat(-(-n // len(residual)))[:n]


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Of each step on this rank: seconds and seconds of the processor, bytes sent."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net = ProcessGroupTransport(timeout_s=300.0)
    n = settings["numel"]
    is_dense = cell["algorithm"] == "dense"
    algorithm: Any = (
        AllReduce() if is_dense else SPARSE[cell["algorithm"]](density=settings["density"])
    )
    algorithm.start(net, torch.empty(n))
    watch = Watch(net, algorithm) if isinstance(algorithm, ErrorFeedback) else None
    if watch is not None:
        algorithm.residual = residual_of_many_steps(n, settings["density"], net.rank)
    noise = torch.randn(n, generator=torch.Generator().manual_seed(100 + net.rank))
    rows = []
    for step in range(settings["steps"] + 1):
        g = noise.roll(step * (n // 7 + 1))
        net.barrier().wait()
        sent = net.counters.bytes_sent
        begin, begin_cpu = time.perf_counter(), time.process_time()
        algorithm.before_update(torch.empty(0), g)
        end, end_cpu = time.perf_counter(), time.process_time()
        row = {"bytes": net.counters.bytes_sent - sent}
        if watch is None:
            row |= {"selection_s": 0.0, "exchange_s": end - begin, "cpu_s": end_cpu - begin_cpu}
        else:
            row["selection_s"] = watch.selected_cpu - begin_cpu
            row["exchange_s"] = end - watch.met_at
            row["cpu_s"] = row["selection_s"] + end_cpu - watch.met_cpu
        if step:  # the first one warms up
            rows.append(row)
    net.close()
    return {"steps": rows}


def summarize(results: list[Cell], link: Link) -> dict[str, float]:
    steps = [
        [rank["steps"][step] for rank in result["ranks"]]
        for result in results
        for step in range(len(result["ranks"][0]["steps"]))
    ]

    def median(name: str) -> float:
        return statistics.median(row[name] for ranks in steps for row in ranks)

    exchange = statistics.median(max(row["exchange_s"] for row in ranks) for ranks in steps)
    mb_sent = max(row["bytes"] for ranks in steps for row in ranks) / 1e6
    on_wire = 8e6 * mb_sent / link.rate_bit_s
    is_dense = results[0]["algorithm"] == "dense"
    return {
        "selection_ms": round(1e3 * median("selection_s"), 2),
        "exchange_ms": round(1e3 * exchange, 2),
        "step_ms": round(1e3 * (median("selection_s") + exchange), 2),
        "cpu_ms": round(1e3 * median("cpu_s"), 2),
        "mb_sent": round(mb_sent, 3),
        "computed_ms": round(1e3 * (on_wire if is_dense else median("cpu_s") + on_wire), 2),
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/sparse_exchange.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--network", type=Link.parse, default=Link.parse("1gbit"))
    args = parser.parse_args()
    settings = {"numel": args.numel, "density": args.density, "steps": args.steps}
    names = ["dense", *SPARSE]
    report: dict[str, Any] = {}
    for ranks in args.ranks:
        output = args.output.with_suffix(f".{ranks}.json")
        job = Job(f"{__file__}:run_cell", settings, ranks, args.network)
        cells = [
            {"round": turn, "algorithm": name}
            for turn in range(args.rounds)
            for name in (names if turn % 2 else names[::-1])
        ]
        results = job.run(cells, output)
        table = {
            name: summarize([r for r in results if r["algorithm"] == name], args.network)
            for name in names
        }
        columns = list(table["dense"])
        print(f"\n{ranks} ranks     " + "".join(f"{c:>13}" for c in columns) + "  dense/this: both")
        for name, row in table.items():
            faster = [table["dense"][c] / row[c] for c in ("step_ms", "computed_ms")]
            figures = "".join(f"{row[column]:13.2f}" for column in columns)
            print(f"{name:15}{figures}  {faster[0]:.2f} {faster[1]:.2f}")
        report[str(ranks)] = {"table": table, "samples": results}
    command = " ".join(["PYTHONPATH=. python benchmarks/sparse_exchange.py", *sys.argv[1:]])
    finish(job.provenance(command) | {"ranks": report}, args.output)
    for ranks in args.ranks:
        args.output.with_suffix(f".{ranks}.json.cells").unlink()


if __name__ == "__main__":
    main()
