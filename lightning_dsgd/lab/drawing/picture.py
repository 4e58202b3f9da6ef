"""One or several runs, ready to be drawn, and a still picture of them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lightning_dsgd.lab.drawing.spans import NOBODY, Span, Track, tracks, union
from lightning_dsgd.lab.drawing.style import BACK, SPANS, Picture, width_of
from lightning_dsgd.lab.timeline.trace import Trace, missing_ranks, read_folder

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
COLUMNS: Final = ("compute", "wait", "exchange", "fetch", "evaluate", "serve", "late")
"""What a rank does in a training."""
_WIDTH, _ROW, _GAP, _LEFT = 960, 18, 4, 58


@dataclass(frozen=True)
class Run:
    """Holds a run, ready to be drawn; its time begins at 0 s.

    Args:
        name: the title above its tracks
        tracks: one for each rank
        note: what is not drawn, for the reader of the picture
    """

    name: str
    tracks: list[Track]
    note: str = ""

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
        folder: a folder of StepTrace, or of a simulated run (`lab.simulate.model.run`)
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
    absent = missing_ranks(traces)
    if absent:
        notes.append(f"no files of ranks {', '.join(map(str, absent))}")
    if any(trace.about.get("waits") == "not seen" for trace in traces):
        notes.append("waits were not recorded")
    return Run(_name(traces[0]), drawn, ", ".join(notes))


def named_apart(runs: Sequence[Run], paths: Sequence[Path]) -> list[Run]:
    """Returns the runs; the names of those that are alike begin with what differs in their paths.

    Args:
        runs: the runs
        paths: where each was recorded
    """
    names = [run.name for run in runs]
    found = []
    for run, path in zip(runs, paths, strict=True):
        alike = [p for p, name in zip(paths, names, strict=True) if name == run.name]
        label = _label(path, alike) if len(alike) > 1 else ""
        found.append(replace(run, name=f"{label}: {run.name}") if label else run)
    return found


def _label(path: Path, others: Sequence[Path]) -> str:
    """Returns the shortest end of a path that no other path ends with."""
    parts = path.absolute().parts
    for size in range(1, len(parts)):
        ends = [other.absolute().parts[-size:] for other in others]
        if ends.count(parts[-size:]) == 1:
            return "/".join(parts[-size:])
    return str(path)


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
    return {
        kind: sum(track.share(kind) for track in run.tracks) / len(run.tracks) for kind in COLUMNS
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


def message(runs: Sequence[Run]) -> str:
    """Returns what the picture says: how much of the time each run waits."""
    waits = [f"{run.name.partition(',')[0]} {shares(run)['wait']:.0%}" for run in runs]
    first, *others = waits
    return f"Ranks wait: {first} of the time" + "".join(f", {each}" for each in others)


def svg(runs: Sequence[Run], width: int = _WIDTH) -> str:
    """Draws a still picture of the runs, one above the other, with one scale of time."""
    whole_s = max(run.seconds for run in runs) or 1.0
    scale = (width - _LEFT - 20) / whole_s
    drawn = Picture(message(runs), width=width)
    for run in runs:
        drawn.paragraph(run.name, "b")
        drawn.paragraph(sentence(run), "n", 12.5)
        y = drawn.height + 6
        row = _ROW if len(run.tracks) <= 16 else max(4, 288 // len(run.tracks))
        gap = _GAP if row > 8 else 1
        for track in run.tracks:
            if row > 8 or track.rank % 8 == 0:
                drawn.text(_LEFT - 6, y + row / 2 + 4, f"rank {track.rank}", "a e")
            _draw(track, drawn, y, row, scale)
            y += row + gap
        drawn.height = y + 6
    _axis(drawn, whole_s, scale)
    used = {
        look(span) for run in runs for track in run.tracks for span in (*track.spans, *track.beside)
    }
    x, y = 12.0, drawn.height
    for key, words in LEGEND.items():
        if key not in used:
            continue
        if x + 22 + width_of(words, 13) > width:
            x, y = 12, y + 20
        drawn.path(f"M{x:g} {y:g}h14v12h-14z", drawn.of(SPANS[key]))
        drawn.text(x + 19, y + 10.5, words)
        x += 34 + width_of(words, 13)
    drawn.height = y + 14
    return drawn.svg()


def _draw(track: Track, drawn: Picture, y: float, row: float, scale: float) -> None:
    strip = max(1.5, row / 6)
    for key in SPANS:
        if key in ("serve", "late"):
            top = y + row - strip if key == "serve" else y
            times, height = [(s.begin_s, s.end_s) for s in track.beside if s.kind == key], strip
        else:
            times, height, top = [], row, y
            times = [(s.begin_s, s.end_s) for s in track.spans if look(s) == key]
        d = "".join(
            f"M{_LEFT + begin * scale:.2f} {top:g}h{max(0.3, (end - begin) * scale):.2f}"
            f"v{height:g}H{_LEFT + begin * scale:.2f}z"
            for begin, end in union(times)
        )
        if d:
            drawn.path(d, drawn.of(SPANS[key]))
    ends = [
        b.begin_s for a, b in zip(track.spans, track.spans[1:], strict=False) if a.step != b.step
    ]
    ticks = "".join(f"M{_LEFT + at * scale:.2f} {y:g}v{row:g}" for at in ends)
    if ticks and row > 8:
        drawn.path(ticks, "s" + drawn.of(BACK), 'stroke-width="1.5"')


def _axis(drawn: Picture, whole_s: float, scale: float) -> None:
    step_s, y = nice_step(whole_s, 10), drawn.height
    drawn.path(f"M{_LEFT} {y:g}h{whole_s * scale:.1f}", "g")
    for number in range(int(whole_s * 1.0001 / step_s) + 1):
        x = _LEFT + number * step_s * scale
        drawn.path(f"M{x:.1f} {y:g}v4", "g")
        drawn.text(x, y + 17, f"{number * step_s:g} s", "a m")
    drawn.height = y + 28


def nice_step(whole: float, most: int) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that no more than `most` fit into the whole."""
    step = 1e-6
    for factor in (2, 2.5, 2) * 20:
        if whole / step <= most:
            break
        step *= factor
    return float(f"{step:.6g}")
