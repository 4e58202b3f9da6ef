"""What a strategy has cost in accuracy where that was measured: `accuracy.json`.

The file holds the results of `python -m benchmarks target` in epochs for one small task, in five
situations: see benchmarks/pages/time_to_target.md.  Which of them is most like the run in question
follows from its step times and from what an all-reduce takes.  It is a direction, not a promise:
another model is another task.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from lightning_dsgd.lab.advise.candidates import BASELINE
from lightning_dsgd.lab.simulate.recorded import Recorded
from lightning_dsgd.lab.target_rows import summarize

FILE: Final = "accuracy.json"
_SLOW_LINK: Final = 1.0
"""A link is slow if an all-reduce takes as long as so many steps, or longer."""
_HEAVY_TAIL: Final = 3.0
"""The tail is heavy if the longest of 200 steps takes so many times the median."""


@dataclass(frozen=True)
class Cost:
    """Holds what one strategy cost in one situation.

    Args:
        points: points of accuracy beside all-reduce's; negative where the strategy was worse
        reached: the number of seeds that came to 99% of all-reduce's accuracy
        seeds: the number of all seeds
        time: the time until then, over all-reduce's, as `benchmarks target` has it: a seed that did
            not come there counts as the time limit
    """

    points: float
    reached: int
    seeds: int
    time: float

    @property
    def is_as_good(self) -> bool:
        """Whether most seeds came to 99% of all-reduce's accuracy, and no later than all-reduce."""
        return 2 * self.reached > self.seeds and self.time <= 1


def distilled(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what is kept of `benchmarks target`'s results: all relative to `BASELINE`.

    Where another strategy is the baseline of a result, figures are taken anew from its curves.
    """
    situations: dict[str, str] = {}
    costs: dict[str, dict[str, Any]] = {}
    for result in results:
        for name, situation in result["settings"]["situations"].items():
            situations[name] = situation["text"]
        rows = result["summary"]
        if result["settings"]["baseline"] != BASELINE:
            better = result["higher_is_better"]
            rows = summarize(result["curves"], baseline=BASELINE, higher_is_better=better)
        for row in rows:
            soonest = row["to_target"]["0.99"]
            costs.setdefault(row["situation"], {})[row["strategy"]] = {
                "points": round(100 * row["difference"], 2),
                "reached": soonest["reached"],
                "seeds": row["seeds"],
                "time": soonest["share"],
            }
    (epoch_steps,) = {result["settings"]["epoch_steps"] for result in results}
    return {"epoch_steps": epoch_steps, "situations": situations, "costs": costs}


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    )
    return table


def cost(label: str, situation: str) -> Cost | None:
    """Returns what this row cost in a situation; None where it was not measured."""
    found = _table()["costs"][situation].get(label)
    return None if found is None else Cost(**found)


def in_words(situation: str) -> str:
    """Says where accuracy was measured, and what happens in this situation."""
    seeds = _table()["costs"][situation][BASELINE]["seeds"]
    return (
        f"on a small task in epochs of {_table()['epoch_steps']} steps, with {seeds} seeds, where "
        f"{_table()['situations'][situation]}"
    )


def most_like(recorded: Recorded, allreduce_s: float, num_ranks: int) -> str:
    """Returns the measured situation that this run is most like.

    Args:
        recorded: the step times of the run
        allreduce_s: what a step of all-reduce takes longer than the slowest rank's computation
        num_ranks: how many ranks there are to be
    """
    every = sorted(s for of_rank in recorded.seconds for s in of_rank)
    if allreduce_s > _SLOW_LINK * recorded.mean_s:
        return "slow-link"
    if recorded.slow_ranks:
        return "slow-rank"
    if every[int(0.995 * (len(every) - 1))] > _HEAVY_TAIL * statistics.median(every):
        return "heavy-tail"
    return "random-16" if num_ranks >= 12 and "random-16" in _table()["costs"] else "random"
