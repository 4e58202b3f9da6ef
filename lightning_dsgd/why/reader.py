"""Reads what the ranks have written, into records.

The ranks' clocks are not compared: a record's age is how long ago the watcher saw it change.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.why.records import Collective, Ending, Group, Job, Rank
from lightning_dsgd.why.stacks import Frame, main_stack

FORMAT: Final = "lightning_dsgd rank 1"
"""What a rank's file begins with; `inside/lightning_dsgd_rank/recorder.py` writes it."""
ASKED: Final = "asked"
SILENT_BEATS: Final = 3.0
"""A rank that has not written for so many beats is asked by a signal."""
GONE_BEATS: Final = 30.0
"""A rank of another machine that has not written for so many beats has gone."""


class Reader:
    """Reads a folder again and again, and remembers when things changed.

    Args:
        folder: where the ranks' files lie
        now: the watcher's clock
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._folder = folder
        self._now = now
        self._seen: dict[int, tuple[Any, float]] = {}
        self._stages: dict[int, tuple[Any, float]] = {}
        self._endings: dict[tuple[int, int], Ending] = {}
        self._raw: dict[int, dict[str, Any]] = {}

    def read(self, exit_status: int | None = None) -> Job:
        """Returns what is known now."""
        self._raw = {}
        for path in sorted(self._folder.glob("rank_*.json")):
            raw = _parsed(path)
            if raw is not None:
                self._raw[int(raw["rank"])] = raw
        sizes = [int(raw["world_size"] or 0) for raw in self._raw.values()]
        ranks = {rank: self._rank(rank, raw) for rank, raw in self._raw.items()}
        return Job(ranks, max(sizes, default=0), exit_status)

    def ask(self, question: int) -> None:
        """Asks all ranks for their recent collectives."""
        made = self._folder / f"{ASKED}.new"
        made.write_text(str(question))
        os.replace(made, self._folder / ASKED)

    def unanswered(self, question: int) -> list[int]:
        """Returns the ranks that run and have not answered."""
        return [
            rank
            for rank, raw in self._raw.items()
            if "ended" not in raw and int(raw["answered"]) < question and self._is_there(raw)
        ]

    def signal(self, rank: int) -> None:
        """Asks a rank of this machine by a signal, if it still catches this signal."""
        raw = self._raw[rank]
        signum = int(raw.get("signal", 0))
        if signum and is_here(raw) and _catches(int(raw["pid"]), signum):
            os.kill(int(raw["pid"]), signum)

    def processes(self) -> list[int]:
        """Returns the processes of this machine that are ranks and still run."""
        return [int(r["pid"]) for r in self._raw.values() if is_here(r) and is_alive(r)]

    def _is_there(self, raw: dict[str, Any]) -> bool:
        return is_alive(raw) if is_here(raw) else True

    def _rank(self, rank: int, raw: dict[str, Any]) -> Rank:
        pid = int(raw["pid"])
        silent_s = self._since(self._seen, rank, (pid, raw["beat"]))
        joined = str(raw["stage"])
        ending = self._endings.get((rank, pid)) or self._ending(raw, silent_s)
        if ending is not None:
            self._endings[rank, pid] = ending
        recent = raw.get("recent", {})
        groups = {
            name: _group(name, told, recent.get(name, ()), silent_s)
            for name, told in raw.get("groups", {}).items()
        }
        return Rank(
            rank,
            joined,
            self._since(self._stages, rank, (pid, joined)),
            float(raw.get("idle_s", 0.0)) + silent_s,
            float(raw.get("usual_s", 0.0)),
            silent_s,
            groups,
            self._frames(raw, silent_s),
            ending,
        )

    def _since(self, kept: dict[int, tuple[Any, float]], rank: int, value: Any) -> float:
        now = self._now()
        before, since_s = kept.get(rank, (None, now))
        if before != value:
            since_s = now
        kept[rank] = value, since_s
        return now - since_s

    def _frames(self, raw: dict[str, Any], silent_s: float) -> tuple[Frame, ...]:
        """Returns where a rank is: by its signal's stacks if it could not write them itself."""
        if silent_s > SILENT_BEATS * float(raw["beat_s"]) and "ended" not in raw:
            dumped = main_stack(self._dump(raw, "stacks"), str(raw["main"]))
            if dumped:
                return _placed(dumped, raw)
        return _placed((Frame(*frame) for frame in raw.get("frames", ())), raw)

    def _dump(self, raw: dict[str, Any], suffix: str) -> str:
        try:
            path = self._folder / f"rank_{int(raw['rank']):05d}.{suffix}"
            return path.read_text(errors="replace")
        except OSError:
            return ""

    def _ending(self, raw: dict[str, Any], silent_s: float) -> Ending | None:
        now = self._now()
        if "ended" in raw:
            told = raw["ended"]
            frames = _placed((Frame(*frame) for frame in told.get("frames", ())), raw)
            return Ending(str(told["how"]), str(told.get("error", "")), frames, now)
        if is_here(raw):
            if is_alive(raw):
                return None
        elif silent_s < GONE_BEATS * float(raw["beat_s"]):
            return None
        fatal = self._dump(raw, "fatal")
        frames = _placed(main_stack(fatal, str(raw["main"])), raw)
        if fatal.startswith("Fatal Python error: "):
            return Ending("crashed", fatal.splitlines()[0].partition(": ")[2], frames, now)
        if fatal:
            return Ending("terminated", "SIGTERM", frames, now)
        return Ending("killed", "", (), now)


def _group(name: str, told: dict[str, Any], listed: Iterable[Any], silent_s: float) -> Group:
    """Returns how far a rank has come in a group, by its last numbers and its list.

    torch's number of the last collective that is over may lag; the list does not.
    """
    recent = {
        number: Collective(name, number, str(op), int(size), bool(is_over))
        for number, op, size, is_over in listed
    }
    entered, over = int(told["entered"]), int(told["over"])
    pending = [number for number, each in recent.items() if not each.is_over]
    if pending:
        over = max(over, min(pending) - 1)
    elif entered in recent:
        over = entered
    return Group(tuple(told["ranks"]), entered, over, float(told["still_s"]) + silent_s, recent)


def _placed(frames: Iterable[Frame], raw: dict[str, Any]) -> tuple[Frame, ...]:
    """Returns frames whose files have whole paths: a rank may have named its script shortly."""
    folder = Path(str(raw["folder"]))
    return tuple(
        frame if frame.file.startswith("<") else replace(frame, file=str(folder / frame.file))
        for frame in frames
    )


def is_here(raw: dict[str, Any]) -> bool:
    """Returns whether a rank runs on this machine, so that its process can be asked for."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return bool(raw["host"] == socket.gethostname() and raw["boot"] == boot)


def is_alive(raw: dict[str, Any]) -> bool:
    """Returns whether a rank's process is there; one that has ended and is not awaited is not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{int(raw['pid'])}/status").read_text()
    except OSError:
        return False


def _catches(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal, which would else end it."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def _parsed(path: Path) -> dict[str, Any] | None:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.get("format") == FORMAT else None
