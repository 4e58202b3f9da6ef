"""How a process that was forked from a rank ends, and how a rank says what became of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any, Final, NoReturn

import torch

from lightning_dsgd.transport import Transport, TransportError, failed

_ALIKE_WITHIN_S: Final = 1.0
"""How long a rank that fails before training waits to see whether all do."""
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
    """Ends a process that was forked from a rank by a signal; a loader's worker by the second one.

    Ranks that are told to stop go on to a common batch, for which they need their loaders.
    """
    signal.signal(signum, signal.SIG_DFL)
    if not is_loaders_worker():
        os.kill(os.getpid(), signum)


def is_loaders_worker() -> bool:
    """Returns whether this process is a worker of a DataLoader."""
    return torch.utils.data.get_worker_info() is not None
