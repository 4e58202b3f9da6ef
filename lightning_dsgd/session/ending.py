"""How a rank's process ends, how a process that was forked from it ends, and how a rank says why.

A rank whose training thread hangs in a library does not notice the loss of another rank: then
`LastResort` ends its process.

Threads: the training thread and signal handlers call the functions.  With `LastResort` the mesh's
thread tells of the loss, and starts a timer; the timer's thread reads the session's phase.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any, Final, NoReturn

import torch

from lightning_dsgd.session.phases import Phase
from lightning_dsgd.transport import PeerLost, Transport, TransportError, failed

_ALIKE_WITHIN_S: Final = 1.0
"""How long a rank that fails before training waits to see whether all do."""
NOTICE_WITHIN_S: Final = 15.0
"""How long a training thread may take to notice a loss before its process is ended."""
_SIGNUM: Final = "ended_by"
"""The attribute of what a rank raises after a signal that holds the signal's number."""
_FLUSH_WITHIN_S: Final = 1.0
"""How long a forked process waits for its standard output, whose lock may stay taken for ever."""


def say(text: str) -> None:
    """Prints a line for whoever looks at the job, at once."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def ended_by(signum: int, kind: type[BaseException], begin: str, end: str = "") -> BaseException:
    """Returns what a rank raises to end after a signal.

    Args:
        signum: the signal, which `reason_of` reads
        kind: the class of what is raised
        begin: the text before the signal's name
        end: the text after it
    """
    exception = kind(f"{begin} {signal.Signals(signum).name}{end}")
    vars(exception)[_SIGNUM] = signum
    return exception


def reason_of(exception: BaseException, rank: int) -> str:
    """Says what became of a rank, for the others, who put its name before the text."""
    if isinstance(exception, KeyboardInterrupt):
        return "was interrupted"
    if vars(exception).get(_SIGNUM) == signal.SIGTERM:
        return str(exception).removeprefix(f"rank {rank} ")
    return failed(exception)


def all_fail(net: Transport) -> bool:
    """Returns whether every rank fails, as where all refuse their options and say so themselves."""
    try:
        net.sub("failing").barrier().wait(_ALIKE_WITHIN_S)
    except TransportError:
        return False
    return True


def end_fork(exception: BaseException) -> NoReturn:
    """Ends a process that was forked from a rank, and that an exception has led out of the step.

    It prints what Python would, and ends at once.  The code behind the step belongs to the rank
    alone, and would wait for threads that this process does not have, or for other ranks:
    Lightning's callbacks would save and remove checkpoints, and stop the workers of the rank's
    loaders; Python's end would destroy the process groups of gloo and NCCL, which join their
    threads, and call MPI_Finalize.  `transport` says how the package's own locks are kept out of
    this process.
    """
    code: Any = 1
    if isinstance(exception, SystemExit):
        code = 0 if exception.code is None else exception.code
    else:
        text = traceback.format_exception(exception)
        code = "".join([f"Process {os.getpid()}, forked from process {os.getppid()}:\n", *text])
    if not isinstance(code, int):
        os.write(2, f"{code}\n".encode())  # not sys.stderr, which has a lock too
        code = 1
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_WITHIN_S)
    os._exit(code & 0xFF)


def end_fork_by(signum: int) -> None:
    """Ends a process that was forked from a rank by a signal; `data.workers` spares workers."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def is_loaders_worker() -> bool:
    """Returns whether this process is a worker of a DataLoader."""
    return torch.utils.data.get_worker_info() is not None


class LastResort:
    """Ends a rank's process if the training thread, which may hang in a library, misses a loss."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._timer: threading.Timer | None = None

    def await_notice(self, lost: PeerLost) -> None:
        """Ends this process after a while, unless the training thread notices the loss."""
        session = self._session
        net = session.net_if_open  # the training thread may close it at any moment
        if net is not None and net.ends_with_peers:
            say(f"[rank {session.rank}] {lost}")
        session.quiet_observer()
        if net is not None:  # else training is over
            self._timer = threading.Timer(NOTICE_WITHIN_S, self._end, [lost])
            self._timer.daemon = True
            self._timer.start()

    def _end(self, lost: PeerLost) -> None:
        session = self._session
        if session.is_open and session.phase is not Phase.BROKEN:  # also in another view by now
            say(
                f"[rank {session.rank}] ends: {lost}, and training did not come back to notice "
                f"within {NOTICE_WITHIN_S:g} s"
            )
            session.end_children()
            os._exit(1)

    def cancel(self) -> None:
        """Cancels the timer, as training is over and the network closed."""
        if self._timer is not None:
            self._timer.cancel()
