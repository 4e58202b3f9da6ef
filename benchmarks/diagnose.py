"""Twelve causes, injected into real DDP jobs: is each one named, and is its gain foretold?

    python benchmarks/diagnose.py

Four ranks train with `Trainer.fit` and strategy="ddp", recorded by `StepTrace`.  Forward and
backward passes are sleeps, so that four ranks fit on few cores; each cause makes some of them
longer, reads or validates slowly, collects real garbage, or slows real links down (which needs
root).  `lightning-dsgd why` is asked for cause, ranks and gain; then the same job runs with
the remedy, and both times are compared.  The cause "none" runs with wagma, whose gain must be
foretold too.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import script
from benchmarks.compare import contestants
from lightning_dsgd import StepTrace
from lightning_dsgd.lab.diagnose import times
from lightning_dsgd.lab.diagnose.remedies import advised, remedies
from lightning_dsgd.lab.diagnose.remedy import chosen
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.diagnose.words import lines
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.network import INTERFACE, why_not
from lightning_dsgd.lab.link import Link

RANKS = 4
VICTIM = 2
FORWARD_S, BACKWARD_S = 0.020, 0.040
PARAMS = 250_000
LINK_BIT_S = 400e6
SLOW_BIT_S = 100e6
CLAIMED, WAGMA = (
    f"{choice.strategy}:data={choice.data}"
    for choice in (chosen(name, RANKS) for name in ("claimed", "wagma"))
)
INT8 = "allreduce:wire_dtype=int8"  # so small a gradient is worth one piece
# The cause, the ranks that must be named, the remedy that is measured, and its strategy.
CAUSES: dict[str, tuple[str, tuple[int, ...], str, str]] = {
    "one rank slow": ("slow", (VICTIM,), "claimed", CLAIMED),
    "two ranks slow": ("slow", (1, VICTIM), "claimed", CLAIMED),
    "random": ("random", (), "wagma", WAGMA),
    "bursts": ("bursts", (VICTIM,), "claimed", CLAIMED),
    "slow loader on one rank": ("loader", (VICTIM,), "workers", "ddp"),
    "long validation on rank 0": ("validation", (0,), "shared", "ddp"),
    "garbage collection": ("gc", (), "freeze", "ddp"),
    "uneven sequence lengths": ("lengths", (), "sorted", "ddp"),
    "thermal drift": ("drift", (VICTIM,), "claimed", CLAIMED),
    "none": ("none", (), "wagma", WAGMA),
    "one slow link": ("link", (VICTIM - 1,), "int8", INT8),  # to whom gloo's ring sends next
    "slow network for all": ("network", (), "int8", INT8),
}
ON_LINKS = ("one slow link", "slow network for all")


class _Sleep(torch.autograd.Function):
    """Takes a time in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(context.seconds)
        return grad, None


class Batches(Dataset[Tensor]):
    """Batches of one sample each, some of them long, and slow to read on one rank."""

    def __init__(self, cause: str, cured: bool, rank: int, steps: int) -> None:
        self.cause, self.cured, self.rank, self.steps = cause, cured, rank, steps

    def __len__(self) -> int:
        return RANKS * self.steps

    def __getitem__(self, index: int) -> Tensor:
        if self.cause == "slow loader on one rank" and self.rank == VICTIM:
            time.sleep(0.030)
        if self.cause != "uneven sequence lengths":
            return torch.zeros(100)
        step, place = divmod(index, RANKS)
        lengths = [random.Random(f"{step}/{i}").lognormvariate(0, 0.5) for i in range(RANKS)]
        share = sum(lengths) / RANKS if self.cured else lengths[place]
        return torch.zeros(max(1, round(100 * share)))


