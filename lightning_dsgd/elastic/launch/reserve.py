"""The process from which ranks start that need import nothing any more, as the supervisor sees it.

    begin    starts the process: `waiting`
    look     hears whether its imports are done
    take     returns the process of a rank, or None where it has to start by itself

Where the process may not fork, as its imports have started threads or as there is a GPU, it becomes
one rank itself, and another one begins.

Threads: the supervisor's.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_dsgd.elastic.launch.waiting import MOST_BYTES, end_with_parent

IMPORTS: Final = (
    "lightning.pytorch", "lightning_dsgd.trainer.named", "lightning_dsgd.elastic.members",
    "lightning_dsgd.elastic.trainer",
)  # fmt: skip
_LIBRARIES: Final = ("torch", "numpy", "lightning", "pytorch_lightning", "lightning_dsgd")
_SETTERS: Final = (
    *("environ.update", "environ.setdefault", "environ.pop", "putenv", "load_dotenv"),
    *("sys.path.insert", "sys.path.append", "sys.path.extend"),
)
_DEVICES: Final = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
_ANSWER_WITHIN_S: Final = 10.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_MAIN: Final = (
    "import sys; first = sys.argv.pop(1); sys.path[:1] = [first] if first else sys.path[:1]; "
    "from lightning_dsgd.elastic.launch.waiting import main; main()"
)
"""Nothing is imported before the path is what the rank's own interpreter would have."""
_libc: Final = ctypes.CDLL(None)


class Process(Protocol):
    """A rank's process: `subprocess.Popen`, or one that was adopted."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """Returns the exit status once the process has ended."""
        ...

    def wait(self) -> int:
        """Waits for the end, and returns the exit status."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the process."""
        ...


class Adopted:
    """A process that another one has forked and left to this one.

    Args:
        pid: the process's number
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status once the process has ended."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Waits for the end, and returns the exit status."""
        status = self._wait(0)
        assert status is not None
        return status

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # its status went to nobody, where SIGCHLD is ignored
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class Reserve:
    """The process that waits; the head of the file tells how.

    Args:
        words: the command of a rank behind the interpreter: a script or `-m`, and its arguments
        imports: the modules that it imports
        logs: the folder for what it writes
    """

    def __init__(self, words: Sequence[str], imports: Sequence[str], logs: Path) -> None:
        self._words, self._imports, self._log = words, imports, logs / "reserve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self.is_ready = False
        """Whether the imports are done."""
        self.why_no_fork = ""

    @property
    def has_begun(self) -> bool:
        """Whether there is such a process."""
        return self._process is not None

    def begin(self, variables: dict[str, str]) -> None:
        """Starts the process, with these variables, which all ranks of the node have."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.is_ready = False
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-u", "-c", _MAIN, _first_on_the_path(self._words[0])]
        words += [str(theirs.fileno()), ",".join(self._imports)]
        with theirs:
            command, shared = [*words, *self._words], [theirs.fileno()]
            self._process = started(command, variables, self._log, shared)

    def look(self) -> None:
        """Hears, without waiting, whether the imports are done.

        Raises:
            ValueError: if a module cannot be imported
        """
        if self._sock is None or self.is_ready:
            return
        try:
            self._sock.settimeout(0.0)
            text = self._sock.recv(MOST_BYTES)
        except (BlockingIOError, ConnectionError):
            text = b"" if self._process is not None and self._process.poll() is not None else b"{}"
        said = json.loads(text) if text else {"failed": f"its process has ended: {self._log}"}
        if "failed" in said:
            self.end()
            raise ValueError(
                f"--imports must name modules that can be imported, got {said['failed']}; name "
                'others, or none: --imports ""'
            )
        if said:
            self.is_ready, self.why_no_fork = True, said["why_no_fork"]

    def take(self, variables: dict[str, str], log: Path) -> Process | None:
        """Returns the process of a rank, which writes to that file; None if there is none ready."""
        with contextlib.suppress(ValueError):  # said at the next look
            self.look()
        if not self.is_ready or self._sock is None or self._process is None:
            return None
        asked = {"variables": variables, "log": str(log.absolute())}
        theirs, ours = os.pipe()
        try:
            self._sock.settimeout(_ANSWER_WITHIN_S)
            socket.send_fds(self._sock, [json.dumps(asked).encode()], [theirs])
            pid = int(json.loads(self._sock.recv(MOST_BYTES))["pid"])
            os.write(ours, b"y")
        except (OSError, ValueError):  # it has ended, or does not answer
            self.end()
            return None
        finally:
            os.close(theirs)
            os.close(ours)
        if pid != self._process.pid:
            return Adopted(pid)
        process, self._process = self._process, None
        self.end()
        return process

    def end(self) -> None:
        """Ends the process, but not the ranks that have come of it."""
        self.is_ready = False
        if self._sock is not None:
            self._sock.close()
        process, self._process, self._sock = self._process, None, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def started(
    command: Sequence[str], variables: dict[str, str], log: Path, shared: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one, in a session of its own.

    Args:
        command: what it runs
        variables: its variables besides this process's
        log: the file for what it writes
        shared: descriptors of this process that it keeps
    """
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=shared,
        )


def _first_on_the_path(script: str) -> str:
    """Returns the folder that an interpreter puts before all others; empty where it puts none."""
    if sys.flags.safe_path:
        return ""
    return os.getcwd() if script == "-m" else str(Path(script).resolve().parent)


def die_with_parent() -> None:
    """Has this child die with its parent; called before the child becomes the rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts what is in its background without
    end_with_parent()


def has_device() -> bool:
    """Returns whether this machine has a GPU, whose driver does not survive a fork."""
    return any(device.exists() for device in _DEVICES)


def has_to_import_by_itself(script: Path) -> bool:
    """Returns whether a script arranges variables or paths before it imports a library.

    What is no Python file has to run in an interpreter of its own, too.
    """
    if script.suffix != ".py":
        return True
    try:
        statements = ast.parse(script.read_bytes()).body
    except (SyntaxError, ValueError):
        return False  # the ranks say so
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in statement.names]
            names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else names
            if any(name.partition(".")[0] in _LIBRARIES for name in names):
                return False
        elif any(map(_sets, ast.walk(statement))):
            return True
    return False


def _sets(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        is_set = not isinstance(node.ctx, ast.Load)
        return is_set and ast.unparse(node.value).endswith("environ")
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(ast.unparse(target).endswith(("environ", "sys.path")) for target in targets)
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_SETTERS)
