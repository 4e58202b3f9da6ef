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
    taking part    members in each step's view, relative to all ranks, if this rank's contribution
                   was on time, and none if it was not: the mean over all steps
    back           from a kill to the first step of the process that was started again
    once           samples that were trained on once, of all; then never, and more than once
    loss           of the consensus on held-out samples, beside that of the calm training

A sample counts as trained on when its step has ended on a rank, whatever became of the rank then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.launched import Job, said_of_steps
from benchmarks.replaced_ranks import until_back
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result


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
        (line[1], index) for lines in steps.values() for line in lines for index in line[6:]
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
        "heartbeat_s": 30.0,
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
