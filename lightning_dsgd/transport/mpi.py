"""The network between processes that mpiexec, or srun, has started.

Messages travel by MPI; news of life and death on the connections of the mesh, which are those of
`process_group`: MPI itself does not notice a rank that has stopped, and its launcher kills a job
before it can say which rank died.

    rank i -- one duplicate of MPI_COMM_WORLD --> rank j

One thread per process, the *wire*, receives; it looks for messages again and again, and sleeps
longer the longer none comes, for a blocking receive would take a core from a training thread.  A
message is a header as on the mesh, and the payload:

    up to 4 KiB     header and payload in one MPI message with the tag _FRAME
    above           a frame with the header alone; the payload, in parts of at most 1 GiB, with the
                    tag _PAYLOAD, received right where it belongs

MPI keeps the messages of one pair and one tag in order, so payloads come in the order of their
headers.  Lanes need no communicators of their own: the header names the channel, each mailbox is
filled on its own, and a payload on its way holds up no message of another channel.  A communicator
a lane would have to be duplicated by all ranks in one order, by training threads that must not wait
for each other, and each would have to be looked at in every round.

CUDA tensors are handed to an MPI library that says it is CUDA-aware, else copied through pinned
memory.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.transport import Timeout, TransportError, Work
from lightning_dsgd.transport.endpoint import Done
from lightning_dsgd.transport.process_group import (
    DTYPES,
    FAREWELL,
    HEADER,
    Mesh,
    ProcessGroupTransport,
    Sending,
    bytes_of,
)
from lightning_dsgd.transport.room import copy_of, room

_FRAME, _PAYLOAD = 1, 2  # MPI tags
_FRAME_BYTES: Final = 4096
"""Below what every MPI library sends eagerly, so that a frame never waits for its receiver."""
_PART_BYTES: Final = 1 << 30
"""Counts of MPI before version 4 end at 2^31 - 1."""
_FROM_CUDA: Final = 128  # added to the code of a dtype
_POLLS_IN_A_ROW: Final = 20
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 2e-3
"""How long a message waits for an idle wire; a shorter pause takes more of a core from training."""
_CLOSE_TIMEOUT_S: Final = 5.0
_END_WITHIN_S: Final = 10.0
"""How long a job may take to end once a rank is lost, before it is aborted."""
_HEARD_WITHIN_S: Final = 0.5
"""How long mpiexec may take to pass on what a rank says: aborting loses the rest."""
_SAY_AFTER_S: Final = 60.0
"""How long a rank that has ended well waits for the others in silence."""
_MPIEXEC: Final = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables that an mpiexec sets, and srun does not: that of Open MPI; those of MPICH's kin."""


class MPITransport(ProcessGroupTransport):
    """This process's end of a network over MPI; all ranks open it together.

    The default process group, which must have the ranks of MPI_COMM_WORLD, is where they find each
    other's addresses for news.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        communicator: mpi4py's, of the ranks that take part; None: MPI_COMM_WORLD
    """

    ends_with_peers = True

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        communicator: Any = None,
    ) -> None:
        world = _world_of_threads()
        _job.join(world)  # before the mesh, so that it ends after it
        self._world = world if communicator is None else communicator
        super().__init__(timeout_s, heartbeat_timeout_s, native_devices=())

    def _wire(self) -> str:
        return f"mpi as rank {self._world.Get_rank()} of {self._world.Get_size()}"

    def _check_wires(self, wires: list[str]) -> None:
        super()._check_wires(wires)
        expected = [f"mpi as rank {rank} of {len(wires)}" for rank in range(len(wires))]
        if wires != expected:
            listed = ", ".join(f"{wire} on rank {rank}" for rank, wire in enumerate(wires))
            raise TransportError(
                f'transport="mpi" needs the ranks of MPI_COMM_WORLD, got {listed}; start one '
                f"process a rank with mpiexec -n {len(wires)} (or srun --mpi=pmix), and let no "
                'other launcher number them, or use transport="process_group"'
            )

    def _open_wire(self) -> None:
        if self.world_size > 1:
            self._mesh.wire = _Wire(self._mesh, self._duplicate(), self.rank, self.world_size)

    def _duplicate(self) -> Any:
        """A communicator of our own; collective, but never longer than `timeout_s`."""
        communicator, request = self._world.Idup()
        deadline = time.monotonic() + self.timeout_s
        while not request.Test():
            self._mesh.check("duplicating MPI_COMM_WORLD")
            if time.monotonic() > deadline:
                raise Timeout(
                    f"rank {self.rank} has waited {self.timeout_s:g} s for every rank to duplicate "
                    "MPI_COMM_WORLD"
                )
            time.sleep(_LONGEST_PAUSE_S)
        return communicator

    def close(self) -> None:
        if self._mesh.mailboxes.failure is not None:
            _job.is_broken = True
        super().close()


