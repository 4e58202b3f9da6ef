"""Does a period that grows as the learning rate falls cost `local_sgd` quality?

    python benchmarks/growing_period.py --output docs/results/choosing/growing_period.json

Ranks are simulated, as in `python -m benchmarks target`: digits, epochs of 30 steps, claimed
batches, all-reduce's own learning rate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks import script
from benchmarks.compare import target_cell
from benchmarks.compare.situations import SITUATIONS
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell, finish, measured
from lightning_dsgd.lab.results import provenance
from lightning_dsgd.lab.target_rows import to_target

SETTINGS: Final = {"task": "digits", "steps": 120, "epoch_steps": 30, "validation_s": 1.0}
BASELINE: Final = "allreduce"
GROWING: Final = "local_sgd:sync_period=2,local_sgd:sync_period=2:growing_period=true"


def measure(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Trains each cell; only `allreduce` gets as many batches for every rank."""
    for cell in cells:
        data = {} if cell["strategy"] == BASELINE else {"data": "claimed"}
        yield cell | target_cell.run(cell | data, SETTINGS)


def row(name: str, spec: str, cells: list[Cell]) -> dict[str, Any]:
    """Returns the figures of one strategy in one situation, beside all-reduce's."""
    here = [cell for cell in cells if cell["situation"] == name]
    mine, base = ([c for c in here if c["strategy"] == s] for s in (spec, BASELINE))
    gains = [a["value"][-1] - b["value"][-1] for a, b in zip(mine, base, strict=True)]
    means = {k: round(statistics.mean(c[k][-1] for c in mine), 2) for k in ("seconds", "mb_sent")}
    reached = {f"{s:g}": to_target(mine, base, s, higher_is_better=True) for s in (0.99, 1.0)}
    points = {"points": round(100 * statistics.mean(gains), 2)}
    if len(gains) > 1:
        points["error"] = round(100 * statistics.stdev(gains) / len(gains) ** 0.5, 2)
    return {"situation": name, "strategy": spec, **points, **means, "to_target": reached}


def main() -> None:
    parser = script.parser(__doc__, "growing_period.json")
    parser.add_argument("--strategies", default=GROWING)
    parser.add_argument("--situations", default="random,slow-rank,heavy-tail")
    parser.add_argument("--lr", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    known = in_force([BASELINE, *args.strategies.split(",")], [8])
    specs, names = [BASELINE, *args.strategies.split(",")], args.situations.split(",")
    cells = measured(
        [
            {"situation": name, "strategy": spec, "lr": args.lr, "seed": seed}
            for seed in range(args.seeds)
            for name in names
            for spec in specs
        ],
        args.output,
        json.dumps([SETTINGS, [asdict(SITUATIONS[name]) for name in names]]),
        measure,
    )
    rows = [row(name, spec, cells) for name in names for spec in specs]
    for each in rows:
        print({k: v for k, v in each.items() if k != "to_target"})
    settings = SETTINGS | {"lr": args.lr, "seeds": args.seeds}
    curves = [
        {k: c[k] for k in ("situation", "strategy", "seed", "seconds", "value")} for c in cells
    ]
    made = provenance() | {"settings": settings, "hyperparameters": known}
    finish(made | {"summary": rows, "curves": curves}, args.output)


if __name__ == "__main__":
    main()
