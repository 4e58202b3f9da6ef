"""Runs a function on every rank of a world that mpiexec has started.

`MPIWorld` and `MPIFitWorld` are what `ProcessWorld` and `FitWorld` are, over MPI.  One job of
mpiexec, an `MPIJob`, runs the functions of many worlds one after another, as starting it is what
takes the time.

The MPI is that of this interpreter's environment, and, where OTHER_MPI_PYTHON names the interpreter
of another environment, with torch and Lightning in it, also the one there.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds import FakeWorld, Outcome, ProcessWorld, ask_gloo, collect, run_joined

ROOT = Path(__file__).parents[2]
SIZE = 4
START_WITHIN_S = 200.0


def mpiexec(python: str) -> Path:
    """The mpiexec that belongs to an interpreter's MPI."""
    return Path(python).parent / "mpiexec"


OTHER = os.environ.get("OTHER_MPI_PYTHON", "")
HAS_WING = importlib.util.find_spec("lightning_dsgd.mpi") is not None
HAS_MPI = (
    HAS_WING and importlib.util.find_spec("mpi4py") is not None and mpiexec(sys.executable).exists()
)
has_mpi = pytest.mark.skipif(
    not HAS_MPI, reason=f"needs mpi4py and {mpiexec(sys.executable)} (the extra `mpi`)"
)
has_other_mpi = pytest.mark.skipif(
    not (OTHER and HAS_WING), reason="OTHER_MPI_PYTHON does not name the python of another MPI"
)
# The interpreters whose environments have an MPI, as parameters of pytest.  Of several workers one
# runs all of an MPI's tests, as they share a job of mpiexec.
PYTHONS = [
    pytest.param(python, id=name, marks=[condition, pytest.mark.xdist_group(name)])
    for name, python, condition in (
        ("mpi", sys.executable, has_mpi),
        ("other_mpi", OTHER, has_other_mpi),
    )
]
every_mpi = pytest.mark.parametrize("python", PYTHONS)


def environment(**variables: str) -> dict[str, str]:
    """This process's, for mpiexec as root with more ranks than cores."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }


def ended(
    command: list[Any], folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command that has come to its end, with these variables beside the others."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 250}
    return subprocess.run(command, cwd=folder, env=environment(**variables), **options)


@dataclass
class MPIJob:
    """The processes of one mpiexec, which wait for something to do; restarted if they died."""

    python: str
    folder: Path
    _process: subprocess.Popen[bytes] | None = None
    _pipes: list[Connection] = field(default_factory=list)
    _num_worlds: int = 0

    def _start(self) -> None:
        address = str(Path(self.folder, f"socket-{self._num_worlds}"))
        with Listener(address, "AF_UNIX", backlog=SIZE) as listener:
            listener._listener._socket.settimeout(START_WITHIN_S)  # type: ignore[attr-defined]
            rank = [self.python, "-m", "tests.support.mpi", address]
            command = [mpiexec(self.python), "-n", str(SIZE), *rank]
            self._process = subprocess.Popen(command, env=environment(), cwd=ROOT)
            pipes = [listener.accept() for _ in range(SIZE)]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def outcomes(
        self, world: ProcessWorld, size: int, fn: Callable[..., Any], args: Any, limit_s: float
    ) -> list[Outcome]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._num_worlds += 1
        store = str(Path(self.folder, f"store-{self._num_worlds}"))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(pickle.dumps((world, size, store, fn, args)))
        outcomes = collect(self._pipes[:size], limit_s)
        if any(outcome.error in ("nothing came back", "died") for outcome in outcomes):
            self.stop()
        return outcomes

    def stop(self) -> None:
        if self._process is None:
            return
        for pipe in self._pipes:
            pipe.close()
        try:
            self._process.wait(60.0)
        finally:
            self._process.terminate()  # Open MPI's launcher, when killed, leaves its ranks behind
            try:
                self._process.wait(20.0)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None


@dataclass
class MPIWorld(ProcessWorld):
    """Up to SIZE of the processes of a job, each with an `MPITransport`."""

    job: MPIJob | None = field(default=None, repr=False)
    native_devices: tuple[str, ...] = ()
    """On which torch's own collectives sum."""
    communicator: Any = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "job": None}

    def _open(self) -> Any:
        if self.native_devices:
            ask_gloo()
        return _transport()(
            self.timeout_s,
            self.heartbeat_timeout_s,
            self.communicator,
            native_devices=self.native_devices,
        )

    def outcomes(
        self, world_size: int, fn: Callable[..., Any], *args: Any, limit_s: float = 250.0
    ) -> list[Outcome]:
        assert self.job is not None
        return self.job.outcomes(self, world_size, fn, args, limit_s)


@dataclass
class FakeMPIWorld(FakeWorld, MPIWorld):
    """The same, each with an accelerator that is none: `fn(net, fake, *args)`."""

    def _open(self) -> Any:
        return _transport()(
            self.timeout_s, self.heartbeat_timeout_s, self.communicator, device=self._device
        )


@dataclass
class MPIFitWorld(MPIWorld):
    """All processes of a job, for `Trainer(devices=SIZE, ...)`: Lightning asks MPI who they are."""

    def _join(self, rank: int, world_size: int, store: str) -> None:
        assert world_size == SIZE

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return fn(*args)


def _transport() -> Any:
    from lightning_dsgd.mpi.wire import MPITransport  # where the wing may be left out

    return MPITransport


def _work(address: str) -> None:
    """One rank of a job: joins those that take part, and calls what comes through the pipe."""
    import torch
    from mpi4py import MPI

    from lightning_dsgd.mpi.job import job

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    job.join(world)  # also where a rank takes part in no world
    pipe = Client(address, "AF_UNIX")
    pipe.send(world.rank)
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        given, size, store, fn, args = pickle.loads(task)
        given.communicator = world.Create_group(world.Get_group().Incl(range(size)))
        run_joined(pipe, given, world.rank, size, store, fn, args)
        given.communicator.Free()


if __name__ == "__main__":
    _work(sys.argv[1])
