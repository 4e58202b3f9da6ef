"""Reads what `recorder` has written: all files of a folder, on one clock.

A file may come from anywhere, so whatever is drawn or counted is checked here: the numbers of a
step are numbers, the first line's words are words.  What is wrong is a `ValueError` that names the
file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from lightning_dsgd.lab.timeline.recorder import FORMAT

Spans = tuple[tuple[float, float], ...]
SpansOf = tuple[tuple[float, float, int], ...]

_SPANS: Final = (
    *("fetch", "evaluate", "exchange", "wait", "serve"),
    *("load", "copy", "forward", "backward", "optimizer", "gc", "save", "start"),
)
_WHO: Final = ("wait", "serve")
"""The kinds whose spans name a rank."""
_SUMS: Final = ("sum", "gather")
"""The kinds whose spans have their bytes and their step."""
_ON_DEVICE: Final = tuple(
    f"device_{part}" for part in ("copy", "forward", "backward", "optimizer", "evaluate", "meet")
)
"""The kinds whose spans have their step, and which the device did."""
_MOST: Final = 10**15
"""The largest figure of a step: microseconds of 30 years."""
_MOST_RANKS: Final = 10**6
_WORDS: Final = ("run", "strategy", "waits", "sums", "clock", "device", "host", "processors")
"""What the first line says in words, if it says it."""
_FIGURES: Final = (
    *("began_unix_s", "parameters", "epoch_steps", "cores", "threads", "memory_bytes_s"),
)
"""What the first line says in figures, if it says it."""


@dataclass(frozen=True)
class Step:
    """Holds one step of one rank, in seconds from the first moment of the run; see `recorder`."""

    number: int
    begin_s: float
    end_s: float
    fetch: Spans
    evaluate: Spans
    exchange: Spans
    wait: SpansOf
    serve: SpansOf
    load: Spans = ()
    copy: Spans = ()
    forward: Spans = ()
    backward: Spans = ()
    optimizer: Spans = ()
    gc: Spans = ()
    save: Spans = ()
    start: Spans = ()
    sum: SpansOf = ()
    gather: SpansOf = ()
    device: Mapping[str, Spans] = field(default_factory=dict)
    """The same of the rank's device, as far as it was timed: for each part, and for "meet"."""
    items: int = 0
    short: tuple[float, ...] = ()
    """For each exchange, how long the rank waited for a processor before, since the last one."""
    running: int | None = None
    """How many threads of the machine ran or wanted to, if that was asked in this step."""

    @property
    def own_s(self) -> float:
        """The time of the step without the algorithm, waits and validation."""
        others = sum(end - begin for begin, end in (*self.exchange, *self.evaluate))
        within = [*self.exchange, *self.evaluate]
        for begin, end, _ in self.wait:
            if not any(b <= begin and end <= e for b, e in within):
                others += end - begin
        return max(0.0, self.end_s - self.begin_s - others)


@dataclass(frozen=True)
class Trace:
    """Holds what one rank recorded.

    Attributes:
        rank: the rank that has recorded
        world_size: how many ranks there were
        about: the file's first line
        steps: the steps in their order
        end: why the file ends; empty where the run was killed
    """

    rank: int
    world_size: int
    about: dict[str, Any]
    steps: tuple[Step, ...]
    end: str


def read_folder(folder: Path) -> list[Trace]:
    """Returns the traces of one run, by rank; the run begins at 0 s.

    Files of an earlier run in the same folder are left out.

    Raises:
        ValueError: if there is no such file, or one of them is broken
    """
    paths = sorted(folder.glob("step_trace_*.jsonl"))
    if not paths:
        raise ValueError(
            f"{folder} must be a folder with files step_trace_00000.jsonl and so on, got none; "
            "record them with StepTrace or LoopTrace"
        )
    heads = {path: _head(path) for path in paths}
    newest = max(heads.values(), key=lambda head: float(head.get("began_unix_s", 0.0)))
    chosen = [path for path in paths if heads[path].get("run") == newest.get("run")]
    of_rank: dict[int, Path] = {}
    for path in chosen:
        other = of_rank.setdefault(int(heads[path]["rank"]), path)
        if other is not path:
            raise ValueError(
                f"the files of a run must be of different ranks, got rank {heads[path]['rank']} in "
                f"{other} and in {path}; leave one out"
            )
    origin_s = min(float(heads[path]["origin_s"]) for path in chosen)
    return [_read(path, heads[path], origin_s) for path in chosen]


def missing_ranks(traces: Sequence[Trace]) -> list[int]:
    """Returns the ranks whose files are missing."""
    return sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces})


def _head(path: Path) -> dict[str, Any]:
    with path.open(encoding="ascii", errors="replace") as file:
        head = _parsed(path, 1, file.readline())
    if head.get("format") != FORMAT:
        raise ValueError(
            f"{path} must begin with the format {FORMAT!r}, got {head.get('format')!r}"
        )
    _check_head(path, head)
    return head


