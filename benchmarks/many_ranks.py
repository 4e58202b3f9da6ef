"""Starting, training and coming to rest with many real ranks on one machine.

    python benchmarks/many_ranks.py --ranks 32,64,128

The ranks are forked from one interpreter, so that they share what it has imported.  A step sleeps,
as all ranks share the machine's cores.  For each strategy and number of ranks:

    start    from the fork of the first rank until the network is open on the last
    rate     steps per second of the slowest rank, as a share of what `no_sync` makes
    settle   from the last step of the last rank until all are at rest
    opened   connections that a rank has made, the most of any but rank 0, which watches all
    messages of a rank while it came to rest, the mean

With `--simulated`, the last two for 1,024 ranks of the simulated world.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import script
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport.process_group import ProcessGroupTransport

ALGORITHMS: dict[str, Any] = {
    "no_sync": NoSync,
    "wagma": WAGMA,
    "wagma:overlap=true": lambda: WAGMA(overlap=True),
    "sgp:overlap=1": lambda: SGP(overlap=1),
    "hpsgd": HPSGD,
}
PARAMS = 10_000


def train(net: Any, algorithm: Algorithm, num_steps: int, step_s: float, sleep: Any) -> Any:
    """When training began and ended, when all were at rest, and the messages between the two."""
    draw = Random(net.rank)
    x = torch.zeros(PARAMS)
    algorithm.start(net.sub("algorithm"), x)
    net.barrier().wait()
    begin = net.now()
    for _ in range(num_steps):
        sleep(step_s * draw.uniform(0.9, 1.1))
        x += 1
        algorithm.before_update(x, x[:0])
        algorithm.after_update(x)
    end, sent = net.now(), net.counters.messages_sent
    algorithm.settle(x)
    settled, messages = net.now(), net.counters.messages_sent - sent
    algorithm.finish(x)
    return begin, end, settled, messages


def run_rank(rank: int, size: int, folder: str, name: str, num_steps: int, step_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    joined = time.monotonic()
    net = ProcessGroupTransport(timeout_s=300, heartbeat_timeout_s=60)
    opened = time.monotonic()
    times = train(net, ALGORITHMS[name](), num_steps, step_s, time.sleep)
    connections = len(net.mesh.connections._outgoing)
    net.barrier().wait()
    Path(folder, f"{rank}.json").write_text(json.dumps([joined, opened, *times, connections]))
    net.close()


def fork_rank(*args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run_rank(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def measure(name: str, size: int, num_steps: int, step_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        pids = [fork_rank(rank, size, folder, name, num_steps, step_s) for rank in range(size)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            sys.exit(f"a rank of {size} with {name} has failed")
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    joined, opened, began, ended, settled, messages, connections = zip(*rows, strict=True)
    return {
        "torch_s": max(joined) - begin,
        "start_s": max(opened) - max(joined),
        "rate": num_steps / (max(ended) - max(began)),
        "settle_s": max(settled) - max(ended),
        "connections": max(connections[1:]),
        "messages": statistics.mean(messages),
    }


def simulate(name: str, size: int) -> dict[str, float]:
    def run(net: Any) -> Any:
        return train(net, ALGORITHMS[name](), 12, 1.0, net.compute)

    begin = time.monotonic()
    rows = SimulatedWorld(size, latency_s=1e-4, bandwidth_bytes_s=1e9).run(run)
    _, ended, settled, messages = zip(*rows, strict=True)
    return {
        "settle_s": max(settled) - max(ended),
        "messages": statistics.mean(messages),
        "took_s": time.monotonic() - begin,
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/many_ranks.json")
    parser.add_argument("--ranks", default="32,64,128")
    parser.add_argument("--strategies", default=",".join(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--simulated", type=int, default=1024)
    args = parser.parse_args()
    names = args.strategies.split(",")
    rows: list[dict[str, Any]] = []
    print("| ranks | strategy | start | rate | settle | opened | messages |\n" + "|---" * 7 + "|")
    for size in map(int, args.ranks.split(",")):
        for name in names:
            row = measure(name, size, args.steps, args.step_s)
            rows.append({"ranks": size, "strategy": name, **row})
            bound = next(r["rate"] for r in rows if r["ranks"] == size)
            print(
                f"| {size} | `{name}` | {row['torch_s']:.1f} + {row['start_s']:.1f} s "
                f"| {row['rate'] / bound:.2f} | {row['settle_s']:.1f} s "
                f"| {row['connections']:.0f} | {row['messages']:.0f} |",
                flush=True,
            )
    simulated = {name: simulate(name, args.simulated) for name in names if args.simulated}
    for name, row in simulated.items():
        print(f"| {args.simulated}, simulated | `{name}` | | | {row['settle_s']:.2f} s | | "
              f"{row['messages']:.0f} |")  # fmt: skip
    made = provenance() | {"hyperparameters": in_force(names, map(int, args.ranks.split(",")))}
    write_result(made | {"rows": rows, "simulated": simulated}, args.output)


if __name__ == "__main__":
    main()
