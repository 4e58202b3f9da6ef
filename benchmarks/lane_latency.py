"""How soon a lane answers while its training thread is busy, and what that costs the latter.

    python benchmarks/lane_latency.py --output docs/results/benchmarks/lane_latency.json
    python benchmarks/lane_latency.py --intervals-ms 0.5 5 --loads "plain Python" --rounds 4 \
        --output docs/results/benchmarks/switch_interval.json

Two processes.  Rank 0 sends 1 MB to rank 1's lane, which sends it back; meanwhile rank 1's
training thread runs small torch operations, a network of 25M parameters, convolutions, or plain
Python.  Cost: how many of its iterations rank 1 does a second with that traffic, over how many
without, in turn.  With several intervals, these take turns too: how soon the interpreter gives a
thread that waits for it the place of one that runs (`sys.setswitchinterval`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import script
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.transport import LaneStopped
from lightning_dsgd.transport.process_group import ProcessGroupTransport

PAYLOAD = 250_000  # float32


def small_operations() -> Callable[[], None]:
    x = torch.randn(64, 64)

    def step() -> None:
        for _ in range(200):
            (x @ x).relu().sum()

    return step


def large_network() -> Callable[[], None]:
    net = nn.Sequential(*(nn.Linear(2900, 2900) for _ in range(3)))
    x = torch.randn(8, 2900)

    def step() -> None:
        net(x).sum().backward()

    return step


def convolutions() -> Callable[[], None]:
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
    x = torch.randn(8, 16, 32, 32)

    def step() -> None:
        net(x).sum().backward()

    return step


def plain_python() -> Callable[[], None]:
    def step() -> None:
        total = 0
        for i in range(200_000):
            total += i * i

    return step


LOADS = {
    "idle": None,
    "small torch operations": small_operations,
    "network of 25M parameters": large_network,
    "convolutions": convolutions,
    "plain Python": plain_python,
}


def serve(net: Any) -> None:
    """Sends back whatever comes."""
    like = torch.empty(0)
    while True:
        receipt = net.recv(like, 0)
        net.send(receipt.wait(math.inf), 0)


def echo(net: Any, channel: Any, seconds: float) -> list[float]:
    payload = torch.zeros(PAYLOAD)
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        channel.send(payload, 1)
        channel.recv(payload, 1).wait()
        times.append(time.monotonic() - begin)
    return times


def iterations_per_s(step: Callable[[], None] | None, seconds: float) -> float:
    begin, count = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        if step is None:
            time.sleep(0.001)
        else:
            step()
        count += 1
    return count / (time.monotonic() - begin)


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Both sides of one load: round trips on rank 0, the rates of the training thread on rank 1."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net = ProcessGroupTransport()
    # Both spawn a lane, so that the channels match; rank 0 uses its own only to learn the path.
    lane = net.spawn_lane(serve if net.rank else _sleep, "echo")
    channel = net._at(lane.net.path, None)
    make, seconds = LOADS[cell["load"]], settings["seconds"]
    step = make() if make is not None and net.rank == 1 else None
    intervals = settings["switch_intervals_ms"]
    rates: dict[bool, list[list[float]]] = {True: [], False: []}
    times: list[list[float]] = [[] for _ in intervals]
    for _ in range(settings["rounds"]):
        rates[True].append([])
        rates[False].append([])
        for (k, interval), with_traffic in itertools.product(enumerate(intervals), (True, False)):
            sys.setswitchinterval(interval / 1e3)
            net.barrier().wait()
            if net.rank == 1:
                rates[with_traffic][-1].append(iterations_per_s(step, seconds))
            elif with_traffic:
                times[k] += echo(net, channel, seconds * 0.95)
            else:
                time.sleep(seconds)
    net.barrier().wait()
    lane.stop()
    net.barrier().wait()
    net.close()
    return {"round_trips_s": times, "rates": rates[True], "rates_alone": rates[False]}


def _sleep(net: Any) -> None:
    net.recv(torch.empty(0), 1, tag=1).wait(math.inf)
    raise LaneStopped


def summarize(result: Cell, k: int) -> dict[str, Any]:
    """The figures of one load with the k-th switch interval."""
    sender, busy = result["ranks"]
    times = sorted(sender["round_trips_s"][k])
    ratios = [a[k] / b[k] for a, b in zip(busy["rates"], busy["rates_alone"], strict=True)]
    return {
        "round_trip_ms": {
            "median": 1e3 * statistics.median(times),
            "p95": 1e3 * times[int(0.95 * len(times))],
            "samples": len(times),
        },
        "training_thread_rate": statistics.median(ratios),
        "rates": ratios,
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/lane_latency.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--intervals-ms", type=float, nargs="*", default=[0.5], metavar="MS")
    args = parser.parse_args()
    settings = {
        "seconds": args.seconds,
        "rounds": args.rounds,
        "payload_bytes": 4 * PAYLOAD,
        "switch_intervals_ms": args.intervals_ms,
    }
    job = Job(f"{__file__}:run_cell", settings, ranks=2)
    results = job.run([{"load": load} for load in args.loads], args.output)
    loads = {
        result["load"] + (f", {interval:g} ms" if args.intervals_ms[1:] else ""): summarize(
            result, k
        )
        for result in results
        for k, interval in enumerate(args.intervals_ms)
    }
    for load, row in loads.items():
        trip = row["round_trip_ms"]
        print(
            f"{load:28} {trip['median']:6.2f} ms (95%: {trip['p95']:6.2f} ms)   "
            f"training thread at {row['training_thread_rate']:.2f} of its rate"
        )
    report = job.provenance() | {"loads": loads}
    finish(report, args.output)


if __name__ == "__main__":
    main()