def _check_head(path: Path, head: dict[str, Any]) -> None:
    figures = {name: head.get(name) for name in ("rank", "world_size", "origin_s")}
    figures |= {name: head[name] for name in _FIGURES if name in head}
    for name, figure in figures.items():
        if not _is_figure(figure):
            _refuse(path, 1, f"{name!r} must be a number", figure)
    for name in _WORDS:
        if not isinstance(head.get(name, ""), str):
            _refuse(path, 1, f"{name!r} must be text", head[name])
    if not 0 < head["world_size"] <= _MOST_RANKS:
        _refuse(path, 1, f"'world_size' must be from 1 to {_MOST_RANKS}", head["world_size"])
    if not 0 <= head["rank"] <= _MOST_RANKS:
        _refuse(path, 1, f"'rank' must be from 0 to {_MOST_RANKS}", head["rank"])


def _read(path: Path, head: dict[str, Any], origin_s: float) -> Trace:
    text = path.read_text(encoding="ascii", errors="replace")
    lines = text.splitlines(keepends=True)
    shift_s, steps, end = float(head["origin_s"]) - origin_s, [], ""
    sums: dict[str, dict[int, list[tuple[float, float, int]]]] = {kind: {} for kind in _SUMS}
    on_device: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.endswith("\n"):
            break  # the run was killed while it wrote this
        record = _parsed(path, number, line)
        if "end" in record:
            end = str(record["end"])
        else:
            _check_step(path, number, record)
            steps.append(_step(record, shift_s))
            for kind, of_step in sums.items():
                for begin, over, num_bytes, step in record.get(kind, ()):
                    over = max(begin, over)
                    made = 1e-6 * begin + shift_s, 1e-6 * over + shift_s, int(num_bytes)
                    of_step.setdefault(int(step), []).append(made)
            for kind in _ON_DEVICE:
                for begin, over, step in record.get(kind, ()):
                    part = kind.removeprefix("device_")
                    spans = on_device.setdefault(int(step), {}).setdefault(part, [])
                    spans.append((1e-6 * begin + shift_s, 1e-6 * max(begin, over) + shift_s))
    steps = [
        replace(
            step,
            sum=tuple(sums["sum"].get(step.number, ())),
            gather=tuple(sums["gather"].get(step.number, ())),
            device={part: (*s,) for part, s in on_device.get(step.number, {}).items()},
        )
        for step in steps
    ]
    rank, world_size = int(head["rank"]), int(head["world_size"])
    return Trace(rank, world_size, head, tuple(steps), end)


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"line {number} of {path} must be a JSON object, got {line[:60]!r}")
    return record


def _check_step(path: Path, number: int, record: dict[str, Any]) -> None:
    """Raises `ValueError` unless the line of a step has what `recorder` writes."""
    for name in ("step", "items", "running"):
        figure = record.get(name, None if name == "step" else 0)
        if not _is_figure(figure):
            _refuse(path, number, f"{name!r} must be a number", figure)
    _check_span(path, number, "span", record.get("span"), 2)
    for kind in (*_SPANS, *_ON_DEVICE, *_SUMS):
        spans = record.get(kind, [])
        if not isinstance(spans, list):
            _refuse(path, number, f"{kind!r} must be a list of spans", spans)
        size = 3 if kind in (*_WHO, *_ON_DEVICE) else 4 if kind in _SUMS else 2
        for span in spans:
            has_more = kind == "exchange" and isinstance(span, list) and len(span) == 3
            _check_span(path, number, kind, span, 3 if has_more else size)


def _check_span(path: Path, number: int, kind: str, span: Any, size: int) -> None:
    if not (isinstance(span, list) and len(span) == size and all(map(_is_figure, span))):
        _refuse(path, number, f"a span of {kind!r} must be {size} numbers", span)


def _is_figure(value: Any) -> bool:
    """Returns whether a value is a number that a trace may have; NaN is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -_MOST <= value <= _MOST


def _refuse(path: Path, number: int, needed: str, got: Any) -> NoReturn:
    raise ValueError(
        f"line {number} of {path}: {needed}, got {str(got)[:60]!r}; record the run again, or leave "
        "the file out"
    )


def _step(record: dict[str, Any], shift_s: float) -> Step:
    def spans(kind: str) -> Any:
        return tuple(
            (1e-6 * begin + shift_s, 1e-6 * max(begin, end) + shift_s, *map(int, who))
            for begin, end, *who in record.get(kind, ())
        )

    begin, end = record["span"]
    running = record.get("running")
    exchanges = spans("exchange")
    more = {kind: spans(kind) for kind in _SPANS if kind != "exchange"}
    return Step(
        int(record["step"]),
        1e-6 * begin + shift_s,
        1e-6 * max(begin, end) + shift_s,
        exchange=tuple((begin, end) for begin, end, *_ in exchanges),
        items=int(record.get("items", 0)),
        short=tuple(1e-6 * max(0, *waited, 0) for _, _, *waited in exchanges),
        running=None if running is None else int(running),
        **more,
    )
