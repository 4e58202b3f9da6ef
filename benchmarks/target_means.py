"""Time to all-reduce's quality, of the mean over all seeds.

    python benchmarks/target_means.py docs/results/choosing/target_real.json \
        docs/results/choosing/target_simulated.json

`python -m benchmarks target` gives the median over the seeds of their own seconds, which hang on a
few right answers of single seeds.  Here the qualities are averaged first, at each moment: the
seconds are those until their mean is 99% of what all-reduce ends with, in the mean too.

The files are results of `benchmarks target` where a higher quality is better.  Of a second one, of
the same training, the same figures and how much of them the first one's are.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from lightning_dsgd.lab.target_rows import BASELINE

SHARE = 0.99
TICK_S = 0.1


class Figures(NamedTuple):
    """Of one strategy in one situation; `share` is of all-reduce's seconds."""

    steps_per_s: float
    seconds: float
    share: float


def value(curve: dict[str, Any], seconds: float) -> float:
    """Of the curve, straight from one point to the next."""
    place = bisect_right(curve["seconds"], seconds)
    if place in (0, len(curve["seconds"])):
        return float(curve["value"][min(place, len(curve["value"]) - 1)])
    (t0, t1), (v0, v1) = (curve[key][place - 1 : place + 1] for key in ("seconds", "value"))
    return float(v0 + (v1 - v0) * (seconds - t0) / (t1 - t0))


def reached(curves: list[dict[str, Any]], target: float) -> float:
    """When the mean of the curves is there; infinite where it never is."""
    last = max(curve["seconds"][-1] for curve in curves)
    for tick in range(math.ceil(last / TICK_S) + 1):
        if statistics.mean(value(curve, tick * TICK_S) for curve in curves) >= target:
            return tick * TICK_S
    return math.inf


def figures(result: dict[str, Any]) -> dict[tuple[str, str], Figures]:
    """By situation and strategy."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve in result["curves"]:
        runs.setdefault((curve["situation"], curve["strategy"]), []).append(curve)
    found = {}
    for (situation, strategy), mine in runs.items():
        base = runs[situation, BASELINE]
        target = SHARE * statistics.mean(curve["value"][-1] for curve in base)
        seconds = reached(mine, target)
        rate = statistics.mean(curve["steps_per_s"] for curve in mine)
        found[situation, strategy] = Figures(rate, seconds, seconds / reached(base, target))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.files]
    if len(results) > 2 or not all(result["higher_is_better"] for result in results):
        parser.error("needs one result or two, of a task where a higher quality is better")
    first, *second = map(figures, results)
    if second and not first.keys() <= second[0].keys():
        lacking = ", ".join(" ".join(key) for key in first.keys() - second[0].keys())
        parser.error(f"the second result must have all that the first one has, it lacks {lacking}")
    columns = ["situation", "strategy", "steps/s (mean of ranks)", "99%"]
    if second:
        columns += [
            "steps/s there",
            "99% there",
            "steps/s, ratio",
            "seconds, ratio",
            "share, ratio",
        ]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for (situation, strategy), mine in first.items():
        texts = [situation, f"`{strategy}`", *cells(mine)]
        if second:
            theirs = second[0][situation, strategy]
            texts += cells(theirs)
            texts += [f"{a / b:.2f}" for a, b in zip(mine, theirs, strict=True)]
        print("| " + " | ".join(texts) + " |")


def cells(of: Figures) -> list[str]:
    """As in the tables of `benchmarks target`."""
    there = f"{of.seconds:.0f} s ({of.share:.2f})" if math.isfinite(of.seconds) else "never"
    return [f"{of.steps_per_s:.2f}", there]


if __name__ == "__main__":
    main()
