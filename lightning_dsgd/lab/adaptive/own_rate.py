"""Which settings were as good as all-reduce with its own learning rate: `own_rate.json`.

The file holds, of results of `python -m benchmarks target`, the rows with the learning rate that is
best for all-reduce.  The user's rate was most likely tuned so, and `adaptive` leaves it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, Final

from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import BASELINE
from lightning_dsgd.lab.target_rows import summarize

FILE: Final = "own_rate.json"
SOURCES: Final = (
    "choosing/target_epochs.json",
    "wagma/wide_groups.json",
    "choosing/target_epochs_slow_link.json",
)
"""The results, in docs/results, that the file is made of; what comes first counts."""
WIDE: Final = "wagma:overlap=true:group_size=8"
"""The row that stands for groups of all ranks, or of 8."""
_LEAST: Final = 0.9
"""The least share of the seeds that must come to 99% of all-reduce's quality."""


def distilled(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns what is kept of the results: by situation and row, all relative to all-reduce."""
    kept: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        rows = result["summary"]
        if result["settings"]["baseline"] != BASELINE:
            better = result["higher_is_better"]
            rows = summarize(result["curves"], baseline=BASELINE, higher_is_better=better)
        for row in rows:
            alike = row.get("at_baseline_lr")
            if alike is None:
                continue
            most, whole = (alike["to_target"][share] for share in ("0.99", "1"))
            kept.setdefault(row["situation"], {}).setdefault(
                row["strategy"],
                {
                    "points": round(100 * alike["difference"], 2),
                    "reached": most["reached"],
                    "seeds": row["seeds"],
                    "time": whole["share"],
                },
            )
    return kept


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return table


def cost(label: str, situation: str) -> Cost | None:
    """Returns what a row cost there; None where it was not measured.

    `reached` counts the seeds at 99% of the quality, `time` is until all of it.
    """
    found = _table().get(situation, {}).get(label)
    return None if found is None else Cost(**found)


def is_as_good(cost: Cost | None) -> bool:
    """Whether nine of ten seeds came to 99%, and the mean to all of it no later."""
    return cost is not None and cost.reached >= _LEAST * cost.seeds and cost.time <= 1
