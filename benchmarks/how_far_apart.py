"""Does it pay if gossip averages over all ranks as often as rate or distance ask for?

    python benchmarks/how_far_apart.py --task digits --output docs/results/wagma/apart_digits.json

Ranks are simulated as in `python -m benchmarks target`: 8 ranks, epochs of 30 steps, and claimed
batches for all but all-reduce.  On digits each strategy, all-reduce too, has the rate that ends
best with seeds that are not reported; elsewhere all have one rate.  All ranks know here at once,
and for nothing, what one of them has decided, and how far apart all are: these are bounds of what a
strategy could gain.

every=N         `NAME_clocked` averages over all ranks every N steps of the fastest; a rank that is
                behind takes part after the step in hand
follows=rate      at first every N steps, then N (lr_max / (2 lr))^2, at most 32 N
follows=distance  once the ranks' root mean square distance from their mean is more than `most`
                times the norm of a step
wide=true       in `wagma`, nobody waits in such an average: it is a group of all ranks
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from benchmarks import script
from benchmarks.compare import target_cell
from benchmarks.compare.situations import SITUATIONS, Situation
from benchmarks.compare.small_tasks import TASKS
from benchmarks.compare.target_cell import Training
from lightning_dsgd.agreement import average, num_active
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.wagma import WAGMA, Groups
from lightning_dsgd.hyperparameters import one_of, setting
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured
from lightning_dsgd.lab.results import provenance
from lightning_dsgd.lab.target_rows import best_lr, shares, to_target

WAYS: Final = {
    "equal": Situation("a step takes 0.97 to 1.03 s"),
    "slow-rank": SITUATIONS["slow-rank"],
    "random": SITUATIONS["random"],
}
BASELINE: Final = "allreduce"
MOST: Final = 32
"""How many times the first period a period may be."""


@dataclass(frozen=True)
class Trial:
    """What is tried on a task: for how long, at which rates, with how many seeds."""

    steps: int
    lrs: tuple[float, ...]
    seeds: int
    tuning_seeds: tuple[int, ...] = ()
    options: str = ""
    """What all strategies but all-reduce have, too."""


TRIALS: Final = {
    "digits": Trial(120, (0.4, 0.8), 5, (1000, 1001)),
    "resnet": Trial(90, (0.4,), 3),
    "language": Trial(180, (0.01,), 3, (), ":scale_steps=true"),
    "translation": Trial(90, (0.02,), 3, (), ":scale_steps=true"),
}
SPECS: Final = [
    BASELINE,
    "local_sgd:sync_period=2:growing_period=true",
    "wagma:overlap=true",
    "wagma_clocked:overlap=true:every=4:follows=rate",
    "wagma_clocked:overlap=true:most=0.75:follows=distance",
    "wagma_clocked:overlap=true:every=1:follows=rate:wide=true",
]
MORE: Final = [
    "wagma",
    "wagma:overlap=true:group_size=8",
    "wagma_clocked:overlap=true:every=2:follows=rate",
    "wagma_clocked:overlap=true:every=8",
    *("popsgd", "popsgd_clocked:every=4:follows=rate"),
    *("hpsgd", "hpsgd_clocked:every=4:follows=rate"),
]


class Rounds:
    """Decides once for all ranks which rounds are averages over all of them."""

    def __init__(self, members: list[Clocked]) -> None:
        self.members = members
        self.decided: dict[int, bool] = {}
        self.num_calls = 0
        self.begin, self.highest_lr = 0, 0.0
        self.distances: list[float] = []

    def decide(self, version: int, asks: Clocked) -> bool:
        """Returns whether this round is such an average."""
        if version not in self.decided:
            self.decided[version] = is_due = self._is_due(version + 1, asks)
            self.num_calls += is_due
        return self.decided[version]

    def _is_due(self, step: int, asks: Clocked) -> bool:
        if asks.follows == "distance":
            self.distances.append(self.distance())
            return self.distances[-1] > asks.most
        lr, growth = asks.lr(), 1.0
        self.highest_lr = max(self.highest_lr, lr)
        if asks.follows == "rate":
            growth = (0.5 * self.highest_lr / lr) ** 2 if lr else MOST
        is_due = step - self.begin >= int(asks.every * min(max(1.0, growth), MOST))
        self.begin = step if is_due else self.begin
        return is_due

    def distance(self) -> float:
        """Returns how far ranks are from their mean, in steps."""
        mean = sum(member.weights for member in self.members) / len(self.members)
        squares = [float(((member.weights - mean) ** 2).sum()) for member in self.members]
        step = statistics.mean(member.step_norm for member in self.members)
        return statistics.mean(squares) ** 0.5 / step if step else 0.0


@dataclass
class Clocked(Algorithm):
    """What a strategy knows that averages over all ranks when a clock says so."""

    every: int = setting(default=1, doc="steps from one such average to the next, at first")
    follows: str = one_of("none", "rate", "distance", default="none", doc="what the period follows")
    most: float = setting(default=1.0, doc="how far apart ranks may be, in steps")
    rounds: ClassVar[Rounds]

    def start(self, net: Any, x: Tensor, *conditions: Any) -> None:
        self.weights, self.step_norm = x, 0.0
        super().start(net, x, *conditions)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        super().before_update(x, g)
        self.before = x.clone()

    def after_update(self, x: Tensor) -> None:
        norm = float((x - self.before).norm())
        self.step_norm = norm if not self.step_norm else 0.8 * self.step_norm + 0.2 * norm
        super().after_update(x)

    def lr(self) -> float:
        optimizer: Any = self.conditions.optimizer
        return float(optimizer.param_groups[0]["lr"])


@dataclass
class Calling(Clocked):
    """Takes part in an average after the step in hand, or while it stands still."""

    wide: ClassVar[bool] = False

    def start(self, net: Any, x: Tensor, *conditions: Any) -> None:
        super().start(net, x, *conditions)
        self.together = net.sub("together")
        self.num_own = self.num_taken = 0

    def after_update(self, x: Tensor) -> None:
        super().after_update(x)
        if not self.wide:
            self.rounds.decide(self.num_own, self)
            self.num_own += 1
            if self.rounds.num_calls > self.num_taken:
                self.take_part(x, active=True)

    def settle(self, x: Tensor) -> None:
        while not self.wide and self.take_part(x, active=False):
            pass
        super().settle(x)

    def take_part(self, x: Tensor, *, active: bool) -> bool:
        if not num_active(self.together, active=active):
            return False
        average(self.together, x)
        self.num_taken += 1
        return True


@dataclass(frozen=True)
class ClockedGroups(Groups):
    """The groups of WAGMA-SGD, and all ranks where the clock says so."""

    owner: Any

    def of(self, version: int) -> Sequence[int]:
        if self.owner.wide and self.owner.rounds.decide(version, self.owner):
            return range(self.world_size)
        return super().of(version)

    def is_global(self, version: int) -> bool:
        return False


@dataclass
class ClockedWAGMA(Calling, WAGMA):
    """WAGMA-SGD with such averages, beside its groups and in place of its global averages."""

    name: ClassVar[str] = "wagma_clocked"
    wide: bool = setting(default=False, doc="whether nobody waits")  # type: ignore[misc]

    def make_groups(self, net: Any) -> Groups:
        return ClockedGroups(**asdict(super().make_groups(net)), owner=self)


@dataclass
class ClockedPopSGD(Calling, PopSGD):
    """PopSGD with such averages."""

    name: ClassVar[str] = "popsgd_clocked"


@dataclass
class ClockedHPSGD(Calling, HPSGD):
    """HPSGD with such averages."""

    name: ClassVar[str] = "hpsgd_clocked"


@dataclass
class ClockedSGP(Calling, SGP):
    """SGP with such averages, of the biased weights and of their sum.

    A rank waits for its peers' pushes, and so for the same steps of all: it has the same batches as
    all others, and takes part at the same one of its own steps.
    """

    name: ClassVar[str] = "sgp_clocked"

    def after_update(self, x: Tensor) -> None:
        super(Calling, self).after_update(x)
        if self.rounds.decide(self.num_own, self):
            self.take_part(x, active=True)
        self.num_own += 1

    def take_part(self, x: Tensor, *, active: bool) -> bool:
        x *= self.w
        takes_part = super().take_part(x, active=active)
        if takes_part:
            share = torch.tensor([self.w], dtype=torch.float64)
            average(self.together, share)
            self.w = float(share)
        x /= self.w
        return takes_part


TRIED: Final = {c.name: c for c in (ClockedWAGMA, ClockedPopSGD, ClockedHPSGD, ClockedSGP)}
"""What the package does not have."""
ALGORITHMS.update(TRIED)


def train(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Trains each cell; `allreduce` and `sgp` get as many batches for every rank."""
    for cell in cells:
        situation, trial = WAYS[cell["situation"]], TRIALS[cell["task"]]
        settings = {"steps": trial.steps, "epoch_steps": 30, "validation_s": 1.0}
        if cell["strategy"] != BASELINE:
            data = "equal" if cell["strategy"].startswith("sgp") else "claimed"
            cell = cell | {"data": data, "strategy": cell["strategy"] + trial.options}
        training = Training(TASKS[cell["task"]], situation, cell, settings)
        members = [a for a in training.algorithms if isinstance(a, Clocked)]
        rounds = Rounds(members)
        for member in members:
            member.rounds = rounds  # type: ignore[misc]
        target_cell.train(training)
        far = [round(each, 2) for each in rounds.distances]
        yield training.curve | {"averages": rounds.num_calls, "distances": far}


