"""How a process that was forked from a rank ends, and how a rank says what became of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any, Final, NoReturn

import torch

_FLUSH_WITHIN_S: Final = 1.0
"""How long a forked process waits for its standard output, whose lock may stay taken for ever."""


def say(text: str) -> None:
    """Prints a line for whoever looks at the job, at once."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def end_fork(exception: BaseException) -> NoReturn:
    """Ends a process that was forked from a rank, as Python would, if it comes out of its step.

    At once, for behind this lies what belongs to the rank, and waits for threads that are not here
    or for other ranks: Lightning's callbacks would save and remove checkpoints, and stop the
    workers of the rank's loaders; Python's end would destroy the process groups of gloo and NCCL,
    which join their threads, and call MPI_Finalize.  How the package's own locks are kept out of
    the child stands in `transport`.
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
