"""Reads what `recorder` has written: all files of a folder, on one clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.timeline.recorder import FORMAT

Spans = tuple[tuple[float, float], ...]
SpansOf = tuple[tuple[float, float, int], ...]

_SPANS: Final = (
    *("fetch", "evaluate", "exchange", "wait", "serve"),
    *("load", "forward", "backward", "optimizer", "gc"),
)


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
    forward: Spans = ()
    backward: Spans = ()
    optimizer: Spans = ()
    gc: Spans = ()
    sum: SpansOf = ()
    gather: SpansOf = ()
    items: int = 0

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
        decisions: what `adaptive` has decided, and when
    """

    rank: int
    world_size: int
    about: dict[str, Any]
    steps: tuple[Step, ...]
    end: str
    decisions: tuple[tuple[float, str], ...] = ()


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
            "record them with StepTrace, or with `lightning-dsgd simulate --trace FOLDER`"
        )
    heads = {path: _head(path) for path in paths}
    newest = max(heads.values(), key=lambda head: float(head.get("began_unix_s", 0.0)))
    chosen = [path for path in paths if heads[path].get("run") == newest.get("run")]
    origin_s = min(float(heads[path]["origin_s"]) for path in chosen)
    return [_read(path, heads[path], origin_s) for path in chosen]


def missing_ranks(traces: Sequence[Trace]) -> list[int]:
    """Returns the ranks whose files are missing."""
    return sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces})


def _head(path: Path) -> dict[str, Any]:
    with path.open(encoding="ascii") as file:
        head = _parsed(path, 1, file.readline())
    if head.get("format") != FORMAT:
        raise ValueError(
            f"{path} must begin with the format {FORMAT!r}, got {head.get('format')!r}"
        )
    return head


def _read(path: Path, head: dict[str, Any], origin_s: float) -> Trace:
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    shift_s, steps, end = float(head["origin_s"]) - origin_s, [], ""
    decisions: list[tuple[float, str]] = []
    sums: dict[str, dict[int, list[tuple[float, float, int]]]] = {"sum": {}, "gather": {}}
    for number, line in enumerate(lines[1:], 2):
        if not line.endswith("\n"):
            break  # the run was killed while it wrote this
        record = _parsed(path, number, line)
        if "end" in record:
            end = str(record["end"])
        elif "decision" in record:
            decisions.append((1e-6 * record["at"] + shift_s, str(record["decision"])))
        else:
            steps.append(_step(record, shift_s))
            for kind, of_step in sums.items():
                for begin, over, num_bytes, step in record.get(kind, ()):
                    made = 1e-6 * begin + shift_s, 1e-6 * over + shift_s, num_bytes
                    of_step.setdefault(step, []).append(made)
    steps = [
        replace(
            step,
            sum=tuple(sums["sum"].get(step.number, ())),
            gather=tuple(sums["gather"].get(step.number, ())),
        )
        for step in steps
    ]
    rank, world_size = int(head["rank"]), int(head["world_size"])
    return Trace(rank, world_size, head, tuple(steps), end, tuple(decisions))


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"line {number} of {path} must be a JSON object, got {line[:60]!r}")
    return record


def _step(record: dict[str, Any], shift_s: float) -> Step:
    def spans(kind: str) -> Any:
        return tuple(
            (1e-6 * begin + shift_s, 1e-6 * end + shift_s, *who)
            for begin, end, *who in record.get(kind, ())
        )

    begin, end = record["span"]
    return Step(
        int(record["step"]),
        1e-6 * begin + shift_s,
        1e-6 * end + shift_s,
        items=int(record.get("items", 0)),
        **{kind: spans(kind) for kind in _SPANS},
    )