def row(name: str, spec: str, mine: list[Cell], base: list[Cell], *, up: bool) -> dict[str, Any]:
    """Returns the figures of one strategy in one situation, beside all-reduce's."""
    differences = [
        100 * ((a["value"][-1] - b["value"][-1]) / (1 if up else b["value"][-1]))
        for a, b in zip(mine, base, strict=True)
    ]
    ends = [[float(cell["seconds"][-1]) for cell in cells] for cells in (mine, base)]
    return {
        "situation": name,
        "strategy": spec,
        "lr": mine[0]["lr"],
        "value": round(statistics.mean(cell["value"][-1] for cell in mine), 4),
        "points" if up else "percent": round(statistics.mean(differences), 2),
        "error": round(statistics.stdev(differences) / len(differences) ** 0.5, 2)
        if differences[1:]
        else None,
        "end": {"seconds": round(statistics.mean(ends[0]), 1), **shares(*ends)},
        "mb_sent": round(statistics.mean(cell["mb_sent"][-1] for cell in mine), 2),
        "averages": round(statistics.mean(cell["averages"] for cell in mine), 1),
        "to_99": to_target(mine, base, 0.99, higher_is_better=up),
    }


def main() -> None:
    parser = script.parser(__doc__, "how_far_apart.json")
    parser.add_argument("--task", choices=TRIALS, default="digits")
    parser.add_argument("--strategies", nargs="+", default=SPECS)
    parser.add_argument(
        "--lrs",
        type=float,
        nargs="+",
        help="rates; two seeds that are not reported choose one",
    )
    parser.add_argument("--more", action="store_true", help="all that was tried on digits")
    parser.add_argument("--seeds", type=int, help="how many are reported, if not all of the task")
    args = parser.parse_args()
    trial, up = TRIALS[args.task], TASKS[args.task].higher_is_better
    if args.lrs:
        trial = replace(trial, lrs=tuple(args.lrs), tuning_seeds=(1000, 1001))
    specs = args.strategies + MORE * args.more
    identity = json.dumps([asdict(trial), [asdict(way) for way in WAYS.values()]])

    def trained(seeds: Sequence[int], lrs: dict[tuple[str, str], Sequence[float]]) -> list[Cell]:
        cells = [
            {"task": args.task, "situation": name, "strategy": spec, "lr": lr, "seed": seed}
            for seed in seeds
            for name in WAYS
            for spec in specs
            for lr in lrs[name, spec]
        ]
        found = measured(cells, args.output, identity, train)
        return [cell | each for cell, each in zip(cells, found, strict=True)]

    places = [(name, spec) for name in WAYS for spec in specs]
    tuned = trained(trial.tuning_seeds, dict.fromkeys(places, trial.lrs))
    of = {p: [c for c in tuned if (c["situation"], c["strategy"]) == p] for p in places}
    chosen = {
        p: [best_lr(cells, higher_is_better=up)] if cells else trial.lrs for p, cells in of.items()
    }
    cells = trained(range(args.seeds or trial.seeds), chosen)
    of = {p: [c for c in cells if (c["situation"], c["strategy"]) == p] for p in places}
    rows = [row(n, s, of[n, s], of[n, BASELINE], up=up) for n, s in places]
    for each in rows:
        print({k: v for k, v in each.items() if k not in ("to_99", "end")}, each["end"]["seconds"])
    report = provenance() | {"settings": asdict(trial), "higher_is_better": up}
    known = [spec for spec in specs if spec.partition(":")[0] not in TRIED]
    report["hyperparameters"] = in_force(known, [8])
    report["finals"] = [
        {k: c[k] for k in ("situation", "strategy", "lr", "seed")} | {"value": c["value"][-1]}
        for c in tuned
    ]
    kept = ("situation", "strategy", "lr", "seed", "seconds", "value")
    curves = [{k: c[k] for k in kept} | {"distances": c["distances"][::10]} for c in cells]
    finish(report | {"summary": rows, "curves": curves}, args.output)


if __name__ == "__main__":
    main()
