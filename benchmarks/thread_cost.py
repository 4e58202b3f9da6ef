"""What the scripts share that time calls of the thread that trains: claims, and units."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

KINDS: Final = ("sleep", "plain Python")
"""What a rank does between the calls; plain Python holds the interpreter all the time."""


def take(kind: str, seconds: float) -> None:
    """Takes time, in one of the `KINDS`."""
    end = time.monotonic() + seconds
    if kind == "sleep":
        time.sleep(seconds)
    while time.monotonic() < end:
        sum(range(1000))


def cells(name: str, num_rounds: int) -> list[dict[str, Any]]:
    """Returns all cells: in each round each of the `KINDS`, which stands under this name."""
    return [{name: kind, "round": number} for number in range(num_rounds) for kind in KINDS]


def figures(every: list[float]) -> dict[str, float]:
    """Returns the figures of a row, from the seconds of the calls of all ranks."""
    return {
        "median_ms": 1e3 * statistics.median(every),
        "p95_ms": 1e3 * sorted(every)[int(0.95 * len(every))],
        "mean_ms": 1e3 * statistics.mean(every),  # with what other processes take
    }


def in_words(row: dict[str, Any]) -> str:
    """Returns the figures of a row for the terminal."""
    return f"{row['median_ms']:6.3f} ms (95%: {row['p95_ms']:6.3f} ms)"
