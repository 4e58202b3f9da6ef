"""Workers of a loader outlive the signal by which all ranks of a job are told to stop.

SLURM and Ctrl-C tell every process of a job, and ranks that stop together still need the batches up
to the one after which all stop.  torch ends a worker at its first SIGTERM.  So a worker that is
spared outlives one SIGTERM, and one Ctrl-C as its rank does.  The kernel ends it at the second
SIGTERM, also where it hangs in a library, in which Python calls no handlers.

A worker takes these signals just before it loads.  A signal that comes sooner ends it.

Python sends one SIGTERM to the daemonic children that are there when a process ends, and waits for
them.  Where a process has spared workers, all these children get one before, so that none is waited
for in vain.  A spared worker that hangs outlives torch's own attempt to end it, until then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from torch.utils.data import DataLoader

_libc: Any = ctypes.CDLL(None)
_ARRIVES_WITHIN_S: Final = 0.2
"""How long a signal has to arrive: two that wait at the same time count as one."""


@dataclass
class _Spared:
    """Is called in each worker, which may have been spawned, with the worker's number."""

    then: Callable[[int], None] | None
    """What the user has given."""

    def __call__(self, worker: int) -> None:
        # The kernel calls a handler of System V once; `abs` is one that does nothing.
        _libc.sysv_signal(signal.SIGTERM, _libc.abs)
        signal.siginterrupt(signal.SIGTERM, False)  # what a library reads meanwhile goes on
        signal.signal(signal.SIGINT, _ignore_once)
        if self.then is not None:
            self.then(worker)


def _ignore_once(signum: int, _: Any) -> None:
    signal.signal(signum, signal.default_int_handler)


def spare_workers(loader: object, prepare: Callable[[Any], None] | None = None) -> None:
    """Has a loader's workers, of which it has none yet, outlive one SIGTERM and one Ctrl-C.

    Args:
        loader: any; one that is not torch's is left as it is
        prepare: is called with the loader as the user has made it, and may set `worker_init_fn`
    """
    if isinstance(loader, DataLoader):
        if isinstance(loader.worker_init_fn, _Spared):
            loader.worker_init_fn = loader.worker_init_fn.then
        if prepare is not None:
            prepare(loader)
        loader.worker_init_fn = _Spared(loader.worker_init_fn)
        _tell_twice(os.getpid())


@cache
def _tell_twice(pid: int) -> None:
    """Has this process tell its workers to end before Python does, which tells them once."""
    multiprocessing.util.Finalize(None, _tell, exitpriority=0)


def _tell() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a worker that ends
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + _ARRIVES_WITHIN_S
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