class Slow(L.LightningModule):
    """A job with a cause that makes it slow."""

    def __init__(self, cause: str, cured: bool, steps: int) -> None:
        super().__init__()
        self.cause, self.cured, self.steps = cause, cured, steps
        side = int(PARAMS**0.5)
        self.weight = nn.Parameter(torch.zeros(side, side))
        self.noise = torch.randn(side, side)
        self.step = 0
        self.kept: list[Any] = []

    def on_fit_start(self) -> None:
        if self.cause == "garbage collection":
            self.kept = [{"number": [i]} for i in range(20_000)]
            if self.cured:
                gc.collect()
                gc.freeze()
                gc.disable()

    def slower(self, batch: Tensor) -> float:
        """How many times as long this rank's step takes."""
        rank, step, share = self.global_rank, self.step, self.step / self.steps
        cause, ranks = self.cause, {"one rank slow": (VICTIM,), "two ranks slow": (1, VICTIM)}
        if rank in ranks.get(cause, ()):
            return 1.5
        if cause == "random" and rank == random.Random(f"late {step}").randrange(RANKS):
            return 1.6
        if cause == "bursts" and rank == VICTIM and step % 30 >= 20:
            return 1.8
        if cause == "thermal drift" and rank == VICTIM:
            return 1 + 0.9 * max(0.0, share - 0.2)
        return batch.numel() / 100 if cause == "uneven sequence lengths" else 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step += 1
        slower = self.slower(batch)
        time.sleep(slower * FORWARD_S)
        if self.cause == "garbage collection" and (self.step + 2 * self.global_rank) % 8 == 0:
            gc.collect()
        loss = (self.weight * self.noise).sum()
        return _Sleep.apply(loss, slower * BACKWARD_S)  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        shares = [0.6, 0.02, 0.02, 0.02]
        time.sleep(sum(shares) / RANKS if self.cured else shares[self.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(L.Callback):
    """Takes the time of a training, from when all ranks begin until this one has ended."""

    seconds = 0.0
    begin_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        dist.barrier()
        self.begin_s = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.perf_counter() - self.begin_s


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One job with a cause, as it is, or with the remedy."""
    cause, cured, steps = cell["cause"], cell["cured"], settings["steps"]
    _, _, remedy, strategy = CAUSES[cause]
    rank = int(os.environ["RANK"])
    if cause == "one slow link":
        slow_down(SLOW_BIT_S if rank == VICTIM else LINK_BIT_S)
    elif cause == "slow network for all":
        slow_down(SLOW_BIT_S)
    clock = Clock()
    callbacks: list[L.Callback] = [clock]
    if not cured:
        callbacks = [StepTrace(Path(settings["folder"], cause)), clock]
    validates = cause == "long validation on rank 0"
    trainer = contestants.trainer(
        strategy if cured else "ddp",
        RANKS,
        max_epochs=1,
        callbacks=callbacks,
        val_check_interval=20 if validates else None,
        limit_val_batches=1 if validates else 0,
    )
    data = Batches(cause, cured, rank, steps)
    workers = 2 if cured and remedy == "workers" else 0
    # Lightning's own sampler would deal the steps in another order to each rank.
    in_order = DistributedSampler(data, RANKS, rank, shuffle=False)
    sampler = in_order if cause == "uneven sequence lengths" else None
    loader = DataLoader(data, num_workers=workers, sampler=sampler)
    model = Slow(cause, cured, steps)
    trainer.fit(model, loader, DataLoader(data) if validates else None)
    if model.kept:
        model.kept.clear()
        gc.unfreeze()
        gc.enable()
    return {"seconds": clock.seconds}


def slow_down(rate_bit_s: float) -> None:
    """Gives this rank's link another rate, for what it sends."""
    change = ["tc", "qdisc", "change", "dev", INTERFACE, "root", "handle", "1:", "tbf"]
    how = ["rate", f"{rate_bit_s:.0f}bit", "burst", "128000", "limit", "4000000"]
    subprocess.run([*change, *how], check=True, timeout=30)


def told(cause: str, folder: Path, of_ddp: Cell, of_remedy: Cell) -> dict[str, Any]:
    """What was said of a cause, and what was then measured."""
    name, ranks, remedy, _ = CAUSES[cause]
    seen = times.read(folder / cause)
    found = judge(seen)
    gains = remedies(seen, found)
    best = advised(gains, found)
    gain = next(each for each in gains if each.name == remedy)
    print(f"\n{cause}")
    print("\n".join(lines(seen, found, gains)))
    seconds = [max(of["seconds"] for of in cell["ranks"]) for cell in (of_ddp, of_remedy)]
    measured = seconds[0] / seconds[1]
    print(f"measured with {remedy}: {measured:.2f}, predicted {gain.gain:.2f}")
    return {
        "cause": cause,
        "verdict": found.cause,
        "ranks": list(found.ranks),
        "is_right": (found.cause, found.ranks) == (name, ranks),
        "cost": found.share,
        "advised": "" if best is None else best.name,
        "remedy": remedy,
        "predicted": gain.gain,
        "interval": [gain.low, gain.high],
        "measured": measured,
        "ratio": gain.gain / measured,
        "seconds": seconds,
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/know_before_you_choose/diagnose.json")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--causes", help="these alone, separated by commas")
    parser.add_argument("--keep", type=Path, help="keep the traces there")
    args = parser.parse_args()
    causes = args.causes.split(",") if args.causes else list(CAUSES)
    if any(cause in ON_LINKS for cause in causes) and why_not():
        print(f"left out: {', '.join(ON_LINKS)}: {why_not()}")
        causes = [cause for cause in causes if cause not in ON_LINKS]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        settings = {"steps": args.steps, "folder": str(folder)}
        job = Job(f"{__file__}:run_cell", settings, RANKS)
        for link in (None, Link(LINK_BIT_S)):
            here = [cause for cause in causes if (cause in ON_LINKS) == (link is not None)]
            if not here:
                continue
            job = Job(f"{__file__}:run_cell", settings, RANKS, link)
            plan: list[Cell] = [{"cause": c, "cured": cured} for c in here for cured in (0, 1)]
            done = list(job.measure(plan))
            rows += [
                told(cause, folder, *(cell for cell in done if cell["cause"] == cause))
                for cause in here
            ]
        job.settings = {"steps": args.steps}
        report = job.provenance()
        specs = [spec.partition(":data=")[0] for spec in (CLAIMED, WAGMA, INT8)]
        report["hyperparameters"] = in_force(specs, [RANKS])
    right = sum(row["is_right"] for row in rows)
    near = sum(abs(row["ratio"] - 1) <= 0.15 for row in rows)
    print(f"\n{right} of {len(rows)} named, {near} gains foretold within 15%")
    finish(report | {"named": right, "within_15_percent": near, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
