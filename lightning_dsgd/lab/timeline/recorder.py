"""Writes what one rank did: one small file of JSON lines, which a killed run leaves readable.

    {"format": "lightning_dsgd step trace 1", "rank": 3, "world_size": 8, "origin_s": ..., ...}
    {"step": 1, "span": [0, 412034], "fetch": [[0, 801]], "exchange": [[402113, 412030]],
     "wait": [[403001, 411870, 5]], "serve": [[88012, 88931, 2]]}

The first line says who wrote it; then there is one line for each step, in microseconds from
`origin_s`, which is a time on the clock that all ranks share.

    span      from the end of the step before to the end of this one
    fetch     between batches: the data loader, loggers and other callbacks
    evaluate  validation in the midst of training
    exchange  the algorithm had the training thread, or DDP its all-reduce; with a third figure: for
              so many microseconds since the exchange before, this rank waited for a processor
    wait      the training thread waited for a message of this rank (-1: of all together)
    serve     a lane worked, after a message of this rank had come
    load      of `fetch`: the data loader alone
    copy      of `fetch`: the batch was copied to the device
    forward, backward, optimizer
              these parts of the step; a wait in one of them is listed as a wait too
    gc        Python collected garbage, whatever the step was doing
    save      a checkpoint was written, whatever the step was doing
    start     a loader began an epoch, and may have started its workers
    device_copy, device_forward, device_backward, device_optimizer, device_evaluate, device_meet
              so long the device was at this part, and of which step, maybe an earlier one; at the
              last one it waited for other ranks in the midst of its step
    sum       a piece of the gradient was summed: from when this rank's piece was ready until the
              sum was there, its bytes and its step, which on a device is an earlier one
    gather    weights in shards were put together, with the same figures
    items     how many numbers the batches of the step had
    running   how many threads of the machine ran or wanted to; once a second
    left_out  microseconds of waits that were too short, or too many, to be listed one by one

What is none of this is computation.  A file ends with {"end": why}; without such a line, the run
was killed, and what it did in its last second may be missing.

A training thread that waits for its own rank waits for one of its lanes, and so for whom that lane
waits: the lane's waits are listed in place of its own.

**Threads.**  The training thread owns a recorder; lanes call `waited(in_lane=True)` alone, which
appends to deques that the training thread reads: one for all lanes, and one for each thread.  It
copies them, which the interpreter's lock makes one operation.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "lightning_dsgd step trace 1"
SHARDED: Final = "fully_shard"
"""The strategy, in the first line, of a model in shards."""
FSDP: Final = "fsdp"
"""The same of a model in FullyShardedDataParallel, which is FSDP's first version."""
ALL: Final = -1
"""Stands for a rank where a wait was for all ranks."""
SHORTEST_S: Final = 20e-6
"""Waits shorter than this are added up in `left_out`."""
MOST_SPANS: Final = 64
"""The most waits, and services, of a step that are listed; the rest is added up."""
_MOST_OTHERS: Final = 1024
"""The most spans of each other kind."""
FLUSH_S: Final = 1.0
DEFAULT_MB: Final = 8.0

_REMEMBERED: Final = 64
"""The number of waits of a lane that are kept, for a training thread that waits for the lane."""

Span = tuple[float, float, int]


def file_of(folder: Path, rank: int) -> Path:
    """Returns the file of this rank."""
    return folder / f"step_trace_{rank:05d}.jsonl"


