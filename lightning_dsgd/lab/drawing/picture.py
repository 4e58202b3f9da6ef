"""One or several runs, ready to be drawn, and a still picture of them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Final

from lightning_dsgd.lab.drawing.spans import NOBODY, Span, Track, tracks, union
from lightning_dsgd.lab.timeline.trace import Trace, missing_ranks, read_folder

# Okabe and Ito chose these colours, which the colour-blind tell apart; computation is pale, as
# computing is what a rank should do.
COLOURS: Final = {
    "compute": "#a6cee9",
    "late wait": "#d55e00",
    "wait": "#f0b04c",
    "exchange": "#0072b2",
    "fetch": "#f0e442",
    "evaluate": "#b3b3b3",
    "serve": "#009e73",
    "late": "#8b1a6b",
}
LEGEND: Final = {
    "compute": "computes",
    "late wait": "waits for a late rank",
    "wait": "waits for messages on their way",
    "exchange": "sends, adds, selects",
    "fetch": "between batches (data, loggers)",
    "evaluate": "validates",
    "serve": "serves others, while it computes",
    "late": "is late: others wait for it",
}
_WIDTH, _ROW, _GAP, _LEFT, _HEAD = 960, 18, 4, 64, 34


@dataclass(frozen=True)
class Run:
    """Holds a run, ready to be drawn; its time begins at 0 s.

    Args:
        name: the title above its tracks
        tracks: one for each rank
        note: what is not drawn, for the reader of the picture
        decisions: what `adaptive` has decided, and when
    """

    name: str
    tracks: list[Track]
    note: str = ""
    decisions: tuple[tuple[float, str], ...] = ()

    @property
    def seconds(self) -> float:
        """How long the run lasts."""
        return max((track.spans[-1].end_s for track in self.tracks if track.spans), default=0.0)


def load(
    folder: Path,
    steps: tuple[int, int] | None = None,
    seconds: tuple[float, float] | None = None,
    most_spans: int | None = None,
) -> Run:
    """Loads the run that was recorded in this folder.

    Args:
        folder: a folder of StepTrace, or of `lightning-dsgd simulate --trace`
        steps: the first and the last step to draw; by default all
        seconds: the part of these steps' time to draw
        most_spans: the number of spans that fit; later steps are left out, and the note says so
    """
    traces = read_folder(folder)
    numbers = [step.number for trace in traces for step in trace.steps]
    if not numbers:
        raise ValueError(f"a run must have made a step, got none in {folder}; train for longer")
    first, last = (min(numbers), max(numbers)) if steps is None else steps
    notes = []
    fits = last if most_spans is None else _last_that_fits(traces, first, last, most_spans)
    if fits < min(last, max(numbers)):
        notes.append(f"steps {first} to {fits} of {max(numbers)}")
    drawn = tracks(traces, first, fits)
    if not any(track.spans for track in drawn):
        raise ValueError(
            f"--steps must be among those recorded, {min(numbers)} to {max(numbers)}, "
            f"got {first}:{last}"
        )
    begin_s = min(track.spans[0].begin_s for track in drawn if track.spans)
    drawn = _moved(drawn, -begin_s)
    if seconds is not None:
        drawn = _moved(_cut(drawn, *seconds), -seconds[0])
        begin_s += seconds[0]
    decisions = tuple((at_s - begin_s, text) for at_s, text in traces[0].decisions)
    notes += [f"at {at_s:.1f} s {text.split(': ')[1]}" for at_s, text in decisions]
    absent = missing_ranks(traces)
    if absent:
        notes.append(f"no files of ranks {', '.join(map(str, absent))}")
    if any(trace.about.get("waits") == "not seen" for trace in traces):
        notes.append("waits were not recorded")
    return Run(_name(traces[0]), drawn, ", ".join(notes), decisions)


def _name(trace: Trace) -> str:
    simulated = ", simulated" if trace.about.get("simulated") else ""
    ranks = f"{trace.world_size} ranks" if trace.world_size > 1 else "1 rank"
    return f"{trace.about.get('strategy', 'training')}, {ranks}{simulated}"


def _last_that_fits(traces: Sequence[Trace], first: int, last: int, most: int) -> int:
    """Returns the last step with which no more than `most` spans are drawn."""
    counts: dict[int, int] = {}
    for trace in traces:
        for step in trace.steps:
            if first <= step.number <= last:
                mine = 4 + 3 * len(step.wait) + 2 * len(step.exchange) + len(step.serve)
                counts[step.number] = counts.get(step.number, 0) + mine
    total, fits = 0, first
    for number in sorted(counts):
        total += counts[number]
        if total > most and number > first:
            return fits
        fits = number
    return last


def _moved(drawn: Sequence[Track], by_s: float) -> list[Track]:
    def move(spans: Sequence[Span]) -> list[Span]:
        return [replace(s, begin_s=s.begin_s + by_s, end_s=s.end_s + by_s) for s in spans]

    return [Track(track.rank, move(track.spans), move(track.beside)) for track in drawn]


def _cut(drawn: Sequence[Track], begin_s: float, end_s: float) -> list[Track]:
    def cut(spans: Sequence[Span]) -> list[Span]:
        inside = (s for s in spans if s.begin_s < end_s and s.end_s > begin_s)
        return [
            replace(s, begin_s=max(s.begin_s, begin_s), end_s=min(s.end_s, end_s)) for s in inside
        ]

    return [Track(track.rank, cut(track.spans), cut(track.beside)) for track in drawn]


def look(span: Span) -> str:
    """Returns the key of a span's colour."""
    return "late wait" if span.kind == "wait" and span.who != NOBODY else span.kind


