"""A storm of losses: ranks are killed at random, and each is started again at once.

    python benchmarks/storm.py                                        # 32 ranks, 125 faults an hour
    python benchmarks/storm.py --ranks 2 --faults-per-hour 69
    python benchmarks/storm.py --ranks 2 --faults-per-hour 85

`lightning-dsgd launch` starts the ranks of `Trainer.fit` with `on_loss="continue"` and
`data="claimed"`.  They learn a teacher network of 10 classes; a step sleeps for `--step-s`, so that
the ranks fit on few cores.  After `--calm-minutes` the storm begins: for `--minutes` ranks get
SIGKILL at exponential intervals, each time a random one of those that train, but never the last.
Training then goes on to the end of the epoch.  As many epochs follow without a storm, with steps of
`--calm-step-s`.

    steps kept     steps of all ranks per second in the storm, relative to the calm before it
    alive          share of the ranks' seconds from a process's first step to its last
    taking part    members in each step's view, times the share of contributions that were on time,
                   relative to all ranks: the mean over all steps
    back           from a kill to the first step of the process that was started again
    once           samples that were trained on once, of all; then never, and more than once
    loss           of the consensus on held-out samples, beside that of the calm training

A sample counts as trained on when its step has ended on a rank, whatever became of the rank then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from replaced_ranks import said_of_steps, until_back

from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_dsgd import STRATEGIES

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
ranks, rank = settings["ranks"], os.environ["RANK"]
torch.set_num_threads(1)


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


class Samples(Dataset):
    def __init__(self, begin, count):
        self.begin, self.count, self.teacher = begin, count, network(1).requires_grad_(False)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(self.begin + index))
        return x, int(self.teacher(5 * x).argmax()), index


class Learner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(2)
        self.steps = (folder / f"{rank}_{os.getpid()}").open("w")

    def training_step(self, batch, batch_idx):
        time.sleep(settings["step_s"])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        said = self.trainer.strategy.communication()
        part = said["num_members"] / ranks * (1 - said.get("late_share", 0.0))
        print(time.monotonic(), self.current_epoch, round(part, 4), *batch[2].tolist(),
              file=self.steps, flush=True)

    def on_train_epoch_end(self):
        is_told = torch.tensor(float((folder / "end").exists()))
        if self.trainer.strategy.reduce(is_told, reduce_op="sum") > 0:
            self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=settings["lr"], momentum=0.9)


trainer = L.Trainer(
    strategy=STRATEGIES[settings["strategy"]](
        on_loss="continue", min_ranks=1 if ranks == 2 else None, data="claimed",
        heartbeat_timeout_s=30.0, timeout_s=300.0,
    ),
    accelerator="cpu", devices=ranks, max_epochs=settings["epochs"], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = Learner()
samples = Samples(0, settings["epoch_samples"])
trainer.fit(model, DataLoader(samples, settings["batch"], shuffle=True))
held_out = next(iter(DataLoader(Samples(10**9, 4096), 4096)))
with torch.no_grad():
    loss = float(nn.functional.cross_entropy(model.net(held_out[0]), held_out[1]))
(folder / f"result_{rank}").write_text(json.dumps([loss, trainer.current_epoch]))
"""


