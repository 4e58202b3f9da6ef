"""The timeline as one HTML page, which opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from lightning_dsgd.lab.drawing.picture import COLUMNS, LEGEND, Run, look, sentence
from lightning_dsgd.lab.drawing.spans import Span, Track
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
