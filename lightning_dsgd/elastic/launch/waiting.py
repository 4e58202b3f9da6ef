"""The process that has imported what ranks need, and waits until ranks are asked of it.

    its imports are done    it says whether it may fork
    a rank is asked for     it forks, and the child becomes the rank; where it may not fork, it
                            becomes the rank itself; but not before the supervisor has heard which
                            process that is, as one that has waited too long starts another
    its supervisor ends     it ends

**Why forking is safe here.**  A child of `fork` has one thread, and copies of all locks.  Here
no other thread can have held one, as this process has one thread: it only imports, and waits for
one message at a time.  A pool of OpenMP's threads would be missing in the child, but an import
computes nothing, so there is none; and `why_no_fork` counts the threads, those of other libraries
too.  CUDA's driver does not survive a fork once it was asked for anything: where it is loaded, this
process does not fork.

**What a rank finds** is what a new interpreter finds: its script is `__main__`, with the same
arguments, folder, paths, descriptors, signals and exit statuses.  What imports have read of a
process's rank or its entropy is read again (`_forget_the_others`).

**Whose child a rank is.**  The supervisor's, which is told when a rank ends: the process forks
twice, and the supervisor adopts whom the one in between leaves behind.  So this process may end
without its ranks.

Threads: one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


def main() -> None:
    """Runs in the interpreter that the supervisor starts; becomes a rank in the end."""
    descriptor, modules, *words = sys.argv[1:]
    sock = socket.socket(fileno=int(descriptor))
    try:
        for name in modules.split(","):
            importlib.import_module(name)
    except Exception as error:
        _say(sock, {"failed": f"{name}: {type(error).__name__}: {error}"})
        raise
    why = why_no_fork()
    gc.collect()
    gc.freeze()  # so that a collection in a rank does not copy what is shared
    _say(sock, {"why_no_fork": why})
    asked = _wait(sock, forks=not why)
    sock.close()
    _become(asked, words)


def why_no_fork() -> str:
    """Returns why this process must not fork; empty if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"its imports have started {threads - 1} threads"
    if b"/libcuda.so" in Path("/proc/self/maps").read_bytes():
        return "its imports have loaded CUDA's driver"
    return ""


def _say(sock: socket.socket, words: dict[str, Any]) -> None:
    sock.send(json.dumps(words).encode())


def _wait(sock: socket.socket, *, forks: bool) -> dict[str, Any]:
    """Waits until a rank is asked for; returns in the process that becomes it."""
    while True:  # without a time-out: a supervisor's end ends it
        text, given, _, _ = socket.recv_fds(sock, MOST_BYTES, 1)
        if not text:
            os._exit(0)
        pid = _fork_for_the_supervisor() if forks else os.getpid()
        if pid:
            _say(sock, {"pid": pid})
        if not pid or not forks:
            if not os.read(given[0], 1):  # the supervisor has given this process up
                os._exit(1)
            os.close(given[0])
            asked: dict[str, Any] = json.loads(text)
            return asked
        os.close(given[0])


def _fork_for_the_supervisor() -> int:
    """Forks; returns 0 in the child, whose parent is the supervisor, and here the child's id."""
    supervisor, (read, write) = os.getppid(), os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        with os.fdopen(read) as pipe:
            pid = pipe.read()
        os.waitpid(between, 0)
        return int(pid)
    between, pid_of_child = os.getpid(), os.fork()
    if pid_of_child:
        os.write(write, str(pid_of_child).encode())
        os._exit(0)
    os.close(read)
    os.close(write)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0005)  # it is ending
    end_with_parent()
    if os.getppid() != supervisor:  # the supervisor has ended meanwhile
        os._exit(1)
    return 0


def end_with_parent() -> None:
    """Has this process get SIGTERM when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _become(asked: dict[str, Any], words: list[str]) -> None:
    """Runs the script, or the module, as the `__main__` of this process."""
    log = os.open(asked["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(asked["variables"])
    _forget_the_others(int(asked["variables"]["RANK"]))
    sys.orig_argv[:] = [sys.executable, "-u", *words]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        _run(words[0])


def _forget_the_others(rank: int) -> None:
    """Does again what an import does for a process of its own: its rank, and random states."""
    lightning: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    if lightning is not None and hasattr(lightning.rank_zero_only, "rank"):
        lightning.rank_zero_only.rank = rank
    # The generator of Python's `random` begins anew in a child by itself; these two do not.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _run(script: str) -> None:
    """Runs a file as Python does, and shows its errors without the frames of this module."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    module.__dict__.update(
        __annotations__={}, __builtins__=sys.modules["builtins"], __cached__=None
    )
    sys.modules["__main__"] = module
    code = None
    try:
        source = Path(script).read_bytes()
        code = compile(source, module.__file__, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except BaseException:
        shown = sys.excepthook

        def show(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
            while trace is not None and trace.tb_frame.f_code is not code:
                trace = trace.tb_next
            shown(kind, error.with_traceback(trace), trace)

        sys.excepthook = show
        raise
