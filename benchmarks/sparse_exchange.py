"""The time of one exchange of every sparse all-reduce, between nodes with links of 1 Gbit/s.

    sudo PYTHONPATH=. python benchmarks/sparse_exchange.py --ranks 4 8 \
        --output docs/results/sparse_exchange.json

Ranks are processes in network namespaces; all of them share the cores of one machine, which no
cluster's do.  So a step is taken apart where the local entries are selected: there all ranks wait
for each other.

selection   the processor time of one rank up to there: accumulation, threshold, selection
exchange    the time from there to the end, the slowest rank's, all ranks' reductions on the shared
            cores included; of the dense all-reduce the whole
step        a step on ranks with cores of their own would take selection + exchange, at most

Medians over steps and rounds; all algorithms take turns.  Entries are normal; from step to step
they move to other places.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.bench.job import Cell, Job, finish
from lightning_dsgd.bench.network import Link
from lightning_dsgd.error_feedback import ErrorFeedback
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.process_group import ProcessGroupTransport


class Watch:
    """When an algorithm has selected what it is to send: there all ranks meet, once a step."""

    def __init__(self, net: Transport, algorithm: ErrorFeedback) -> None:
        self.net = net
        name = "split_and_reduce" if isinstance(algorithm, OkTopk) else "take_out"
        self.go_on = getattr(algorithm, name)
        setattr(algorithm, name, self._meet)
        self.begin()

    def begin(self) -> None:
        self.cpu_begin = time.thread_time()

    def _meet(self, *selected: Any) -> Any:
        self.selection_s = time.thread_time() - self.cpu_begin
        self.net.barrier().wait()
        self.selected_at = time.perf_counter()
        return self.go_on(*selected)


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Of each step on this rank: seconds of selection and of exchange, bytes sent."""
    from benchmarks.sparse_volume import SPARSE

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
    noise = torch.randn(n, generator=torch.Generator().manual_seed(net.rank))
    rows = []
    for step in range(settings["steps"] + 1):
        g = noise.roll(step * (n // 7 + 1))
        net.barrier().wait()
        sent = net.counters.bytes_sent
        begin = time.perf_counter()
        if watch is not None:
            watch.begin()
        algorithm.before_update(torch.empty(0), g)
        end = time.perf_counter()
        row = {
            "selection_s": watch.selection_s if watch else 0.0,
            "exchange_s": end - (watch.selected_at if watch else begin),
            "bytes": net.counters.bytes_sent - sent,
        }
        if step:  # the first one warms up
            rows.append(row)
    net.close()
    return {"steps": rows}


def summarize(results: list[Cell]) -> dict[str, float]:
    steps = [
        [rank["steps"][step] for rank in result["ranks"]]
        for result in results
        for step in range(len(result["ranks"][0]["steps"]))
    ]
    selection = statistics.median(row["selection_s"] for ranks in steps for row in ranks)
    exchange = statistics.median(max(row["exchange_s"] for row in ranks) for ranks in steps)
    return {
        "selection_ms": round(1e3 * selection, 2),
        "exchange_ms": round(1e3 * exchange, 2),
        "step_ms": round(1e3 * (selection + exchange), 2),
        "mb_sent": round(max(row["bytes"] for ranks in steps for row in ranks) / 1e6, 3),
    }


def main() -> None:
    from benchmarks.sparse_volume import SPARSE

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", type=Link.parse, default=Link.parse("1gbit"))
    parser.add_argument("--output", type=Path, default=Path("docs/results/sparse_exchange.json"))
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
        table = {name: summarize([r for r in results if r["algorithm"] == name]) for name in names}
        print(f"\n{ranks} ranks      selection ms  exchange ms      step ms   MB sent  dense/this")
        for name, row in table.items():
            faster = table["dense"]["step_ms"] / row["step_ms"]
            figures = (row["selection_ms"], row["exchange_ms"], row["step_ms"], row["mb_sent"])
            print(f"{name:15}" + "".join(f"{f:13.2f}" for f in figures) + f"{faster:10.2f}")
        report[str(ranks)] = {"table": table, "samples": results}
    command = " ".join(["PYTHONPATH=. python benchmarks/sparse_exchange.py", *sys.argv[1:]])
    finish(job.provenance(command) | {"ranks": report}, args.output)
    for ranks in args.ranks:
        args.output.with_suffix(f".{ranks}.json.cells").unlink()


if __name__ == "__main__":
    main()
