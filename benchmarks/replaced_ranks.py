"""Ranks are killed one after the other, and started again: how much of the throughput is kept?

    python benchmarks/replaced_ranks.py --minutes 10

`lightning-dsgd launch` starts 8 ranks of `Trainer.fit` with `on_loss="continue"`.  A step sleeps
for 400 ms, so that the ranks fit on few cores.  Every 30 s a random rank gets SIGKILL; it is
started again, and joins.  Counted are the steps of all ranks, from the moment when all train:

    per second         all steps / (ranks x seconds), over the same without kills: what a job loses
    per rank-second    all steps / seconds in which a rank was a member, over the same without
                       kills: what the others lose
    away               from the kill to the first step of the rank that was started again
    pause              from the kill, the longest time without a step of any other rank

With `--stop-s 60` a rank is stopped for a minute (SIGSTOP, SIGCONT) in place of being killed.  The
others go on once it has not answered for 10 s, `heartbeat_timeout_s`; when it goes on it finds
itself outside, ends, is started again, and joins.

With `--num-shards 2` two ranks hold a replica together, by FSDP2: a killed rank takes its replica
along, and `away` is until that rank, and so its replica, makes a step again.

`--strategy torchft` has torchft's fault-tolerant data parallelism in the place of `Trainer.fit`:
with gloo, a lighthouse in this process, and each rank started again after a second.  Steps that it
does not commit do not count.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.launched import said_of_steps
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result

SCRIPT = """
import os, sys, time
from pathlib import Path
import lightning as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from lightning_dsgd import DecentralizedStrategy, ShardedStrategy