@dataclass
class _Arriving:
    """A message whose payload is on its way."""

    kind: int
    payload: Tensor
    is_claimed: bool
    num_parts: int


@dataclass
class _Leaving:
    """A message that MPI may still read: keeps its memory."""

    memory: list[Any]
    num_parts: int
    sending: Sending | None = None


@dataclass
class _InFlight:
    """Requests, and what each is a part of; only the thread of the wire may touch them."""

    requests: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def add(self, request: Any, owner: Any) -> None:
        self.requests.append(request)
        self.owners.append(owner)

    def take_done(self) -> list[Any]:
        """What is complete with the last of its parts."""
        if not self.requests:
            return []
        done = _mpi().Request.Testsome(self.requests)
        if not done:
            return []
        finished = []
        for index in done:
            self.owners[index].num_parts -= 1
            if not self.owners[index].num_parts:
                finished.append(self.owners[index])
        left = sorted(set(range(len(self.requests))).difference(done))
        self.requests = [self.requests[index] for index in left]
        self.owners = [self.owners[index] for index in left]
        return finished


class _Wire:
    """Sends for all threads of this process, and receives in one of its own."""

    def __init__(self, mesh: Mesh, communicator: Any, rank: int, world_size: int) -> None:
        self._mesh, self._communicator = mesh, communicator
        self._rank, self._world_size = rank, world_size
        # The device of this thread: the one that receives would take the first of the node.
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else None
        self._memory = Memory(is_cuda_aware(), device)
        self._sending = [threading.Lock() for _ in range(world_size)]
        self._new: deque[tuple[Any, _Leaving]] = deque()
        self._in_flight = _InFlight()
        self._arriving: dict[tuple[int, tuple[int, int]], deque[_Arriving]] = {}
        self._frame = bytearray(_FRAME_BYTES)
        self._status = _mpi().Status()
        self._receiving: tuple[Any, int, int] | None = None  # a frame: request, source, bytes
        self._ending: set[int] = set()  # who has said farewell, behind all else
        self._gone: set[int] = set()  # and whose messages are all here
        self._woken = threading.Event()
        self._closing_at = math.inf
        self._has_ended = False
        self._thread = threading.Thread(target=self._serve, name="dsgd-mpi", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands the message to MPI; the wire's thread sees to its end."""
        if x.is_cuda:
            header = header[:-1] + bytes([header[-1] | _FROM_CUDA])
            x, copy = self._memory.to_send(x, copy=copy)
        if not x.is_cuda and HEADER.size + x.nbytes <= _FRAME_BYTES:
            with self._sending[dst]:
                self._start(b"".join((header, bytes_of(x))), dst, _FRAME, _Leaving([], 1))
            return Done(None)
        x = copy_of(x) if copy else x
        parts = _parts(_memory_of(x))
        sending = Sending(self._mesh, dst, x)
        leaving = _Leaving([x], 1 + len(parts), sending)
        with self._sending[dst]:
            self._start(header, dst, _FRAME, leaving)
            for part in parts:
                self._start(part, dst, _PAYLOAD, leaving)
        self._woken.set()
        if self._has_ended:  # since the mesh was asked: nobody else would say so
            sending.finished.set()
        return Done(None) if copy else sending

    def _start(self, memory: Any, dst: int, tag: int, leaving: _Leaving) -> None:
        leaving.memory.append(memory)
        request = self._communicator.Isend([memory, _mpi().BYTE], dst, tag)
        self._new.append((request, leaving))

    def expect(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._mesh.mailboxes.failure is None:
            farewell = HEADER.pack(0, 0, 0, FAREWELL, 0)
            for rank in range(self._world_size):
                if rank != self._rank:
                    self.send(rank, farewell, torch.empty(0), copy=True)
        self._closing_at = time.monotonic() + _CLOSE_TIMEOUT_S
        self._woken.set()
        self._thread.join()

    # ---- the thread ----

    def _serve(self) -> None:
        try:
            num_idle = 0
            while not self._may_end():
                if self._poll():
                    num_idle = 0
                elif num_idle < _POLLS_IN_A_ROW:
                    num_idle += 1
                    time.sleep(0)  # lets another thread run
                else:
                    num_idle += 1
                    doublings = min(num_idle - _POLLS_IN_A_ROW, 10)
                    pause = min(_SHORTEST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)
                    if self._woken.wait(pause):
                        self._woken.clear()
                        num_idle = 0
        except Exception as error:
            self._mesh.lose(self._rank, f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._end()

    def _may_end(self) -> bool:
        if self._mesh.mailboxes.failure is not None:
            return True
        if self._closing_at == math.inf:
            return False
        return self._is_quiet() or time.monotonic() > self._closing_at

    def _is_quiet(self) -> bool:
        """Whether nothing is in flight, and no rank will send any more."""
        is_empty = not self._new and not self._in_flight.requests
        return is_empty and len(self._gone) == self._world_size - 1

    def _end(self) -> None:
        self._has_ended = True
        if self._is_quiet():
            self._communicator.Free()
            return
        # MPI may still read and write what is in flight; nobody will wait for it.
        _job.kept.append((self._in_flight, list(self._new), self._receiving, self._frame))
        for owner in (*self._in_flight.owners, *(leaving for _, leaving in self._new)):
            if isinstance(owner, _Leaving) and owner.sending is not None:
                owner.sending.finished.set()

    def _poll(self) -> bool:
        """Moves everything on; whether anything has moved."""
        moved = False
        while self._new:
            self._in_flight.add(*self._new.popleft())
        while self._receive_frame():
            moved = True
        for owner in self._in_flight.take_done():
            moved = True
            if isinstance(owner, _Leaving) and owner.sending is not None:
                owner.sending.finished.set()
        if moved:
            self._deliver()
        return moved

    def _receive_frame(self) -> bool:
        """Begins the message of the next frame, if that is here.

        Not a receive from any source that is always posted: over shared memory and a network
        together, MPICH 5.0 hung here.
        """
        mpi = _mpi()
        if self._receiving is None:
            found = self._communicator.Improbe(mpi.ANY_SOURCE, _FRAME, self._status)
            if found is None:
                return False
            source, count = self._status.Get_source(), self._status.Get_count(mpi.BYTE)
            self._receiving = found.Irecv([self._frame, mpi.BYTE]), source, count
        request, source, count = self._receiving
        if not request.Test():
            return False
        self._receiving = None
        self._begin_message(source, self._frame[:count])
        return True

    def _begin_message(self, source: int, frame: bytearray) -> None:
        channel, tag, nbytes, kind, code = HEADER.unpack_from(frame)
        if kind == FAREWELL:
            self._ending.add(source)
            return
        dtype, is_from_cuda = DTYPES[code & ~_FROM_CUDA], bool(code & _FROM_CUDA)
        key = (channel, tag)
        earlier = self._arriving.setdefault((source, key), deque())
        # A receive belongs to the first message of its mailbox, which may be here already.
        may_claim = all(arriving.is_claimed for arriving in earlier)
        into = self._mesh.mailboxes.claim(source, key, dtype, nbytes) if may_claim else None
        payload = into
        if payload is None:
            payload = self._memory.to_receive(
                nbytes // dtype.itemsize, dtype, is_from_cuda=is_from_cuda
            )
        parts = []
        if len(frame) > HEADER.size:
            bytes_of(payload)[:] = memoryview(frame)[HEADER.size :]
        else:
            parts = _parts(_memory_of(payload))
        arriving = _Arriving(kind, payload, into is not None, len(parts))
        earlier.append(arriving)
        for part in parts:
            request = self._communicator.Irecv([part, _mpi().BYTE], source, _PAYLOAD)
            self._in_flight.add(request, arriving)

    def _deliver(self) -> None:
        """Passes on what is here, each mailbox in the order in which its messages were sent."""
        mailboxes = self._mesh.mailboxes
        for (source, key), queue in list(self._arriving.items()):
            while queue and not queue[0].num_parts:
                arrived = queue.popleft()
                mailboxes.deliver(source, key, arrived.kind, arrived.payload)
            if not queue:
                del self._arriving[source, key]
        for source in self._ending - self._gone:
            if not any(sender == source for sender, _ in self._arriving):
                self._gone.add(source)
                mailboxes.break_off(left=source)


@dataclass
class Memory:
    """Where the payload of a message lies while MPI reads or writes it.

    Args:
        is_cuda_aware: whether MPI takes the addresses of CUDA memory
        device: where messages from CUDA memory go that no tensor waits for
    """

    is_cuda_aware: bool
    device: torch.device | None = None

    def to_send(self, x: Tensor, *, copy: bool) -> tuple[Tensor, bool]:
        """A CUDA tensor as MPI takes it, and whether that is yet to be copied."""
        if not self.is_cuda_aware:
            return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x), False
        x = x.clone() if copy else x
        torch.cuda.current_stream(x.device).synchronize()  # MPI knows no streams
        return x, False

    def to_receive(self, numel: int, dtype: torch.dtype, *, is_from_cuda: bool) -> Tensor:
        """Room for a message that no tensor waits for."""
        if not is_from_cuda:
            return room(numel, dtype)
        if not self.is_cuda_aware:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        x = torch.empty(numel, dtype=dtype, device=self.device)
        torch.cuda.current_stream(x.device).synchronize()
        return x


class _Job:
    """What belongs to the process, as MPI does: its end."""

    def __init__(self) -> None:
        self.is_broken = False
        self.kept: list[Any] = []
        self._world: Any = None

    def join(self, world: Any) -> None:
        self.is_broken = False
        if self._world is None:
            self._world = world
            atexit.register(self.end)
            os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        atexit.unregister(self.end)

    def end(self) -> None:
        """Goes to MPI_Finalize, which waits for all ranks, once all go there.

        Once a rank is lost it may never go there: the job is aborted, which ends every process.
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
            time.sleep(_LONGEST_PAUSE_S)

    def _say(self, text: str) -> None:
        print(f"[rank {self._world.Get_rank()}] {text}", file=sys.stderr)  # noqa: T201
        sys.stdout.flush()
        sys.stderr.flush()


_job: Final = _Job()


def launched_size() -> int | None:
    """How many processes an MPI launcher says it has started with this one; None without one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None  # torchrun started this process, whoever started torchrun
    variables = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]  # of Open MPI's mpiexec; of MPICH's, of srun
    if "PMIX_RANK" in os.environ:  # srun --mpi=pmix
        variables.append("SLURM_NTASKS")
    return next((int(os.environ[name]) for name in variables if name in os.environ), None)


def is_usable(world_size: int) -> bool:
    """Whether an MPI launcher started this process in a world of that size that mpi4py has joined.

    Does not touch MPI, whose initialization has side effects, where no launcher of MPI was at work.
    """
    return launched_size() == world_size and _joined_size() == world_size


def check_launch(environment: Any, num_nodes: int, num_devices: int) -> None:
    """Raises, on every rank, unless the Trainer means the processes that an MPI launcher started.

    Args:
        environment: Lightning's ClusterEnvironment, of which MPIEnvironment asks MPI
        num_nodes: the Trainer's
        num_devices: the Trainer's, of one node
    """
    name, launched = type(environment).__name__, launched_size()
    if name == "SLURMEnvironment" and any(variable in os.environ for variable in _MPIEXEC):
        raise ValueError(
            f"mpiexec must number its ranks itself, got {launched} processes of mpiexec that take "
            "their ranks from SLURM_PROCID, which is that of the batch script; start them with "
            "srun instead of mpiexec, or use Trainer(plugins=[MPIEnvironment()]) of "
            "lightning.pytorch.plugins.environments"
        )
    is_of_mpi = name == "MPIEnvironment"
    starts_ranks = name == "LightningEnvironment" and not environment.creates_processes_externally
    if launched is not None and launched > 1 and (is_of_mpi or starts_ranks):
        joined = _joined_size()
        if joined is None:
            raise ValueError(
                f"an MPI launcher has started {launched} processes, but mpi4py cannot be imported "
                "here, so that each would train alone; pip install mpi4py, built for the launcher's"
                " MPI, or start the script without a launcher: Lightning starts its devices itself"
            )
        if joined != launched:
            raise ValueError(
                f"an MPI launcher has started {launched} processes, but mpi4py's MPI library has a "
                f"world of {joined}: they belong to two MPIs; {library()} needs the mpiexec that "
                f"came with it (is it {os.path.join(sys.prefix, 'bin', 'mpiexec')}?); keep one MPI "
                "in an environment"
            )
    if is_of_mpi:
        _check_devices(environment.local_rank(), num_nodes, num_devices)


def _check_devices(local_rank: int, num_nodes: int, num_devices: int) -> None:
    """Raises, on every rank, unless each has a device."""
    mpi = _mpi()
    world_size, most = mpi.COMM_WORLD.Get_size(), array("i", [0])
    mpi.COMM_WORLD.Allreduce(array("i", [local_rank + 1]), most, mpi.MAX)
    if world_size != num_nodes * num_devices or most[0] > num_devices:
        raise ValueError(
            f"each MPI rank needs a device of its own, got {world_size} ranks, up to {most[0]} on "
            f"a node, for devices={num_devices} and num_nodes={num_nodes}; start "
            f"{num_nodes * num_devices} ranks, {num_devices} on each node, or set "
            f"devices={most[0]} and num_nodes={-(-world_size // most[0])}"
        )


def _joined_size() -> int | None:
    """The size of MPI_COMM_WORLD; None without mpi4py, or with it but without an MPI library."""
    try:
        return int(_mpi().COMM_WORLD.Get_size())
    except (ImportError, RuntimeError):
        return None


def is_cuda_aware() -> bool:
    """Whether the MPI library says that it takes the addresses of CUDA memory."""
    try:
        library = ctypes.CDLL(_mpi().__file__)
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):  # it has no such question
        return False


