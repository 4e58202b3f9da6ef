"""Traces made by hand: a clock that a test sets, and what each rank did by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_dsgd.lab.timeline.recorder import Recorder


class Clock:
    at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


def recorder(folder: Path, rank: int = 0, world_size: int = 2, **options: Any) -> Any:
    """An open recorder whose clock is `recorder.clock`."""
    clock = Clock()
    made: Any = Recorder(folder, rank, world_size, clock, **options)
    made.clock = clock
    return made


def record(folder: Path, steps: list[list[list[tuple[float, float, int]]]], **about: Any) -> None:
    """For each rank and step, its waits; a step is 1 s, and its exchange begins with its waits."""
    for rank, of_rank in enumerate(steps):
        mine = recorder(folder, rank, len(steps), about={"strategy": "made", **about})
        begin_s = mine.clock.at_s
        for number, waits in enumerate(of_rank, 1):
            mine.clock.at_s = begin_s + number
            for begin, end, src in waits:
                mine.waited(begin_s + begin, begin_s + end, src, in_lane=False)
            if waits:
                mine.exchanged(begin_s + waits[0][0], begin_s + waits[-1][1])
            mine.end_step(number)
        mine.close("the test has ended")
