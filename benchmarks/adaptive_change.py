"""What a change of `adaptive` costs, in steps: in real processes, and in virtual time.

    python benchmarks/adaptive_change.py --output docs/results/adaptive/adaptive_change.json

Four ranks; a step is a sleep.  What is decided is prescribed: all-reduce, then what is named, at
the end of the second epoch, and back, at the end of the fourth; there all ranks stand still
anyway.  In virtual time there are 8 ranks too, and a slow link.

there, back  what the steps around a change took longer than as many others took, with what was in
             force in each: the last one before it, and three after it; over a step of all-reduce.
             What the end of an epoch without a change takes is taken off
change_...   of that, the time within `adaptive` itself: settling, and starting anew

Each is the rank's for which it is largest, and the median over the rounds; `most_...` is the
largest.  A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import script
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.lab.adaptive import algorithm as adaptive
from lightning_dsgd.lab.adaptive.decision import Decision, State
from lightning_dsgd.lab.adaptive.prediction import HOME, ROUNDED
from lightning_dsgd.lab.adaptive.strategy import AdaptiveStrategy
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured
from lightning_dsgd.lab.jobs.fit import Sleeper
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.simulate.model import passes
from lightning_dsgd.simulated import SimulatedWorld

EPOCH, EPOCHS = 12, 6
CHANGES = {2: "there", 4: "back"}
AFTER = 3
adaptive.EVERY = adaptive.MOST_STEPS  # so that all look at the ends of epochs, with enough steps
PARAMS, STEP_S = 1_000_000, 0.1
CHOICES = ("wagma:overlap=true:group_size=4", "wagma", "hpsgd", ROUNDED)
VIRTUAL = ((4, 0.0), (8, 0.0), (8, 3.0))
"""Ranks, and how many steps an all-reduce takes: 0 stands for a fiftieth of a step."""


class Prescribed:
    """Decides as prescribed, in place of `decide`; each rank has one."""

    def __init__(self, there: str) -> None:
        self.there, self.num_epochs = there, 0

    def __call__(self, _: Any, state: State) -> Decision:
        to = {"there": self.there, "back": HOME}.get(CHANGES.get(self.num_epochs, ""))
        return Decision(State(to or state.choice), "prescribed")


def cost_steps(ends_s: Sequence[float], epoch: int, home_s: float) -> float:
    """Returns what the steps around the end of an epoch took longer, in steps of all-reduce."""
    steps = [end - begin for begin, end in itertools.pairwise([0.0, *ends_s])]
    at = epoch * EPOCH
    others = [0.0, 0.0]
    for side, (begin, end) in enumerate(
        [(at - EPOCH + AFTER, at - 1), (at + AFTER, at + EPOCH - 1)]
    ):
        others[side] = statistics.median(steps[begin:end])
    # Within the window lies the standstill at the epoch's end; another epoch's, without a change.
    taken = sum(steps[at - 1 : at + AFTER])
    usual = others[0] + AFTER * others[1]
    still = [e * EPOCH for e in range(1, EPOCHS) if e not in CHANGES]
    idle = [
        sum(steps[e - 1 : e + AFTER])
        - (1 + AFTER) * statistics.median(steps[e - EPOCH + AFTER : e - 1])
        for e in still
    ]
    return (taken - usual - statistics.median(idle)) / home_s


def figures(ends_s: Sequence[float], changes_s: Sequence[float]) -> dict[str, Any]:
    steps = [end - begin for begin, end in itertools.pairwise(ends_s)]
    home_s = statistics.median(steps[AFTER : EPOCH - 1])
    found = {"step_s": home_s}
    for (epoch, name), change_s in zip(CHANGES.items(), changes_s, strict=True):
        found[name] = cost_steps(ends_s, epoch, home_s)
        found[f"change_{name}"] = change_s / home_s
    return found


# ---- real processes ----


class Steps(L.Callback):
    """Notes the ends of steps, and the changes."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.changes_s: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin_s = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ends_s.append(time.perf_counter() - self.begin_s)
        prescribed: Any = adaptive.decide
        prescribed.num_epochs = len(self.ends_s) // EPOCH

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.changes_s = noted(changing)


changing: list[float] = []


def noted(times: list[float]) -> list[float]:
    found = list(times)
    times.clear()
    return found


def timed(change: Callable[..., None]) -> Callable[..., None]:
    def whole(self: Any, x: torch.Tensor) -> None:
        change(self, x)
        changing.append(self.change_s)

    return whole