class Recorder:
    """Writes a rank's file.

    Args:
        folder: where the ranks' files lie; made if it is not there
        rank: the rank that this file is of
        world_size: how many ranks there are
        now: the clock of the transport
        about: what else the first line is to hold
        offset_s: what is added to `now` to get the time on the ranks' common clock
        max_mb: the file's size at which recording ends
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        now: Callable[[], float],
        *,
        about: dict[str, Any] | None = None,
        offset_s: float = 0.0,
        max_mb: float = DEFAULT_MB,
    ) -> None:
        if not max_mb > 0:
            raise ValueError(f"max_mb must be positive, got max_mb={max_mb}; try {DEFAULT_MB:g}")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = file_of(folder, rank)
        self._now = now
        self._origin_s = self._begin_s = self._flushed_s = now()
        self._room = int(max_mb * 1e6)
        self._spans: dict[str, list[Any]] = {}
        self._left_out_s, self._items = 0.0, 0
        self._figures: dict[str, int] = {}
        self._served: deque[Span] = deque()
        self._rank = rank
        self._of_lanes: dict[int, deque[Span]] = {}
        self._file = self.path.open("w", encoding="ascii")
        head = {"format": FORMAT, "rank": rank, "world_size": world_size}
        self._write(head | {"origin_s": self._origin_s + offset_s} | (about or {}))
        self._file.flush()

    @property
    def is_open(self) -> bool:
        """Whether steps are still recorded."""
        return not self._file.closed

    # ---- what happens ----

    def waited(self, begin_s: float, end_s: float, src: int, *, in_lane: bool) -> None:
        """Records that a thread waited for rank `src`."""
        if in_lane:
            waits = self._of_lanes.setdefault(threading.get_ident(), deque(maxlen=_REMEMBERED))
            if waits and begin_s - waits[-1][1] >= SHORTEST_S:
                self._served.append((waits[-1][1], begin_s, waits[-1][2]))
            waits.append((begin_s, end_s, src))
        elif end_s - begin_s < SHORTEST_S:
            self._left_out_s += end_s - begin_s
        elif src == self._rank:
            for span in self._of_its_lane(begin_s, end_s):
                self._add("wait", span)
        else:
            self._add("wait", (begin_s, end_s, src))

    def exchanged(self, begin_s: float, end_s: float, waited_s: float = 0.0) -> None:
        """Records that the algorithm had the training thread.

        Args:
            begin_s: from when
            end_s: until when
            waited_s: for how long the thread waited for a processor before, since the last time
        """
        waited = round(1e6 * waited_s)
        self._add("exchange", (begin_s, end_s, waited) if waited > 0 else (begin_s, end_s))

    def fetched(self, begin_s: float, end_s: float) -> None:
        """Records the time between two batches."""
        self._add("fetch", (begin_s, end_s))

    def evaluated(self, begin_s: float, end_s: float) -> None:
        """Records a validation."""
        self._add("evaluate", (begin_s, end_s))

    def did(self, kind: str, begin_s: float, end_s: float, *figures: int) -> None:
        """Records a time of one of the other kinds, with figures that belong to it."""
        self._add(kind, (begin_s, end_s, *figures))

    def has_batch(self, num_items: int) -> None:
        """Records that the step has a batch of so many numbers."""
        self._items += num_items

    def note(self, name: str, figure: int) -> None:
        """Records a figure of the step, once."""
        self._figures[name] = figure

    def end_step(self, number: int) -> None:
        """Writes the line of the step of this number, which is over."""
        if not self.is_open:
            return
        now = self._now()
        while self._served:
            self._add("serve", self._served.popleft())
        line: dict[str, Any] = {"step": number, "span": self._whole((self._begin_s, now))}
        line |= {kind: [*map(self._whole, spans)] for kind, spans in self._spans.items()}
        line |= self._figures
        if self._items:
            line["items"] = self._items
        if self._left_out_s:
            line["left_out"] = round(1e6 * self._left_out_s)
        self._begin_s, self._spans, self._left_out_s, self._items = now, {}, 0.0, 0
        self._figures = {}
        self._write(line)
        if now - self._flushed_s >= FLUSH_S and self.is_open:
            self._file.flush()
            self._flushed_s = now

    def close(self, why: str) -> None:
        """Closes the file; may be called again."""
        if self.is_open:
            self._file.write(json.dumps({"end": why}) + "\n")
            self._file.close()

    def _of_its_lane(self, begin_s: float, end_s: float) -> Iterator[Span]:
        """Splits a time by what the lane that woke the training thread was waiting for."""
        lanes = [waits for waits in map(list, [*self._of_lanes.values()]) if waits]
        waits = max(lanes, key=lambda waits: waits[-1][1], default=[])
        at_s = begin_s
        for begin, end, src in waits:
            begin, end = max(begin, at_s), min(end, end_s)
            if end > begin and src != self._rank:
                if begin > at_s:
                    yield at_s, begin, self._rank
                yield begin, end, src
                at_s = end
        if end_s > at_s:
            yield at_s, end_s, self._rank

    # ---- as text ----

    def _add(self, kind: str, span: tuple[float, ...]) -> None:
        spans = self._spans.setdefault(kind, [])
        if len(spans) < (MOST_SPANS if kind in ("wait", "serve") else _MOST_OTHERS):
            spans.append(span)
        elif kind == "wait":
            self._left_out_s += span[1] - span[0]

    def _whole(self, span: tuple[float, ...]) -> list[int]:
        begin_s, end_s, *who = span
        origin_s = self._origin_s
        return [round(1e6 * (begin_s - origin_s)), round(1e6 * (end_s - origin_s)), *map(int, who)]

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._room -= len(text)
        if self._room < 0:
            self.close("the file is full")
        else:
            self._file.write(text)