def shares(run: Run) -> dict[str, float]:
    """Returns the mean over the ranks of what they did, as shares of the time that is drawn."""
    kinds = ("compute", "wait", "exchange", "fetch", "evaluate", "late")
    return {
        kind: sum(track.share(kind) for track in run.tracks) / len(run.tracks) for kind in kinds
    }


def steps_per_s(run: Run) -> float:
    """Returns the ranks' mean rate of steps, whole and cut ones."""
    made = sum(len({s.step for s in track.spans}) for track in run.tracks) / len(run.tracks)
    return made / run.seconds if run.seconds else 0.0


def sentence(run: Run) -> str:
    """Returns one line that says what the picture shows."""
    of = shares(run)
    words = [f"computes {of['compute']:.0%}", f"waits {of['wait']:.0%}"]
    words.append(f"sends, adds and selects {of['exchange']:.0%}")
    text = f"a rank {', '.join(words)} of the time"
    return text + (f" ({run.note})" if run.note else "")


def svg(runs: Sequence[Run]) -> str:
    """Draws a still picture of the runs, one above the other, with one scale of time."""
    whole_s = max(run.seconds for run in runs) or 1.0
    scale = (_WIDTH - _LEFT - 20) / whole_s
    parts, y = [], 8
    for run in runs:
        parts.append(_text(12, y + 14, run.name, "b"))
        parts.append(_text(_WIDTH - 12, y + 14, sentence(run), "e"))
        y += _HEAD - 10
        row = _ROW if len(run.tracks) <= 16 else max(4, 288 // len(run.tracks))
        gap = _GAP if row > 8 else 1
        for track in run.tracks:
            if row > 8 or track.rank % 8 == 0:
                parts.append(_text(_LEFT - 8, y + row / 2 + 4, f"rank {track.rank}", "e"))
            parts += _track(track, y, row, scale)
            y += row + gap
        y += 14
    parts += _axis(whole_s, scale, y)
    y += 34
    used = {
        look(span) for run in runs for track in run.tracks for span in (*track.spans, *track.beside)
    }
    x = 12
    for key, words in LEGEND.items():
        if key not in used:
            continue
        if x + 28 + 6.9 * len(words) > _WIDTH:
            x, y = 12, y + 20
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="{COLOURS[key]}"/>')
        parts.append(_text(x + 19, y + 10.5, words, ""))
        x += int(34 + 6.9 * len(words))
    height = y + 24
    style = (
        "text{font:12px system-ui,sans-serif;fill:#24292f}.b{font-weight:600;font-size:14px}"
        ".e{text-anchor:end}.m{text-anchor:middle;fill:#57606a}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">\n<style>{style}</style>\n'
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _track(track: Track, y: float, row: float, scale: float) -> list[str]:
    strip = max(1.5, row / 6)
    parts = []
    for key in COLOURS:
        if key in ("serve", "late"):
            top = y + row - strip if key == "serve" else y
            times, height = [(s.begin_s, s.end_s) for s in track.beside if s.kind == key], strip
        else:
            times, height, top = [], row, y
            times = [(s.begin_s, s.end_s) for s in track.spans if look(s) == key]
        drawn = "".join(
            f"M{_LEFT + begin * scale:.2f} {top:g}h{max(0.3, (end - begin) * scale):.2f}"
            f"v{height:g}H{_LEFT + begin * scale:.2f}z"
            for begin, end in union(times)
        )
        if drawn:
            parts.append(f'<path fill="{COLOURS[key]}" d="{drawn}"/>')
    ends = [
        b.begin_s for a, b in zip(track.spans, track.spans[1:], strict=False) if a.step != b.step
    ]
    ticks = "".join(f"M{_LEFT + at * scale:.2f} {y:g}v{row:g}" for at in ends)
    if ticks and row > 8:
        parts.append(f'<path stroke="#ffffff" stroke-width="1.5" d="{ticks}"/>')
    return parts


def _axis(whole_s: float, scale: float, y: float) -> list[str]:
    step_s = nice_step(whole_s, 10)
    parts, number = [f'<path stroke="#8c959f" d="M{_LEFT} {y}h{whole_s * scale:.1f}"/>'], 0
    while number * step_s <= whole_s * 1.0001:
        x = _LEFT + number * step_s * scale
        parts.append(f'<path stroke="#8c959f" d="M{x:.1f} {y}v4"/>')
        parts.append(_text(x, y + 17, f"{number * step_s:g} s", "m"))
        number += 1
    return parts


def nice_step(whole: float, most: int) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that no more than `most` fit into the whole."""
    step = 1e-6
    for factor in (2, 2.5, 2) * 20:
        if whole / step <= most:
            break
        step *= factor
    return float(f"{step:.6g}")


def _text(x: float, y: float, text: str, style: str) -> str:
    of_class = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}"{of_class}>{escape(text)}</text>'
