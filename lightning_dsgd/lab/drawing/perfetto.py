"""A run in the format of `chrome://tracing` and https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_dsgd.lab.drawing.picture import LEGEND, Run, look
from lightning_dsgd.lab.drawing.spans import NOBODY, Span


def trace_events(runs: Sequence[Run]) -> str:
    """Returns runs as processes and ranks as threads: what a rank did, and what went on beside."""
    events: list[dict[str, Any]] = []
    for process, run in enumerate(runs):
        events.append(_name("process_name", process, 0, run.name))
        for track in run.tracks:
            for place, (spans, name) in enumerate(
                ((track.spans, f"rank {track.rank}"), (track.beside, f"rank {track.rank}, beside"))
            ):
                thread = 2 * track.rank + place
                events.append(_name("thread_name", process, thread, name))
                events += _events(spans, process, thread)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _events(spans: Sequence[Span], process: int, thread: int) -> Iterator[dict[str, Any]]:
    for span in spans:
        arguments: dict[str, Any] = {"step": span.step} if span.step else {}
        if span.who != NOBODY:
            arguments["rank"] = span.who
        yield {
            "ph": "X",
            "name": LEGEND[look(span)],
            "cat": span.kind,
            "pid": process,
            "tid": thread,
            "ts": round(1e6 * span.begin_s),
            "dur": round(1e6 * (span.end_s - span.begin_s)),
            "args": arguments,
        }