class Job:
    """The ranks of one training."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.ranks = folder, int(settings["ranks"])
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "lightning_dsgd", "launch", "--ranks", str(self.ranks)]
        command += ["--max-restarts", "100000", "--end-s", "60", "--logs", str(folder / "logs")]
        command += ["--", str(script), str(folder), json.dumps(settings)]
        self.said = (folder / "said").open("w")
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.said)

    def look_until(self, at: float) -> None:
        while time.monotonic() < at:
            if self.process.poll() is not None:
                raise SystemExit(f"the job has ended:\n{(self.folder / 'said').read_text()}")
            time.sleep(0.05)

    def training(self) -> list[int]:
        """The processes that have made a step, and live."""
        made = [pid for (_, pid), lines in said_of_steps(self.folder).items() if lines]
        return [pid for pid in made if Path(f"/proc/{pid}").exists()]

    def end(self, within_s: float) -> tuple[float, int]:
        """Waits for the end; returns the loss, and how many epochs there were."""
        try:
            if self.process.wait(within_s):
                raise SystemExit(f"the job has failed:\n{(self.folder / 'said').read_text()}")
        finally:
            self.stop()
        ends = [json.loads(file.read_text()) for file in self.folder.glob("result_*")]
        assert ends
        assert all(end == ends[0] for end in ends), "all ranks must end with the same weights"
        return ends[0][0], ends[0][1]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            finally:
                self.process.kill()


def storm(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    chance, kills = random.Random(args.seed), []
    with tempfile.TemporaryDirectory(prefix="storm") as temporary:
        job = Job(Path(temporary), settings)
        try:
            started = time.monotonic()
            while len(job.training()) < args.ranks:
                job.look_until(time.monotonic() + 0.2)
            calm = time.monotonic()
            job.look_until(calm + 60 * args.calm_minutes)
            begin = time.monotonic()
            end = begin + 60 * args.minutes
            at = begin
            while (at := at + chance.expovariate(args.faults_per_hour / 3600)) < end:
                job.look_until(at)
                while len(running := job.training()) < 2:
                    job.look_until(time.monotonic() + 0.1)
                pid = chance.choice(running)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append((time.monotonic(), pid))
            job.look_until(end)
            (job.folder / "end").touch()
            loss, epochs = job.end(600 + 10 * args.step_s * args.epoch_steps)
            steps = said_of_steps(job.folder)
        finally:
            job.stop()
    found = summarise(args, steps, kills, (calm, begin, end))
    times = Counter(
        (line[1], index) for lines in steps.values() for line in lines for index in line[3:]
    )
    whole = epochs * settings["epoch_samples"]
    once = sum(count == 1 for count in times.values())
    return found | {
        "start_s": calm - started,
        "loss": loss,
        "epochs": epochs,
        "samples": whole,
        "samples_once": once,
        "samples_never": whole - len(times),
        "samples_more": len(times) - once,
    }


def summarise(
    args: argparse.Namespace,
    steps: dict[tuple[int, int], list[list[str]]],
    kills: list[tuple[float, int]],
    moments: tuple[float, float, float],
) -> dict[str, Any]:
    calm, begin, end = moments
    times = {who: [float(line[0]) for line in lines] for who, lines in steps.items()}

    def rate(since: float, until: float) -> float:
        count = sum(since < t <= until for each in times.values() for t in each)
        return count / (args.ranks * (until - since))

    alive = 0.0
    for each in times.values():
        if each:
            alive += max(0.0, min(end, each[-1]) - max(begin, each[0] - args.step_s))
    parts = [
        float(line[2]) for each in steps.values() for line in each if begin < float(line[0]) <= end
    ]
    back = until_back(kills, times)
    return {
        "faults": len(kills),
        "kept": rate(begin, end) / rate(calm, begin),
        "alive": alive / (args.ranks * (end - begin)),
        "taking_part": statistics.mean(parts),
        "back_s": back,
        "back_median_s": statistics.median(back) if back else None,
        "back_worst_s": max(back, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="wagma")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--calm-minutes", type=float, default=2.0)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--calm-step-s", type=float, default=0.25)
    parser.add_argument("--epoch-steps", type=int, default=60, help="of each rank")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="default: a file of docs/results/survival")
    args = parser.parse_args()
    name = f"storm_{args.ranks}_{args.faults_per_hour:g}.json"
    output = args.output or Path("docs/results/survival", name)
    settings = {
        "strategy": args.strategy,
        "ranks": args.ranks,
        "step_s": args.step_s,
        "batch": args.batch,
        "lr": args.lr,
        "epochs": 100_000,
        "epoch_samples": args.epoch_steps * args.ranks * args.batch,
    }
    found = storm(args, settings)
    calm_settings = settings | {"epochs": found["epochs"], "step_s": args.calm_step_s}
    with tempfile.TemporaryDirectory(prefix="calm") as temporary:
        job = Job(Path(temporary), calm_settings)
        least_s = found["epochs"] * args.epoch_steps * args.calm_step_s
        found["loss_calm"] = job.end(600 + 20 * least_s)[0]
    made = provenance() | {"hyperparameters": in_force([args.strategy], [args.ranks])}
    given = {k: v for k, v in vars(args).items() if k != "output"}
    write_result(made | {"settings": given, **found}, output)
    median, worst = (found[f"back_{which}_s"] or float("nan") for which in ("median", "worst"))
    print(
        f"{args.strategy}, {args.ranks} ranks, {found['faults']} faults: {found['kept']:.1%} of "
        f"the steps kept, {found['alive']:.1%} of rank-seconds alive, {found['taking_part']:.1%} "
        f"taking part; back after {median:.1f} s (worst {worst:.1f} s); {found['samples_once']} of "
        f"{found['samples']} samples once, {found['samples_never']} never, {found['samples_more']} "
        f"more; loss {found['loss']:.4f}, in the calm {found['loss_calm']:.4f}"
    )


if __name__ == "__main__":
    main()