def measure(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains on this rank, and returns what its changes took."""
    if not hasattr(adaptive.Adaptive, "was"):
        adaptive.Adaptive.was = adaptive.Adaptive._change
        adaptive.Adaptive._change = timed(adaptive.Adaptive._change)
    adaptive.decide = Prescribed(cell["choice"])
    steps = Steps()
    L.seed_everything(cell["round"], verbose=False)
    trainer = L.Trainer(
        strategy=AdaptiveStrategy(),
        accelerator="cpu",
        devices=settings["world_size"],
        max_epochs=EPOCHS,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.zeros(EPOCH * settings["world_size"], 1))
    trainer.fit(Sleeper(settings["params"], settings["step_s"]), DataLoader(data))
    return figures(steps.ends_s, steps.changes_s)


# ---- virtual time ----


def simulated(choice: str, ranks: int, allreduce_steps: float) -> list[dict[str, Any]]:
    """Trains nothing, in virtual time; a step takes a second."""
    x = torch.zeros(PARAMS // 100)
    sum_s = allreduce_steps or 0.02
    bandwidth = 2 * x.nbytes * (ranks - 1) / ranks / sum_s
    decisions = {rank: Prescribed(choice) for rank in range(ranks)}

    def train(net: Any) -> dict[str, Any]:
        mine, algorithm, ends_s = x.clone(), adaptive.Adaptive(overlap=True), []
        changes_s: list[float] = []
        change = algorithm._change

        def noting(at: torch.Tensor) -> None:
            change(at)
            changes_s.append(algorithm.change_s)

        algorithm._change = noting  # type: ignore[method-assign]
        algorithm.start(net, mine, Conditions())
        algorithm.expect_epochs(EPOCH)
        g = torch.zeros_like(mine)
        for step in range(EPOCH * EPOCHS):
            for place_s, begin in passes(algorithm, len(g), 1.0):
                net.compute(place_s)
                if algorithm.traits.takes_pieces:
                    algorithm.gradient_made(g, begin)
            algorithm.before_update(mine, g if algorithm.traits.uses_gradient else g[:0])
            algorithm.after_update(mine)
            if step % EPOCH == EPOCH - 1:
                decisions[net.rank].num_epochs += 1
                algorithm.settle(mine)
            ends_s.append(net.now())
        algorithm.settle(mine)
        algorithm.finish(mine)
        return figures(ends_s, changes_s)

    # Ranks take turns in one process, and all of them decide alike.
    adaptive.decide = lambda seen, state: decisions[0](seen, state)
    world = SimulatedWorld(ranks, 1e-3, bandwidth, timeout_s=1e9)
    return list(world.run(train))


def in_virtual_time(cells: Sequence[Cell]) -> Iterator[Cell]:
    for cell in cells:
        yield {**cell, "ranks": simulated(cell["choice"], cell["size"], cell["allreduce_steps"])}


def row(cells: Sequence[Cell]) -> dict[str, Any]:
    names = [name for way in CHANGES.values() for name in (way, f"change_{way}")]
    worst = {n: [max(rank[n] for rank in cell["ranks"]) for cell in cells] for n in names}
    return {name: round(statistics.median(values), 2) for name, values in worst.items()} | {
        f"most_{way}": round(max(worst[way]), 2) for way in CHANGES.values()
    }


def main() -> None:
    parser = script.parser(__doc__, "adaptive_change.json")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ranks = VIRTUAL[0][0]
    settings = {"params": PARAMS, "step_s": STEP_S, "world_size": ranks}
    summary = []
    cells: list[Cell] = [
        {"choice": choice, "size": size, "allreduce_steps": steps}
        for size, steps in VIRTUAL
        for choice in CHOICES
    ]
    virtual = measured(cells, args.output, "virtual", in_virtual_time)
    for cell in virtual:
        where = {"time": "virtual", **{name: cell[name] for name in cells[0]}}
        summary.append(where | row([cell]))
    job = Job(f"{Path(__file__).resolve()}:measure", settings, ranks)
    cells = [{"choice": c, "round": r} for r in range(args.rounds) for c in CHOICES]
    real = job.run(cells, args.output)
    for choice in CHOICES:
        mine = [cell for cell in real if cell["choice"] == choice]
        where = {"time": "real", "choice": choice, "size": ranks, "rounds": len(mine)}
        summary.append(where | row(mine))
    for each in summary:
        print(each)
    about = {"epoch_steps": EPOCH, "hyperparameters": in_force(CHOICES, [ranks])}
    finish(job.provenance() | about | {"summary": summary}, args.output)


if __name__ == "__main__":
    main()
