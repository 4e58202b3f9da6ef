"""Writes what one rank does: a small file that a thread of the rank writes anew at each beat.

    rank_00002.json     who the rank is, where it stands, whether it works, how it has ended
    rank_00002.stacks   the stacks of its threads, at the watcher's signal
    rank_00002.fatal    the stacks at SIGTERM, or at a fatal signal such as SIGSEGV

None of them grows with the run.  The watcher asks by a number in the file `asked`; the thread
answers at its next beat, with the recent collectives.  The thread cannot write while the program
keeps Python's lock: then the watcher sends a signal, at which `faulthandler` writes the stacks
without that lock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from lightning_dsgd_rank.groups import Groups
from lightning_dsgd_rank.work import Work

FOLDER = "LIGHTNING_DSGD_TRACE"
BEAT_S = "LIGHTNING_DSGD_TRACE_BEAT_S"
FORMAT = "lightning_dsgd rank 1"
ASKED = "asked"
"""The file with the number of the watcher's last question."""
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Asks for the stacks: of the signals that programs use for themselves it is the least likely."""
_MOST_TEXT = 2000
_MOST_FRAMES = 60


class Recorder:
    """Records what this process does as one rank.

    Args:
        folder: where the ranks' files lie
        rank: this rank's number
        world_size: how many ranks there are, if it is known yet
    """

    def __init__(self, folder: str, rank: int, world_size: int | None) -> None:
        self._folder = Path(folder)
        self._pid = os.getpid()
        self._beat_s = float(os.environ.get(BEAT_S, "1"))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._rank = rank
        self._state: dict[str, Any] = {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            "pid": self._pid,
            "host": socket.gethostname(),
            "boot": _boot(),
            "began_unix_s": time.time(),
            "beat_s": self._beat_s,
            "beat": 0,
            "main": f"{threading.main_thread().ident:#x}",
            "script": sys.orig_argv[:8],
            "folder": os.getcwd(),
            "stage": "starting",
            "answered": 0,
        }
        self._groups = Groups()
        self._work = Work()
        self._stacks: Any = None
        self._fatal: Any = None

    def begin(self) -> None:
        """Writes the first record, and starts the thread that writes the others."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open()
        atexit.register(self._end)
        self._write()
        threading.Thread(target=self._run, name="lightning_dsgd why", daemon=True).start()

    def _open(self) -> None:
        name = f"rank_{self._rank:05d}"
        self.path = self._folder / f"{name}.json"
        # Appended to: the signal's handler writes at the file's end, wherever the thread has been.
        self._stacks = open(self._folder / f"{name}.stacks", "ab", 0)  # noqa: SIM115
        self._stacks.truncate(0)
        self._fatal = open(self._folder / f"{name}.fatal", "ab", 0)  # noqa: SIM115
        self._fatal.truncate(0)
        if threading.current_thread() is not threading.main_thread():
            return
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        self._state["signal"] = int(STACKS_SIGNAL)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # The rank still ends by the signal: the default follows.
            faulthandler.register(signal.SIGTERM, self._fatal, all_threads=True, chain=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(self._fatal, all_threads=True)

    # ---- what the rank does ----

    def joins(self, world_size: int | None) -> None:
        """Records that the rank has called `init_process_group`, and where."""
        frames = _frames_of_main()  # it may end before the first beat
        known = world_size or self._state["world_size"]
        self._tell(stage="joining", world_size=known, frames=frames)

    def has_joined(self, rank: int, world_size: int) -> None:
        """Records that the rank is one of a process group."""
        if rank != self._rank:  # the launcher's number was another one
            with self._lock, contextlib.suppress(OSError):
                self.path.unlink()
                self._rank = rank
                self._open()
        self._groups.has_begun = True
        self._tell(stage="joined", rank=rank, world_size=world_size, frames=_frames_of_main())

    def has_steps(self, text: str) -> None:
        """Records why the steps of this rank are not recorded, or not any more."""
        self._tell(steps=text[:_MOST_TEXT])

    def leave(self) -> None:
        """Ends recording in a forked child, which has the parent's files."""
        self._over.set()
        atexit.unregister(self._end)

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._state.update(changes)
        self._write()

    def _run(self) -> None:
        while not self._over.wait(self._beat_s):
            try:
                self._beat()
            except Exception as error:  # a full disk, or a torch whose records have another form
                self._state["trouble"] = repr(error)[:_MOST_TEXT]

    def _beat(self) -> None:
        asked = self._asked()
        is_asked = asked != self._state["answered"]
        seen = self._groups.look(with_recent=is_asked) | self._work.look()
        with self._lock:
            self._state["beat"] += 1
            self._state["answered"] = asked
            self._state["frames"] = _frames_of_main()
            self._state.update(seen)
        self._write()

    def _asked(self) -> int:
        try:
            return int((self._folder / ASKED).read_text() or 0)
        except (OSError, ValueError):
            return 0

    def _write(self) -> None:
        """Puts the new record in the old one's place, so that no reader sees half of it."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            made = self.path.with_suffix(".new")
            made.write_text(json.dumps(self._state))
            os.replace(made, self.path)

    # ---- how it ends ----

    def _end(self) -> None:
        """Records how the program has ended; Python calls it when the main thread is through."""
        if os.getpid() != self._pid:
            return
        self._over.set()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        ended: dict[str, Any] = {"how": "left", "unix_s": time.time()}
        if error is not None:
            ended |= {"how": "raised", "error": _described(error), "frames": _frames_of(error)}
        with contextlib.suppress(Exception):
            self._tell(ended=ended, **self._groups.look(with_recent=True))


def _frames_of_main() -> list[tuple[str, int, str]]:
    """Returns where the main thread is: file, line and function, the innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _described(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return text[:_MOST_TEXT]


def _frames_of(error: BaseException) -> list[tuple[str, int, str]]:
    """Returns where an error was raised: file, line and function, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.lineno or 0, f.name) for f in reversed(frames)][:_MOST_FRAMES]


def _boot() -> str:
    """Returns a name of this machine since it was started; a container may have the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
