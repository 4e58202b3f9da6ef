"""Four ranks with 50 MB of weights on slow links: is a rank taken for lost, how fast are they?

    python benchmarks/slow_links.py --links 1gbit --links 50mbit --links 10mbit

Each rank is a process on a node of its own, a network namespace behind a link (`bench --network`).
All watch each other as with `on_loss="continue"`; none fails, so each rank that is taken for lost
is taken for lost in error.  A step computes for `--step-s` (a sleep) and averages 12.5 million
weights as the strategy does.  For each link and strategy:

    lost     ranks that another one took for lost
    steps    steps of the slowest rank in `--seconds`
    rate     its steps per second, relative to steps without communication
    gap      the longest time in which a rank heard nothing of another one
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import script
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.network import Network, demanded
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.process_group import ProcessGroupTransport

RANKS = 4


def run_rank(rank: int, folder: Path, name: str, options: dict[str, float]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    beat_s = options["heartbeat_timeout_s"]
    net = ProcessGroupTransport(timeout_s=600, heartbeat_timeout_s=beat_s)
    x = torch.zeros(int(options["params"]))
    net.expect_at_most(x.nbytes)
    net.barrier().wait()
    net.views.survive(None)
    heard: dict[int, float] = {}
    gaps = [0.0]
    hear = net.mesh.hear

    def listen(other: int) -> None:
        now = time.monotonic()
        gaps[0] = max(gaps[0], now - heard.get(other, now))
        heard[other] = now
        hear(other)

    net.mesh.hear = listen  # type: ignore[method-assign]
    algorithm = ALGORITHMS[name]()
    algorithm.start(net.sub("algorithm"), x)
    net.barrier().wait()
    steps, begin, lost = 0, time.monotonic(), ""

    def end() -> None:
        """Says how far this rank is, in the midst of a step, and stays until all have said it."""
        time.sleep(options["seconds"])
        said = json.dumps([steps, time.monotonic() - begin, gaps[0], lost])
        Path(folder, f"{rank}.json").write_text(said)
        limit = time.monotonic() + 60
        while len(list(folder.glob("*.json"))) < RANKS and time.monotonic() < limit:
            time.sleep(0.1)
        os._exit(0)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        while True:
            time.sleep(options["step_s"])
            algorithm.before_update(x, torch.zeros_like(x))
            algorithm.after_update(x)
            steps += 1
    except TransportError as error:
        lost = str(error)
    thread.join()


def measure(link: Link, name: str, args: argparse.Namespace) -> dict[str, Any]:
    options = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    with tempfile.TemporaryDirectory(prefix="slow") as temporary, Network(RANKS, link) as network:
        folder = Path(temporary)
        ranks = []
        for rank in range(RANKS):
            command = [sys.executable, __file__, "--rank", str(rank), "--folder", temporary]
            command += ["--strategies", name, "--options", json.dumps(options)]
            variables = {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": network.address(0)}
            ranks.append(
                subprocess.Popen(
                    [*network.inside(rank), *command],
                    env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "MASTER_PORT": "1"},
                )
            )
        try:
            for process in ranks:
                process.wait(60 + 4 * args.seconds + 600)
        finally:
            for process in ranks:
                process.kill()
        said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    steps, took, gaps, lost = zip(*said, strict=True)
    return {
        "strategy": name,
        "lost": [text for text in lost if text],
        "steps": min(steps),
        "rate": min(s / t for s, t in zip(steps, took, strict=True)) * args.step_s,
        "gap_s": max(gaps),
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/survival/slow_links.json")
    parser.add_argument("--links", action="append")
    parser.add_argument("--strategies", default="allreduce,sgp,wagma,popsgd,hpsgd,local_sgd")
    parser.add_argument("--params", type=int, default=12_500_000)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=5.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.folder, args.strategies, args.options)
    rows = []
    print("| link | strategy | lost | steps | rate | gap |\n" + "|---" * 6 + "|")
    for text in args.links or ["1gbit", "50mbit", "10mbit"]:
        link = demanded(text)
        assert link is not None
        for name in args.strategies.split(","):
            row = {"link": text, **measure(link, name, args)}
            rows.append(row)
            print(
                f"| {text} | `{name}` | {len(row['lost'])} | {row['steps']} | {row['rate']:.3f} "
                f"| {row['gap_s']:.1f} s |",
                flush=True,
            )
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)}
    made = provenance() | {"hyperparameters": in_force(args.strategies.split(","), [RANKS])}
    write_result(made | {"settings": settings, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
