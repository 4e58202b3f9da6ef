"""How long `balanced` takes in the situations that `adaptive` was measured in: `adaptive.py`.

    python -m benchmarks.balanced_unknown

Its protocol is played with the same step times, 8 ranks, 120 steps, 4 micro-batches a batch.  Each
of its steps is DDP's, so training ends at all of all-reduce's quality: `share`, the time over
all-reduce's, mean over the seeds, stands beside `adaptive`'s time to all of that quality.  Its sums
are fp32; `rounded` has sums that take a quarter as long.  Where the link changes, all sums take the
mean of both halves.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.adaptive import ALL, STEPS, Changing, Situation
from lightning_dsgd.lab.diagnose.sharing import Work, shared_s
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, typed, write_result

RANKS, UNITS, SEEDS = 8, 4, 3
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def sum_s(situation: Situation, step: int) -> float:
    """What all-reduce takes in a step."""
    if isinstance(situation, Changing):
        situation = situation.at(step >= STEPS // 2)
    return situation.allreduce_s


def share(situation: Situation, seed: int, sums: float = 1.0) -> float:
    """What `balanced` takes, over all-reduce; its sums take this share of all-reduce's."""
    of_rank = [[situation.step_s(seed, s, r) for s in range(STEPS)] for r in range(RANKS)]
    each_s = [sum_s(situation, step) for step in range(STEPS)]
    none = [[0.0] * STEPS] * RANKS
    units = [[seconds / UNITS for seconds in row] for row in of_rank]
    work = Work(none, units, none, UNITS, sum_s=sums * statistics.mean(each_s))
    return shared_s(work) / sum(max(own) + s for *own, s in zip(*of_rank, each_s, strict=True))


def rows() -> list[dict[str, Any]]:
    """What each situation gave, beside what was recorded of `adaptive`."""
    before = json.loads((RESULTS / "adaptive" / "adaptive.json").read_text())["summary"]
    found = []
    for name, situation in ALL.items():
        row: dict[str, Any] = {"situation": name}
        for key, sums in (("share", 1.0), ("rounded", 0.25)):
            shares = [share(situation, seed, sums) for seed in range(SEEDS)]
            row[key] = round(statistics.mean(shares), 3)
        for each in before:
            if each["situation"] == name and each["strategy"].startswith("adaptive"):
                row[each["strategy"]] = {k: each[k] for k in ("end", "quality", "reached_quality")}
        print(row, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "balanced" / "unknown.json")
    args = parser.parse_args()
    told = {"hyperparameters": in_force(["balanced"], [RANKS]), "seeds": SEEDS, "steps": STEPS}
    command = typed("python -m benchmarks.balanced_unknown", None)
    write_result({**provenance(command), **told, "rows": rows()}, args.output)


if __name__ == "__main__":
    main()