folder, name, ranks, step_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
num_shards = int(sys.argv[5])
options = dict(on_loss="continue", heartbeat_timeout_s=10.0, timeout_s=120.0)
if num_shards > 1:
    strategy = ShardedStrategy(name, num_replicas=ranks // num_shards, **options)
else:
    strategy = DecentralizedStrategy(name, **options)


class Sleeper(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(100, 100)
        self.steps = (folder / f"{os.environ['RANK']}_{os.getpid()}").open("w")

    def configure_model(self):
        if num_shards > 1:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        time.sleep(step_s)
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        print(time.monotonic(), file=self.steps, flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


torch.set_num_threads(1)
trainer = L.Trainer(
    strategy=strategy,
    accelerator="cpu", devices=ranks, max_epochs=100, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Sleeper(), DataLoader(TensorDataset(torch.zeros(ranks * 1000, 100))))
"""


TORCHFT = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torch.distributed import TCPStore
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

folder, ranks, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
model, data = torch.nn.Linear(100, 100), torch.zeros(8, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=ranks // 2 + 1, timeout=timedelta(seconds=10), rank=0, world_size=1,
    store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=sys.argv[4],
    hostname="127.0.0.1", replica_id=f"rank-{os.environ['RANK']}",
)
with (folder / f"{os.environ['RANK']}_{os.getpid()}").open("w") as steps:
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        time.sleep(step_s)
        model(data).square().mean().backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            print(time.monotonic(), file=steps, flush=True)
"""


class Launched:
    """The ranks of `lightning-dsgd launch`."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "lightning_dsgd", "launch", "--ranks", str(args.ranks)]
        command += ["--max-restarts", "1000", "--logs", str(folder / "logs")]
        command += ["--", str(folder / "train.py"), str(folder), args.strategy, str(args.ranks)]
        self.job = subprocess.Popen(
            [*command, str(args.step_s), str(args.num_shards)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def look(self) -> None:
        assert self.job.poll() is None, "the job must go on until it is told to end"

    def end(self) -> None:
        self.job.send_signal(signal.SIGTERM)
        try:
            self.job.wait(120)
        finally:
            self.job.kill()


class TorchFT:
    """Ranks that agree by torchft's lighthouse on who takes part, each started again when it ends.

    As by `lightning-dsgd launch`: after a second.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from torchft.coordination import LighthouseServer

        (folder / "train.py").write_text(TORCHFT)
        self.folder, self.args = folder, args
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=args.ranks // 2 + 1,
            join_timeout_ms=1_000,
            quorum_tick_ms=100,
            heartbeat_timeout_ms=2_000,
        )
        self.processes = [self.start(rank) for rank in range(args.ranks)]
        self.again: dict[int, float] = {}
        """When ranks that have ended start."""

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(self.folder / "train.py"), str(self.folder)]
        command += [str(self.args.ranks), str(self.args.step_s)]
        port = self.lighthouse.address().rpartition(":")[2]
        return subprocess.Popen(
            [*command, f"http://127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RANK": str(rank)},
        )

    def look(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                continue
            if time.monotonic() > self.again.setdefault(rank, time.monotonic() + 1.0):
                del self.again[rank]
                self.processes[rank] = self.start(rank)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.lighthouse.shutdown()


def step_times(folder: Path) -> dict[tuple[int, int], list[float]]:
    """When each process had made each of its steps: by rank and process."""
    return {
        who: [float(words[0]) for words in lines] for who, lines in said_of_steps(folder).items()
    }


def until_back(
    kills: list[tuple[float, int]], times: dict[tuple[int, int], list[float]]
) -> list[float]:
    """How long after each kill the rank made a step again; ranks that did not are left out."""
    back = []
    for at, pid in kills:
        (rank,) = (r for r, p in times if p == pid)
        again = [each[0] for (r, _), each in times.items() if r == rank and each and each[0] > at]
        back += [min(again) - at] if again else []
    return back


def newest(folder: Path, ranks: int) -> list[int]:
    """The process of each rank that has made a step last."""
    last = {who: times[-1] for who, times in step_times(folder).items() if times}
    return [
        max((pid for r, pid in last if r == rank), key=lambda pid: last[rank, pid])
        for rank in range(ranks)
    ]


def run(args: argparse.Namespace, every_s: float | None) -> dict[str, Any]:
    """One job: the times of all steps, and of the kills."""
    with tempfile.TemporaryDirectory(prefix="replaced") as temporary:
        folder, chance, kills = Path(temporary), random.Random(0), []
        job = (TorchFT if args.strategy == "torchft" else Launched)(folder, args)

        def look_until(at: float) -> None:
            while time.monotonic() < at:
                job.look()
                time.sleep(0.05)

        try:
            while len([t for t in step_times(folder).values() if len(t) >= 3]) < args.ranks:
                look_until(time.monotonic() + 0.1)
            begin = time.monotonic()
            end = begin + 60 * (args.minutes if every_s else args.undisturbed_minutes)
            while every_s and time.monotonic() + 1.5 * every_s < end:
                look_until(time.monotonic() + every_s)
                running = [
                    pid for pid in newest(folder, args.ranks) if Path(f"/proc/{pid}").exists()
                ]
                pid = chance.choice(running)
                kills.append((time.monotonic(), pid))
                os.kill(pid, signal.SIGSTOP if args.stop_s else signal.SIGKILL)
                if args.stop_s:
                    look_until(time.monotonic() + args.stop_s)
                    os.kill(pid, signal.SIGCONT)
            look_until(end)
        finally:
            job.end()
        return {"begin": begin, "end": end, "kills": kills, "steps": step_times(folder)}


def summarise(args: argparse.Namespace, one: dict[str, Any]) -> dict[str, Any]:
    begin, end, steps = one["begin"], one["end"], one["steps"]
    inside = {who: [t for t in times if begin <= t <= end] for who, times in steps.items()}
    count = sum(map(len, inside.values()))
    members_s = sum(t[-1] - t[0] + args.step_s for t in inside.values() if t)
    pauses = []
    for at, pid in one["kills"]:
        for (_, other), times in inside.items():
            gaps = [b - a for a, b in pairwise(times) if a < at + 5 and b > at]
            pauses += [max(gaps)] if other != pid and gaps else []
    return {
        "kills": len(one["kills"]),
        "steps": count,
        "per_second": count / (args.ranks * (end - begin)),
        "per_rank_second": count / members_s,
        "away_s": until_back(one["kills"], steps),
        "pause_median_s": statistics.median(pauses) if pauses else None,
        "pause_worst_s": max(pauses) if pauses else None,
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/survival/replaced_ranks.json")
    parser.add_argument("--strategy", default="wagma")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--num-shards", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.4)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--stop-s", type=float, default=0.0, help="stop, in place of killing")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--undisturbed-minutes", type=float, default=2.0)
    args = parser.parse_args()
    alone = summarise(args, run(args, None))
    killed = summarise(args, run(args, args.every_s))
    kept = {k: killed[k] / alone[k] for k in ("per_second", "per_rank_second")}
    away = killed["away_s"]
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    rows = [{"run": "undisturbed", **alone}, {"run": "killed", **killed}]
    num_replicas = args.ranks // args.num_shards
    made = provenance() | {"hyperparameters": in_force([args.strategy], [num_replicas])}
    write_result(made | {"settings": settings, "kept": kept, "rows": rows}, args.output)
    print(
        f"{args.strategy}: {killed['kills']} kills, {len(away)} ranks came back; kept "
        f"{kept['per_second']:.1%} per second, {kept['per_rank_second']:.1%} per rank-second; away "
        f"{statistics.median(away):.1f} s, at most {max(away):.1f} s; pause of the others "
        f"{killed['pause_median_s']:.2f} s, at most {killed['pause_worst_s']:.2f} s "
        f"(a step takes {args.step_s} s)"
    )


if __name__ == "__main__":
    main()
