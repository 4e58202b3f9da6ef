"""Runs something in a process group of its own, with a hard end, and yields its rows as they come.

    this process                       its child, forked, with a process group of its own
    fork                 -->           clears the launcher's variables
    reads the file       <-- a file    each row is one line, written at once
    kills all that is left             ends, or does not

Nobody waits for ever: this process reads a file and asks whether the child has ended, and neither
waits.  After `limit_s` it stops asking.  However the child has ended, all that it has started is
killed: this process adopts orphans (`PR_SET_CHILD_SUBREAPER`), so each of them is a descendant of
this process, whatever session or group it is in.  So this process must have no other children.

Where this process is killed itself, the kernel kills the child (`PR_SET_PDEATHSIG`), and what the
child has started is left to whoever has killed.

A fork has torch and Lightning loaded already.  It can use CUDA only if this process has not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

Row = dict[str, Any]
GONE_WITHIN_S: Final = 5.0
"""How long killed processes may take to be gone: one that waits for a driver cannot be killed."""
OF_LAUNCHERS: Final = (
    *("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "TORCHELASTIC_"),
    *("SLURM_", "PMI_", "PMIX_", "OMPI_", "NCCL_", "GLOO_", "CUDA_DEVICE_MAX", "CUDA_LAUNCH"),
    *("TORCH_NCCL_", "LIGHTNING_", "PL_", "TORCH_CUDA_SANITIZER"),
)
"""What the names of variables begin with that no part inherits."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PAUSE_S: Final = 0.02
_told: list[Path] = []
"""The file for rows, in a child and in what it forks."""


def tell(row: Row) -> None:
    """Hands a row over; any process that the child has forked may."""
    with _told[-1].open("ab", buffering=0) as file:  # one write, so that rows stay whole
        file.write(json.dumps(row).encode() + b"\n")


def rows(work: Callable[[], Iterable[Row]], limit_s: float, log: Path | None) -> Iterator[Row]:
    """Yields what `work` yields and what its ranks tell, and at its end an error, if there is one.

    Args:
        work: runs in the child
        limit_s: after how long the child is killed, with all that it has started
        log: takes what they print; None: nothing of it is redirected
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as folder:
        path, begin = Path(folder, "rows"), time.monotonic()
        path.touch()
        sys.stdout.flush(), sys.stderr.flush()  # else the child would print it, too
        child = os.fork()
        if not child:
            _work_and_end(work, path, log)
        try:
            with path.open() as file:
                yield from _follow(child, file, begin + limit_s, limit_s)
        finally:
            left = end_descendants()
        if left:
            yield {"error": f"{len(left)} processes cannot be killed: {left}"}


def _follow(child: int, file: IO[str], end: float, limit_s: float) -> Iterator[Row]:
    begun = ""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        *lines, begun = (begun + file.read()).split("\n")
        yield from map(json.loads, lines)
        if ended:
            if os.WIFSIGNALED(status):
                yield {"error": f"died of {signal.Signals(os.WTERMSIG(status)).name}"}
            return
        if time.monotonic() > end:
            yield {"error": f"ended by force after {limit_s:.0f} s"}
            return
        time.sleep(_PAUSE_S)


def _work_and_end(work: Callable[[], Iterable[Row]], path: Path, log: Path | None) -> None:
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
            del os.environ[name]
        if log is not None:
            with log.open("ab") as into:
                os.dup2(into.fileno(), 1), os.dup2(into.fileno(), 2)
        _told.append(path)
        for row in work():
            tell(row)
    except BaseException as error:
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # nothing of the parent's is to be wound up here


# ---- the end of processes ----


def end_descendants() -> list[int]:
    """Kills all that this process has started, and what that has started; returns what is left."""
    end = time.monotonic() + GONE_WITHIN_S
    while True:
        _reap()
        left = descendants()
        if not left or time.monotonic() > end:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_S)


def descendants() -> list[int]:
    """Returns all processes whose parent is this one, or a descendant of it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, next_ones = [], children.get(os.getpid(), [])
    while next_ones:
        found += next_ones
        next_ones = [child for pid in next_ones for child in children.get(pid, [])]
    return found


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
