"""The picture of the README: where the time goes with DDP and with ours, in real runs.

    python benchmarks/timeline_picture.py

Real ranks on this machine; computation is a sleep, and a random rank is late in each step.  The
callback `StepTrace` records, and `lightning-dsgd timeline` draws.  The whole runs are drawn, so the
picture and the result file have the same shares.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import script
from benchmarks.compare import contestants
from lightning_dsgd import StepTrace, StragglerInjector
from lightning_dsgd.lab.drawing import picture
from lightning_dsgd.lab.drawing.style import WIDTH
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.fit import Sleeper
from lightning_dsgd.lab.jobs.job import Job

STRATEGIES = "ddp,local_sgd:sync_period=8,wagma,hpsgd"


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One fit, recorded in a folder of the strategy's name."""
    steps, ranks = settings["steps"], settings["world_size"]
    trace = StepTrace(Path(settings["folder"], cell["strategy"]), skip_steps=2)
    late = StragglerInjector(settings["delay_s"], settings["delayed_ranks"])
    data = DataLoader(TensorDataset(torch.zeros(steps * ranks, 1)))
    contestants.trainer(
        cell["strategy"], ranks, max_steps=steps, max_epochs=-1, callbacks=[trace, late]
    ).fit(Sleeper(settings["params"], settings["compute_s"]), data)
    return {}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/know_before_you_choose/timeline.json")
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--params", type=int, default=250_000)
    parser.add_argument("--compute-s", type=float, default=0.4)
    parser.add_argument("--delay-s", type=float, default=0.32)
    parser.add_argument("--delayed-ranks", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/timeline.svg"))
    parser.add_argument("--keep", type=Path, help="copy the traces there")
    args = parser.parse_args()
    names = ("steps", "params", "compute_s", "delay_s", "delayed_ranks")
    specs = args.strategies.split(",")
    settings = {name: getattr(args, name) for name in names} | {"world_size": args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(f"{__file__}:run_cell", settings | {"folder": folder}, args.ranks)
        job.run([{"strategy": name} for name in specs], args.output)
        if args.keep:
            shutil.copytree(folder, args.keep, dirs_exist_ok=True)
        runs = {name: picture.load(Path(folder, name)) for name in specs}
        job.settings = settings  # without the folder, which is gone
        report = job.provenance() | {"hyperparameters": in_force(specs, [args.ranks])}
    args.picture.write_text(picture.svg([*runs.values()], WIDTH))
    report["runs"] = [
        {"strategy": name, "steps_per_s": picture.steps_per_s(run), **picture.shares(run)}
        for name, run in runs.items()
    ]
    for name, run in runs.items():
        print(f"{name}: {picture.steps_per_s(run):.2f} steps/s; {picture.sentence(run)}")
    finish(report, args.output)


if __name__ == "__main__":
    main()