def library() -> str:
    """The MPI library that mpi4py has loaded, and where from."""
    return str(_mpi().Get_library_version().splitlines()[0].strip())


def _world_of_threads() -> Any:
    """MPI_COMM_WORLD, if its library lets all threads of a process call it."""
    try:
        mpi = _mpi()
    except (ImportError, RuntimeError) as err:
        raise TransportError(
            'transport="mpi" needs mpi4py and an MPI library, got '
            f"{type(err).__name__}: {err}; pip install mpi4py mpich, or use "
            'transport="process_group"'
        ) from err
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        names = {
            mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
            mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
            mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        }
        raise TransportError(
            f'transport="mpi" needs MPI_THREAD_MULTIPLE, got {names[level]} from {library()}; '
            "unset MPI4PY_RC_THREAD_LEVEL and leave mpi4py.rc.thread_level alone, take an MPI "
            'library built with threads, or use transport="process_group"'
        )
    return mpi.COMM_WORLD


def _mpi() -> Any:
    """mpi4py's module, whose import initializes MPI."""
    from mpi4py import MPI

    return MPI


def _memory_of(x: Tensor) -> Any:
    """The memory of a contiguous tensor, as mpi4py takes it."""
    return x.detach().view(torch.uint8) if x.is_cuda else bytes_of(x)


def _parts(memory: Any) -> list[Any]:
    return [memory[at : at + _PART_BYTES] for at in range(0, len(memory), _PART_BYTES)]
