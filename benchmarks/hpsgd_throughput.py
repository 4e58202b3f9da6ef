"""Steps per second of `hpsgd` beside `no_sync`, `local_sgd` and `ddp` on links of a given speed.

    sudo python benchmarks/hpsgd_throughput.py --ranks 4 --rates 800mbit,300mbit --output FILE.json

Each rank is a process in a network namespace of its own, behind a link that carries so much in
each direction (`tc tbf` at both ends; needs root and iproute2).  Computation is a sleep, so that
many ranks fit on few cores.  All ranks are started once a rate and run one `Trainer.fit` after
another, every strategy once a round, in an order that changes from round to round.

steps_per_s     steps / (time until the slowest rank has made its last step)
with_finish     steps / (time until the slowest rank has the final model)
ratios          steps_per_s over that of no_sync in the same round
wait_s          how long the training thread was held up by messages, mean over ranks
allreduce_s     of the parameters over all ranks, nothing else going on, before the first round
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

NAMES = "hpsgd-bench"
NETWORK = "10.78.0"


# ---- the network ----


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True)


def shape(namespace: str, device: str, rate: str) -> None:
    command = f"ip netns exec {namespace} tc qdisc add dev {device} root tbf rate {rate}"
    subprocess.run([*command.split(), "burst", "256kb", "limit", "4mb"], check=True)


def build_network(num_ranks: int, rate: str) -> None:
    switch = f"{NAMES}-sw"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "br0", "type", "bridge")
    ip("-n", switch, "link", "set", "br0", "up")
    for rank in range(num_ranks):
        mine = f"{NAMES}-{rank}"
        ip("netns", "add", mine)
        ends = ["eth0", "netns", mine, "type", "veth", "peer", "name", f"p{rank}", "netns", switch]
        ip("link", "add", *ends)
        ip("-n", mine, "link", "set", "lo", "up")
        ip("-n", mine, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", "eth0")
        ip("-n", mine, "link", "set", "eth0", "up")
        ip("-n", switch, "link", "set", f"p{rank}", "master", "br0", "up")
        shape(mine, "eth0", rate)
        shape(switch, f"p{rank}", rate)


def remove_network(num_ranks: int) -> None:
    for name in (*range(num_ranks), "sw"):
        subprocess.run(["ip", "netns", "del", f"{NAMES}-{name}"], check=False, stderr=-3)


# ---- one rank ----


def run_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells: list[dict[str, Any]] = []
    allreduce_s = time_allreduce(args)
    for turn in range(args.rounds):
        names = args.strategies.split(",")
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            cell = fit(name, args)
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, cell)
            slowest = max(rank["stepped_s"] for rank in everyones)
            finished = max(rank["finished_s"] for rank in everyones)
            figures = everyones[0]["figures"]
            cells.append(
                {
                    "strategy": name,
                    "round": turn,
                    "steps_per_s": args.steps / slowest,
                    "with_finish": args.steps / finished,
                    "wait_s": statistics.mean(r["figures"].get("wait_s", 0) for r in everyones),
                    "local_steps_per_sync": figures.get("local_steps_per_sync"),
                }
            )
            if dist.get_rank() == 0:
                print(f"  {name:10} {cells[-1]['steps_per_s']:.3f} steps/s", flush=True)
    if dist.get_rank() == 0:
        Path(args.part).write_text(json.dumps({"allreduce_s": allreduce_s, "cells": cells}))
    dist.barrier()
    dist.destroy_process_group()


def time_allreduce(args: argparse.Namespace) -> list[float]:
    import torch

    from lightning_dsgd.transport.process_group import ProcessGroupTransport

    net, x, times = ProcessGroupTransport(), torch.zeros(int(args.params)), []
    for _ in range(4):
        net.barrier().wait()
        begin = time.perf_counter()
        net.all_reduce(x).wait()
        times.append(time.perf_counter() - begin)
    net.barrier().wait()
    net.close()
    return times[1:]


def fit(name: str, args: argparse.Namespace) -> dict[str, Any]:
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_dsgd

    class Sleeper(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(int(args.params)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(args.compute_ms / 1e3)
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    class Clock(L.Callback):
        begin = end = waited = 0.0
        figures: dict[str, float] | None = None

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            torch.distributed.barrier()
            self.waited = self.wait_s(trainer)
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.end = time.perf_counter()
            self.figures = {"wait_s": self.wait_s(trainer) - self.waited}
            if hasattr(trainer.strategy, "communication"):
                self.figures = trainer.strategy.communication() | self.figures

        def wait_s(self, trainer: Any) -> float:
            if not hasattr(trainer.strategy, "communication"):
                return 0.0  # Lightning's own do not say
            return float(trainer.strategy.communication()["wait_s"])

    clock = Clock()
    options = {"local_sgd": {"sync_period": 8}}.get(name, {})
    strategy = name if name == "ddp" else lightning_dsgd.STRATEGIES[name](**options)
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    ).fit(Sleeper(), DataLoader(TensorDataset(torch.zeros(4096, 1))))
    return {
        "stepped_s": clock.end - clock.begin,
        "finished_s": time.perf_counter() - clock.begin,
        "figures": clock.figures or {},
    }


# ---- all ranks ----


def run_rate(rate: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        part = str(Path(folder, "part.json"))
        command = [sys.executable, __file__, "--part", part, "--params", str(args.params)]
        command += ["--strategies", args.strategies]
        for option in ("steps", "rounds", "compute_ms"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = str(probe.getsockname()[1])
        remove_network(args.ranks)
        build_network(args.ranks, rate)
        try:
            ranks = [
                subprocess.Popen(
                    ["ip", "netns", "exec", f"{NAMES}-{rank}", *command],
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "MASTER_ADDR": f"{NETWORK}.1",
                        "MASTER_PORT": port,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "GROUP_RANK": "0",
                        "WORLD_SIZE": str(args.ranks),
                        "LOCAL_WORLD_SIZE": str(args.ranks),
                        "TORCHELASTIC_RUN_ID": "benchmark",
                    },
                )
                for rank in range(args.ranks)
            ]
            codes = [process.wait() for process in ranks]
        finally:
            remove_network(args.ranks)
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        result: dict[str, Any] = json.loads(Path(part).read_text())
    result["allreduce_s"] = statistics.median(result["allreduce_s"])
    result["medians"] = {
        name: {
            key: statistics.median(c[key] for c in result["cells"] if c["strategy"] == name)
            for key in ("steps_per_s", "with_finish", "wait_s")
        }
        for name in args.strategies.split(",")
    }
    result["ratios_to_no_sync"] = ratios(result["cells"])
    return {"rate": rate, **result}


def ratios(cells: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Steps per second relative to those of no_sync in the same round, in order."""
    base = {c["round"]: c["steps_per_s"] for c in cells if c["strategy"] == "no_sync"}
    result: dict[str, list[float]] = {}
    for cell in cells:
        result.setdefault(cell["strategy"], []).append(cell["steps_per_s"] / base[cell["round"]])
    return {name: sorted(values) for name, values in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategies", default="no_sync,hpsgd,local_sgd,ddp")
    parser.add_argument("--rates", default="800mbit,300mbit")
    parser.add_argument("--params", type=float, default=1e7)
    parser.add_argument("--compute-ms", type=float, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="docs/results/hpsgd_throughput.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_rank(args)
        return
    import lightning as L
    import torch

    import lightning_dsgd

    rates = []
    for rate in args.rates.split(","):
        print(f"{args.ranks} ranks, {rate}", flush=True)
        rates.append(run_rate(rate, args))
        print(f"  an all-reduce takes {rates[-1]['allreduce_s']:.2f} s; relative to no_sync:")
        for name, values in rates[-1]["ratios_to_no_sync"].items():
            low, high = min(values), max(values)
            print(f"  {name:10} {statistics.median(values):.3f} (from {low:.3f} to {high:.3f})")
    report = {
        "command": " ".join(["python", "benchmarks/hpsgd_throughput.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "lightning_dsgd": lightning_dsgd.__version__,
        },
        "ranks": args.ranks,
        "parameters": int(args.params),
        "compute_ms": args.compute_ms,
        "steps": args.steps,
        "rates": rates,
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1))
    print(f"written: {output}")


if __name__ == "__main__":
    main()
