"""A storm among real processes: `lightning-dsgd launch` starts them, and starts lost ones again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.elastic.chaos.launched import Job, is_alive, said_of_steps
from lightning_dsgd.elastic.chaos.record import (
    ALIVE,
    FINISHED,
    JOINS,
    TAKES_PART,
    Process,
    Record,
)
from lightning_dsgd.elastic.chaos.schedule import Event, Terms

_STEP_S: Final = 0.3
_BATCH: Final = 4
_EPOCH_STEPS: Final = 20
_ENDS_WITHIN_S: Final = 300.0


class _Struck:
    """What was done to processes, and is still to be done.

    Args:
        patience_s: for how long a process may stand still that nobody may take for lost
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.events: list[tuple[float, Event, tuple[int, ...]]] = []
        self.at_s: dict[int, float] = {}
        self.killed: set[int] = set()
        self.wakes: list[tuple[float, int]] = []

    def strike(self, event: Event, pids: list[int]) -> None:
        """Kills or stops processes."""
        now = time.monotonic()
        self.events.append((now, event, tuple(pids)))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if event.kind == "loss" else signal.SIGSTOP)
            if event.kind == "loss" or event.seconds > self._patience_s:
                self.at_s.setdefault(pid, now)
            if event.kind == "loss":
                self.killed.add(pid)
            else:
                self.wakes.append((now + event.seconds, pid))

    def wake(self) -> None:
        """Lets processes go on that have stood still for long enough."""
        for each in [each for each in self.wakes if each[0] <= time.monotonic()]:
            self.wakes.remove(each)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each[1], signal.SIGCONT)


def play(seed: int, terms: Terms, events: list[Event], strategy: str) -> Record:
    """Plays a schedule in real time, and returns what became of the job."""
    settings: dict[str, Any] = {
        "strategy": strategy,
        "ranks": terms.ranks,
        "step_s": _STEP_S,
        "batch": _BATCH,
        "lr": 0.05,
        "epochs": 100_000,
        "epoch_samples": _EPOCH_STEPS * _BATCH * terms.ranks,
        "heartbeat_s": terms.heartbeat_s,
    }
    struck = _Struck(terms.heartbeat_s / 4)
    record = Record(settings["epoch_samples"], 11 * terms.heartbeat_s)
    folder = record.folder = Path(tempfile.mkdtemp(prefix="chaos"))
    job, begin = Job(folder, settings), time.monotonic()
    try:
        while len(job.training()) < terms.ranks:
            job.look_until(time.monotonic() + 0.2)
        begin = time.monotonic()
        for event in events:
            _pass(job, begin + event.at_s, struck)
            struck.strike(event, _holders(folder, event.places))
        _pass(job, begin + terms.seconds, struck)
        _pass(job, max([begin, *(at for at, _ in struck.wakes)]), struck)
        (folder / "end").touch()
        _, record.num_epochs = job.end(_ENDS_WITHIN_S)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        record.failure = str(error)
    finally:
        job.stop()
    _read(folder, begin, struck, record)
    return record


def _pass(job: Job, until: float, struck: _Struck) -> None:
    while (now := time.monotonic()) < until:
        job.look_until(min(until, now + 0.05))
        struck.wake()


def _holders(folder: Path, places: tuple[int, ...]) -> list[int]:
    """Returns the process of each place that trains now."""
    made = [(place, pid) for (place, pid), lines in said_of_steps(folder).items() if lines]
    return [pid for place, pid in made if place in places and is_alive(pid)]


def _read(folder: Path, begin: float, struck: _Struck, record: Record) -> None:
    """Reads what the processes have written."""
    numbers: dict[int, int] = {}
    ended = {int(file.name.split("_")[1]): file.read_text() for file in folder.glob("result_*")}
    for (place, pid), lines in sorted(said_of_steps(folder).items(), key=partial(_begun, folder)):
        if not lines:
            continue
        number = int(lines[-1][3])
        numbers[pid] = number
        process = Process(number, place, _begun(folder, ((place, pid), lines)) - begin)
        process.enter(process.begin_s, JOINS, 0)
        last = process.begin_s
        for time_s, epoch, _, _, view, members, *samples in lines:
            at_s, seen = float(time_s) - begin, int(view)
            if process.views and at_s - last > 5 * _STEP_S:
                process.enter(last, ALIVE, process.views[-1][1])
            process.enter(at_s, TAKES_PART, seen)
            if not process.views or process.views[-1][1] != seen:
                process.views.append((at_s, seen, tuple(map(int, members.split(","))), ""))
            process.trained += [(int(epoch), int(sample)) for sample in samples]
            last = at_s
        process.end_s, process.is_dead = last, pid in struck.killed
        process.how = "ended, and says why in its log"
        if number in ended:
            process.how = FINISHED
            record.ends[number] = ended[number]
        elif pid in struck.at_s:
            process.struck_s = struck.at_s[pid] - begin
            process.how = "was killed" if process.is_dead else "was taken for lost"
        record.processes[number] = process
    record.events = [
        (Event(at - begin, event.kind, event.places, event.seconds), tuple(
            numbers[pid] for pid in pids if pid in numbers
        ))
        for at, event, pids in struck.events
    ]  # fmt: skip


def _begun(folder: Path, item: tuple[tuple[int, int], Any]) -> float:
    """Returns when a process began."""
    place, pid = item[0]
    return float((folder / f"begun_{place}_{pid}").read_text())
