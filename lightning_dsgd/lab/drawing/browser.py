"""Runs for a browser.

    html            one page, which opens without a network
    trace_events    a file of events, for https://ui.perfetto.dev or `chrome://tracing`

Both hold the same spans; `picture` says what they are called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

from lightning_dsgd.lab.drawing.picture import COLUMNS, LEGEND, Run, look, sentence
from lightning_dsgd.lab.drawing.spans import NOBODY, Span, Track
from lightning_dsgd.lab.drawing.style import SPANS

_LOOKS = list(SPANS)


def html(runs: Sequence[Run]) -> str:
    """Returns the page: `page.html`, with the runs as data in it."""
    data = {
        "looks": [{"key": k, "colours": SPANS[k], "words": LEGEND[k]} for k in _LOOKS],
        "runs": [_run(run) for run in runs],
    }
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    title = " | ".join(run.name for run in runs)
    # A name in the data must neither end the script nor begin a comment in it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = {"TITLE": escape(title), "/*DATA*/null": text}
    return re.sub(r"TITLE|/\*DATA\*/null", lambda place: filled[place[0]], page)


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "sentence": sentence(run),
        "us": round(1e6 * run.seconds),
        "tracks": [_track(track) for track in run.tracks],
    }


def _track(track: Track) -> dict[str, Any]:
    return {
        "rank": track.rank,
        "shares": [round(track.share(kind), 4) for kind in COLUMNS],
        "spans": _numbers(track.spans),
        "beside": _numbers(sorted(track.beside, key=lambda span: span.begin_s)),
    }


def _numbers(spans: Sequence[Span]) -> list[int]:
    """Returns five numbers a span: look, begin and length in microseconds, who, step."""
    flat: list[int] = []
    for span in spans:
        begin = round(1e6 * span.begin_s)
        length = round(1e6 * span.end_s) - begin
        flat += (_LOOKS.index(look(span)), begin, length, span.who, span.step)
    return flat


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
