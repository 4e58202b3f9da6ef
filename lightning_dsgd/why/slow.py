"""Why a job is slow: the verdict of `diagnose` on the steps that were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STEPS: Final = "steps"
"""The folder, within that of a run, of the ranks' step traces."""


def lines_of(run: Path) -> list[str]:
    """Returns what `diagnose` says of a run; nothing where too little, or nothing, was recorded."""
    folder = run / STEPS
    if not any(folder.glob("step_trace_*.jsonl")):
        return []
    # They load torch, which a watcher does without as long as it can.
    from lightning_dsgd.lab.diagnose import times, words
    from lightning_dsgd.lab.diagnose.remedies import remedies
    from lightning_dsgd.lab.diagnose.verdict import judge

    try:
        seen = times.read(folder)
    except (ValueError, OSError):
        return []
    found = judge(seen)
    return words.lines(seen, found, remedies(seen, found))
