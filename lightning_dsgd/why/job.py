"""Starts the command with the recorder on its path, and ends it where that is asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

INSIDE: Final = Path(__file__).with_name("inside")
"""The folder that is put in front of PYTHONPATH."""
ENDS_WITHIN_S: Final = 15.0
"""How long the command, and then its ranks, may take to end after SIGTERM."""


def environment(
    given: Mapping[str, str], folder: Path, beat_s: float, with_steps: bool
) -> dict[str, str]:
    """Returns the environment of a command whose ranks are to be recorded."""
    path = [str(INSIDE), *filter(None, [given.get("PYTHONPATH")])]
    made = {**given, "PYTHONPATH": os.pathsep.join(path)}
    made |= {
        "LIGHTNING_DSGD_TRACE": str(folder.resolve()),
        "LIGHTNING_DSGD_TRACE_BEAT_S": f"{beat_s:g}",
    }
    made.pop("LIGHTNING_DSGD_TRACE_RANK", None)
    if with_steps:
        made["LIGHTNING_DSGD_TRACE_STEPS"] = "1"
    # As many collectives are remembered on each rank, and can be listed within milliseconds.
    made.setdefault("TORCH_FR_BUFFER_SIZE", "300")
    return made


def start(
    command: Sequence[str], folder: Path, beat_s: float, with_steps: bool
) -> subprocess.Popen[bytes]:
    """Starts the command; it has this process's terminal."""
    made = environment(os.environ, folder, beat_s, with_steps)
    return subprocess.Popen([*command], env=made)


def end(process: subprocess.Popen[bytes], ranks: Iterable[int]) -> None:
    """Ends the command by SIGTERM, and what is left of it by SIGKILL: ranks, and what they started.

    A worker of a loader, for one, may outlive its rank, and keep the terminal or a file open.
    """
    started = {pid: _began(pid) for pid in _with_descendants([process.pid, *ranks])}
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN_S)
    for pid, began in started.items():
        # Another process may have the number by now.
        if began is not None and _began(pid) == began:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def exit_status(returned: int) -> int:
    """Returns what a shell would: 128 and the number of the signal that has ended a command."""
    return returned if returned >= 0 else 128 - returned


def _with_descendants(pids: Iterable[int]) -> set[int]:
    """Returns processes, those that they have started, and so on."""
    todo, found = list(pids), set[int]()
    while todo:
        pid = todo.pop()
        if pid in found:
            continue
        found.add(pid)
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                todo += map(int, file.read_text().split())
    return found


def _began(pid: int) -> str | None:
    """Returns when a process was started, in the kernel's ticks; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
