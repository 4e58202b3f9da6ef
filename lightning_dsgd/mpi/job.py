"""How a process that sends by MPI ends in its job, and what its MPI library can do."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from typing import Any, Final

from lightning_dsgd.transport.mpi_job import load_mpi

LONGEST_PAUSE_S: Final = 2e-3
"""The longest pause between two looks at MPI; a shorter one takes more of a core."""
_END_WITHIN_S: Final = 10.0
"""How long a job may take to end once a rank is lost, before it is aborted."""
_HEARD_WITHIN_S: Final = 0.5
"""How long mpiexec may take to pass on what a rank says: aborting loses the rest."""
_SAY_AFTER_S: Final = 60.0
"""How long a rank that has ended well waits for the others in silence."""


class Job:
    """How this process ends in its MPI job: one for the process, as there is one MPI.

    The training thread joins it; `end` runs at the exit of the process, when the threads of MPI's
    wires have ended.  A wire's thread adds to `kept`, once, before it ends.
    """

    def __init__(self) -> None:
        self.is_broken = False
        """Whether a rank is lost, so that not every rank may come to the end."""
        self.kept: list[Any] = []
        """The memory that MPI may still read and write."""
        self._world: Any = None

    def join(self, world: Any) -> None:
        """Has the process wait for all ranks of the job before it ends."""
        self.is_broken = False
        if self._world is None:
            self._world = world
            atexit.register(self.end)
            os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        atexit.unregister(self.end)

    def end(self) -> None:
        """Waits until all ranks go to MPI_Finalize, which waits for all of them.

        A lost rank may never go there: then the job is aborted, which ends every process.
        """
        request = self._world.Ibarrier()
        begin, is_said = time.monotonic(), False
        while not request.Test():
            waited_s = time.monotonic() - begin
            if self.is_broken and waited_s > _END_WITHIN_S:
                self._say(f"not every rank has ended within {waited_s:.0f} s: aborting the MPI job")
                time.sleep(_HEARD_WITHIN_S)
                self._world.Abort(1)
            if not is_said and waited_s > _SAY_AFTER_S:
                self._say("waits for every other rank to end, as MPI processes end together")
                is_said = True
            time.sleep(LONGEST_PAUSE_S)

    def _say(self, text: str) -> None:
        print(f"[rank {self._world.Get_rank()}] {text}", file=sys.stderr)  # noqa: T201
        sys.stdout.flush()
        sys.stderr.flush()


job: Final = Job()


def is_cuda_aware() -> bool:
    """Returns whether the MPI library says that it takes the addresses of CUDA memory."""
    try:
        library = ctypes.CDLL(load_mpi().__file__)
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):  # the library has no such question
        return False
