"""How soon `adaptive` is as good as all-reduce, in situations that stay and in some that change.

    python benchmarks/adaptive.py --seeds 3 --output docs/results/adaptive/adaptive.json

Digits, 8 ranks of the simulated world, 120 steps in epochs of 30, as `python -m benchmarks target`
has it.  `adaptive` and all-reduce have all-reduce's best learning rate, 0.8.  The fixed choices
have what is best for each in benchmarks/pages/time_to_target.md, or all-reduce's, "at 0.8".  In
rows with "claimed" ranks claim their batches.

appears   nobody is late; from the middle of each rank's steps on, one rank takes twice as long
ceases    two of eight random ranks are late; from the middle on nobody is
link      a fast link; from the middle on an all-reduce takes 3 steps

end       virtual seconds until training ends, over all-reduce's, mean over the seeds
quality   to all of all-reduce's quality with the same seed, over all-reduce's time, geometric mean;
          a seed that does not get there counts as the time limit

A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import script
from benchmarks.compare import target_cell
from benchmarks.compare.situations import SITUATIONS, Situation
from benchmarks.compare.small_tasks import TASKS
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured
from lightning_dsgd.lab.results import provenance, typed
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.lab.target_rows import label, to_target
from lightning_dsgd.simulated import SimulatedWorld

STEPS, EPOCH, OWN = 120, 30, 0.8
SETTINGS = {"task": "digits", "steps": STEPS, "epoch_steps": EPOCH, "validation_s": 1.0}


@dataclass(frozen=True)
class Changing(Situation):
    """One situation for the first half of a rank's steps, and another one after it."""

    before: Situation | None = None
    after: Situation | None = None

    def at(self, is_late: bool) -> Situation:
        now = self.after if is_late else self.before
        assert now is not None
        return now

    def step_s(self, seed: int, step: int, rank: int) -> float:
        return self.at(step >= STEPS // 2).step_s(seed, step, rank)


ALIKE = Situation("nobody is late")
ALL: dict[str, Situation] = {
    "alike": ALIKE,
    **{name: SITUATIONS[name] for name in ("random", "slow-rank", "heavy-tail", "slow-link")},
    "appears": Changing("a slow rank appears", before=ALIKE, after=SITUATIONS["slow-rank"]),
    "ceases": Changing("stragglers cease", before=SITUATIONS["random"], after=ALIKE),
    "link": Changing("a link becomes slow", before=ALIKE, after=SITUATIONS["slow-link"]),
}
WIDE = "wagma:overlap=true:group_size=8"
ROUNDED = "allreduce:wire_dtype=int8:overlap=true"
ROWS: list[Cell] = [
    {"strategy": "allreduce", "lr": OWN},
    {"strategy": "adaptive", "lr": OWN},
    {"strategy": "adaptive", "lr": OWN, "data": "claimed"},
    {"strategy": ROUNDED, "lr": OWN},
    {"strategy": WIDE, "lr": 0.6, "data": "claimed"},
    {"strategy": WIDE, "lr": OWN, "data": "claimed"},
    {"strategy": "adpsgd", "lr": 0.4, "data": "claimed"},
]


def rows_in(situation: str) -> list[Cell]:
    """What is compared there: rounded sums where sums take long."""
    is_slow = ALL[situation].allreduce_s > 1 or situation == "link"
    return [row for row in ROWS if is_slow or row["strategy"] != ROUNDED]


class Training(target_cell.Training):
    """Trains in a situation that may change, and tells `adaptive` the steps of an epoch."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(TASKS["digits"], SITUATIONS["random"], cell, SETTINGS)
        self.situation = ALL[cell["situation"]]
        spec = cell["strategy"]
        spec += f":epoch_steps={EPOCH}" if spec == "adaptive" else ""
        self.algorithms = [make_algorithm(spec) for _ in range(self.situation.ranks)]

    def bytes_of(self, x: torch.Tensor) -> float:
        """What a message counts for: more, once the link is slow."""
        situation = self.situation
        if isinstance(situation, Changing):
            situation = situation.at(self.num_done >= STEPS * len(self.x) // 2)
        return x.nbytes * situation.allreduce_s / ALIKE.allreduce_s


def run(cell: Cell) -> Cell:
    training = Training(cell)
    link = target_cell.bandwidth_bytes_s(training.x[0], ALIKE)
    world = SimulatedWorld(
        8, target_cell.LATENCY_S, link, timeout_s=1e9, message_bytes=training.bytes_of
    )
    with on_one_core():
        rates = world.run(training.run)
    decisions = getattr(training.algorithms[0], "decisions", [])
    return training.curve | target_cell.figures(training, rates) | {"decisions": decisions}


def measure(cells: Sequence[Cell]) -> Iterator[Cell]:
    for cell in cells:
        yield {**cell, **run(cell)}


def name_of(cell: Cell) -> str:
    at = f" at {cell['lr']:g}" if cell["lr"] != OWN or cell["strategy"] == WIDE else ""
    return label(cell) + at


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    found = []
    for situation in ALL:
        here = [cell for cell in cells if cell["situation"] == situation]
        base = [cell for cell in here if cell["strategy"] == "allreduce"]
        if not base:
            continue
        for name in dict.fromkeys(map(name_of, here)):
            mine = [cell for cell in here if name_of(cell) == name]
            seeds = {cell["seed"]: cell["seconds"][-1] for cell in base}
            ends = [cell["seconds"][-1] / seeds[cell["seed"]] for cell in mine]
            row = {"situation": situation, "strategy": name, "seeds": len(mine)}
            row["end"] = round(statistics.mean(ends), 3)
            for key, share in (("99", 0.99), ("quality", 1.0)):
                there = to_target(mine, base, share, higher_is_better=True)
                row |= {key: round(there["share"], 3), f"reached_{key}": there["reached"]}
            found.append(row)
    return found


def main() -> None:
    parser = script.parser(__doc__, "adaptive.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--situations", default=",".join(ALL))
    parser.add_argument(
        "--rows", help="these alone, with ; between them, such as allreduce;adaptive"
    )
    args = parser.parse_args()
    cells = [
        {"situation": situation, **row, "seed": seed}
        for seed in range(args.seeds)
        for situation in args.situations.split(",")
        for row in rows_in(situation)
        if not args.rows or name_of(row) in args.rows.split(";")
    ]
    identity = json.dumps([SETTINGS, {name: asdict(each) for name, each in ALL.items()}])
    done = measured(cells, args.output, identity, measure)
    summary = rows(done)
    for row in summary:
        print(row)
    said = {
        f"{c['situation']}, {name_of(c)}, seed {c['seed']}": c["decisions"]
        for c in done
        if c["strategy"] == "adaptive"
    }
    report = provenance(typed("python benchmarks/adaptive.py", None)) | {
        "settings": SETTINGS | {"lr": OWN, "seeds": args.seeds},
        "hyperparameters": in_force([row["strategy"] for row in ROWS], [8]),
        "summary": summary,
        "decisions": said,
    }
    finish(report, args.output)


if __name__ == "__main__":
    main()
