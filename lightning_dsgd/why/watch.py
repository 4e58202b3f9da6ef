"""Watches a job: reads the records, asks the ranks where something is wrong, tells a verdict once.

A watcher asks before it tells, so that the recent collectives are of that moment.  It waits for the
answers for ANSWERED_BEATS beats and no longer: a verdict comes also where a rank cannot answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.why.reader import SILENT_BEATS, Reader
from lightning_dsgd.why.records import Job
from lightning_dsgd.why.verdict import Verdict, is_suspicious, judge
from lightning_dsgd.why.words import lines

ANSWERED_BEATS: Final = 6.0
TOLD: Final = "why.json"
"""The file with what a watcher has told."""
_MOST_TOLD: Final = 50


class Watch:
    """Watches the ranks that write into a folder.

    Args:
        folder: where they write
        stuck_after_s: how long a rank may keep the others waiting
        beat_s: how often the ranks write
        now: the clock
        tell: is called with the lines of each verdict
    """

    def __init__(
        self,
        folder: Path,
        stuck_after_s: float,
        beat_s: float,
        now: Callable[[], float],
        tell: Callable[[list[str]], None],
    ) -> None:
        self._folder = folder
        self._stuck_after_s = stuck_after_s
        self._beat_s = beat_s
        self._now = now
        self._tell = tell
        self._reader = Reader(folder, now)
        self._question = 0
        self._asked_s: float | None = None
        self._signalled: set[int] = set()
        self._keys: set[Any] = set()
        self.told: list[dict[str, Any]] = []

    def look(self) -> Verdict | None:
        """Looks once while the command runs; returns a verdict that has just been told."""
        job = self._reader.read()
        if not is_suspicious(job, self._stuck_after_s):
            self._asked_s = None
            return None
        if self._asked_s is None:
            self._ask()
            return None
        if not self._is_answered():
            return None
        verdict = judge(job, self._stuck_after_s)
        if verdict is None or self._key(verdict) in self._keys:
            return None
        if self._now() - self._asked_s > max(self._stuck_after_s, 10 * self._beat_s):
            self._ask()  # the answers are old
            return None
        return self._told(verdict, job)

    def end(self, exit_status: int) -> Verdict | None:
        """Looks once more when the command has ended."""
        job = self._reader.read(exit_status)
        verdict = judge(job, self._stuck_after_s)
        if verdict is None or self._key(verdict) in self._keys:
            return None
        return self._told(verdict, job)

    def processes(self) -> list[int]:
        """Returns the ranks' processes of this machine."""
        return self._reader.processes()

    def write(self, **about: Any) -> None:
        """Writes what was told, for `lightning-dsgd why FOLDER`."""
        made = self._folder / f"{TOLD}.new"
        made.write_text(json.dumps({**about, "told": self.told[-_MOST_TOLD:]}, indent=1))
        os.replace(made, self._folder / TOLD)

    def _ask(self) -> None:
        self._question += 1
        self._asked_s = self._now()
        self._signalled = set()
        self._reader.ask(self._question)

    def _is_answered(self) -> bool:
        """Returns whether all ranks have answered, or had the time to; a late one is signalled."""
        assert self._asked_s is not None
        silent = self._reader.unanswered(self._question)
        passed = self._now() - self._asked_s
        if passed >= SILENT_BEATS * self._beat_s:
            for rank in set(silent) - self._signalled:
                self._signalled.add(rank)
                self._reader.signal(rank)
        return not silent or passed >= ANSWERED_BEATS * self._beat_s

    def _told(self, verdict: Verdict, job: Job) -> Verdict:
        self._keys.add(self._key(verdict))
        text = lines(verdict, job)
        self.told.append({**asdict(verdict), "lines": text})
        self._tell(text)
        return verdict

    @staticmethod
    def _key(verdict: Verdict) -> tuple[Any, ...]:
        """Returns what makes a verdict another one than an earlier one."""
        at = verdict.collective
        number = None if at is None else (at.group, at.number)
        # An ending that was told while the others waited is the same one at the command's end.
        if verdict.cause in ("raised", "killed", "crashed", "left"):
            return verdict.cause, verdict.culprits
        return verdict.cause, verdict.culprits, number, verdict.is_late_only
