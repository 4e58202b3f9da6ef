"""A storm, as `lightning-dsgd chaos` writes it: who takes part, is alive, joins, or is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.drawing.picture import Run
from lightning_dsgd.lab.drawing.spans import Span, Track


def is_storm(path: Path) -> bool:
    """Returns whether a path is a file, where other runs have folders."""
    return path.is_file()


def load(path: Path) -> Run:
    """Loads the storm that was written to this file; its tracks are places, not ranks."""
    try:
        told = json.loads(path.read_text())
        is_one = told["chaos"] == 1
    except (ValueError, KeyError, TypeError):
        is_one = False
    if not is_one:
        raise ValueError(
            f"a run must be a folder, or a file of `lightning-dsgd chaos`, got {str(path)!r}"
        )
    ends = [process["end_s"] for process in told["processes"] if process["end"] == "finished"]
    end_s = max(ends or [process["end_s"] for process in told["processes"]])
    tracks = [Track(place, list(_spans(told, place, end_s))) for place in range(told["ranks"])]
    form = "real processes" if told["real"] else "simulated"
    note = "all held" if not told["failed"] else "did not hold: " + "; ".join(told["failed"])
    marks = tuple((event["at_s"], event["what"]) for event in told["events"])
    name = f"{told['strategy']}, {told['ranks']} ranks, seed {told['seed']}, {form}"
    return Run(name, tracks, note, marks, is_storm=True)


def _spans(told: dict[str, Any], place: int, end_s: float) -> Iterator[Span]:
    """Yields what was in a place, without a gap: who is the rank, and step the view."""
    at_s, rank, view, is_over = 0.0, place, 0, False
    for process in sorted(told["processes"], key=lambda process: process["begin_s"]):
        if process["place"] != place or process["begin_s"] >= end_s:
            continue
        if process["begin_s"] > at_s:
            yield Span("lost", at_s, process["begin_s"], rank, view)
        rank, at_s = process["rank"], process["begin_s"]
        state = "alive"
        last = min(process["end_s"], end_s), "", 0
        for begin_s, following, number in [*process["states"], last]:
            if begin_s > at_s:
                yield Span(state, at_s, begin_s, rank, view)
            at_s = max(at_s, begin_s)
            state, view = following, number if following else view
        is_over = process["end"] == "finished"
    if at_s < end_s and not is_over:
        yield Span("lost", at_s, end_s, rank, view)
