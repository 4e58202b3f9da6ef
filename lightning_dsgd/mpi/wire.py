"""The network between processes that mpiexec, or srun, has started.

Messages travel by MPI; news of life and death on the connections of the mesh: MPI itself does not
notice a rank that has stopped, and its launcher kills a job before it can say which rank died.

    rank i -- one duplicate of MPI_COMM_WORLD --> rank j

One thread per process, the *wire*, receives; it looks for messages again and again, and sleeps
longer the longer none comes, for a blocking receive would take a core from a training thread.  A
message is a header as on the mesh, and the payload:

    up to 4 KiB     header and payload in one MPI message with the tag _FRAME
    above           a frame with the header alone; the payload, in chunks of at most 1 GiB, with the
                    tag _PAYLOAD, received right where it belongs

MPI keeps the messages of one pair and one tag in order, so payloads come in the order of their
headers.  Lanes need no communicators of their own: the header names the channel, each mailbox is
filled on its own, and a payload on its way holds up no message of another channel.  A communicator
a lane would have to be duplicated by all ranks in one order, by training threads that must not wait
for each other, and each would have to be looked at in every round.

Tensors on a device are handed to an MPI library that says it is CUDA-aware once they are complete,
else copied through pinned memory (`staging`); either beside the training.  Sums are NCCL's there
(`process_group`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.buffers import buffer, copy_of
from lightning_dsgd.devices import COLLECTIVES, SHORTEST_PAUSE_S, is_on_host
from lightning_dsgd.mpi.job import LONGEST_PAUSE_S, is_cuda_aware, job
from lightning_dsgd.transport.contract import Timeout, TransportError, Work, failed
from lightning_dsgd.transport.mailboxes import Key
from lightning_dsgd.transport.mesh import CLOSE_TIMEOUT_S, Mesh
from lightning_dsgd.transport.messages import (
    DTYPES,
    FAREWELL,
    FROM_DEVICE,
    HEADER,
    bytes_of,
    from_device,
)
from lightning_dsgd.transport.mpi_job import load_mpi, world_of_threads
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.processes import CPU
from lightning_dsgd.transport.staging import Staging
from lightning_dsgd.transport.wire import Wire
from lightning_dsgd.transport.works import Done, Sending

_FRAME, _PAYLOAD = 1, 2  # MPI tags
_FRAME_BYTES: Final = 4096
"""Every MPI library sends so little eagerly, so that a frame never waits for its receiver."""
_CHUNK_BYTES: Final = 1 << 30
"""The most bytes of a chunk: counts of MPI before version 4 end at 2^31 - 1."""
_POLLS_IN_A_ROW: Final = 20


class MPITransport(ProcessGroupTransport):
    """This process's end of a network over MPI; all ranks open it together.

    The default process group, which must have the ranks of MPI_COMM_WORLD, is where they find each
    other's addresses for news.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        communicator: mpi4py's communicator of the ranks that take part; None: MPI_COMM_WORLD
        device: the device that this rank computes on
        native_devices: see `ProcessGroupTransport`
    """

    ends_with_peers = True

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        communicator: Any = None,
        device: torch.device = CPU,
        native_devices: Collection[str] = COLLECTIVES,
    ) -> None:
        world = world_of_threads()
        job.join(world)  # before the network, so that it ends after it
        wire = MPIWire(world if communicator is None else communicator)
        super().__init__(timeout_s, heartbeat_timeout_s, native_devices, wire, device)

    def close(self) -> None:
        if self.mesh.mailboxes.failure is not None:
            job.is_broken = True
        super().close()


class MPIWire(Wire):
    """Carries messages by MPI: all threads of this process send, a thread of its own receives.

    Any thread may send: `_sending` keeps the messages to each rank in order, and what MPI is to
    report of them goes to the wire's thread through `_new`, a deque, whose single operations the
    interpreter's lock keeps whole.  The wire's thread alone receives, and has all other fields from
    its start on; `_closing_at` and `_has_ended` are single references that one thread writes.

    Args:
        world: the communicator of the ranks that take part
    """

    engine = "MPI"

    _mesh: Mesh

    def __init__(self, world: Any) -> None:
        self._world = world
        self._world_size = world.Get_size()
        self._sending = [threading.Lock() for _ in range(self._world_size)]
        self._new: deque[tuple[Any, Leaving]] = deque()
        self._in_flight = InFlight()
        self._arriving: dict[tuple[int, Key], deque[Arriving]] = {}
        self._frame = bytearray(_FRAME_BYTES)
        self._status = load_mpi().Status()
        self._receiving: tuple[Any, int, int] | None = None  # a frame: request, source, bytes
        self._ending: set[int] = set()  # ranks that have said farewell, behind all else
        self._gone: set[int] = set()  # ranks among these whose messages are all here
        self._woken = threading.Event()
        self._closing_at = math.inf
        self._has_ended = False
        self._thread: threading.Thread | None = None

    # ---- in the thread that opens and closes the network ----

    @property
    def name(self) -> str:
        """The name by which users choose this wire, and what MPI says of this rank."""
        return f"mpi as rank {self._world.Get_rank()} of {self._world_size}"

    def check_names(self, names: list[str]) -> None:
        """Raises unless MPI's ranks are the ranks of the process group."""
        expected = [f"mpi as rank {rank} of {len(names)}" for rank in range(len(names))]
        if names != expected:
            listed = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names))
            raise TransportError(
                f'transport="mpi" needs the ranks of MPI_COMM_WORLD, got {listed}; start one '
                f"process a rank with mpiexec -n {len(names)} (or srun --mpi=pmix), and let no "
                'other launcher number them, or use transport="process_group"'
            )

    def open(self, mesh: Mesh) -> None:
        """Duplicates the communicator, which all ranks do together, and starts the thread."""
        self._mesh = mesh
        self._communicator = self._duplicate()
        self.reads_devices = is_cuda_aware()
        self._staging = Staging(
            mesh, lambda dst: _Outlet(self, dst), whole=True, direct=self.reads_devices
        )
        self._thread = threading.Thread(target=self._serve, name="dsgd-mpi", daemon=True)
        self._thread.start()

    def _duplicate(self) -> Any:
        """Returns our own communicator; all ranks make it together, within `timeout_s`."""
        communicator, request = self._world.Idup()
        deadline = time.monotonic() + self._mesh.timeout_s
        while not request.Test():
            self._mesh.check("duplicating MPI_COMM_WORLD")
            if time.monotonic() > deadline:
                raise Timeout(
                    f"rank {self._mesh.rank} has waited {self._mesh.timeout_s:g} s for every rank "
                    "to duplicate MPI_COMM_WORLD"
                )
            time.sleep(LONGEST_PAUSE_S)
        return communicator

    def close(self) -> bool:
        """Says farewell behind the last message and ends, at once if a rank is lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        self._staging.close()
        if self._mesh.mailboxes.failure is None:
            farewell = HEADER.pack(0, 0, 0, FAREWELL, 0)
            for rank in range(self._world_size):
                if rank != self._mesh.rank:
                    self.send_now(rank, farewell, torch.empty(0), copy=True)
        self._closing_at = time.monotonic() + CLOSE_TIMEOUT_S
        self._woken.set()
        thread.join()
        return True

    # ---- from any thread ----

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands the message to MPI; the wire's thread sees to the message's end."""
        if self._staging.admit_past(dst, header, x):
            return self.send_now(dst, header, x, copy=copy)
        header = header if is_on_host(x) else from_device(header)
        return self._staging.send(dst, header, x, copy=copy)

    def send_now(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Sends what MPI may read at once: host memory, or a device's if MPI takes that."""
        if is_on_host(x) and HEADER.size + x.nbytes <= _FRAME_BYTES:
            with self._sending[dst]:
                self._start(b"".join((header, bytes_of(x))), dst, _FRAME, Leaving([], 1))
            return Done(None)
        x = copy_of(x) if copy else x
        chunks = chunks_of(memory_of(x))
        sending = Sending(self._mesh, dst, x)
        leaving = Leaving([x], 1 + len(chunks), sending)
        with self._sending[dst]:
            self._start(header, dst, _FRAME, leaving)
            for chunk in chunks:
                self._start(chunk, dst, _PAYLOAD, leaving)
        self._woken.set()
        if self._has_ended:  # since the mesh was asked; no thread would end this send
            sending.finish()
        return Done(None) if copy else sending

    def _start(self, memory: Any, dst: int, tag: int, leaving: Leaving) -> None:
        leaving.memory.append(memory)
        request = self._communicator.Isend([memory, load_mpi().BYTE], dst, tag)
        self._new.append((request, leaving))

    def expect(self) -> None:
        """Has the wire's thread look for messages at once."""
        self._woken.set()

    # ---- the thread ----

    def _serve(self) -> None:
        port = self._mesh.port
        try:
            port.enter()
            with port.using(port.new()):  # its memory is read by nothing that is queued elsewhere
                self._serve_all()
        except Exception as error:
            self._mesh.lose(self._mesh.rank, failed(error))
            raise
        finally:
            self._end()

    def _serve_all(self) -> None:
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
                pause = min(SHORTEST_PAUSE_S * 2**doublings, LONGEST_PAUSE_S)
                if self._woken.wait(pause):
                    self._woken.clear()
                    num_idle = 0

    def _may_end(self) -> bool:
        if self._mesh.mailboxes.failure is not None:
            return True
        if self._closing_at == math.inf:
            return False
        return self._is_quiet() or time.monotonic() > self._closing_at

    def _is_quiet(self) -> bool:
        """Returns whether nothing is in flight, and no rank will send any more."""
        is_empty = not self._new and not self._in_flight.requests
        return is_empty and len(self._gone) == self._world_size - 1

    def _end(self) -> None:
        self._has_ended = True
        if self._is_quiet():
            self._communicator.Free()
            return
        # MPI may still read and write what is in flight; nobody will wait for it.
        job.kept.append((self._in_flight, list(self._new), self._receiving, self._frame))
        for owner in (*self._in_flight.owners, *(leaving for _, leaving in self._new)):
            if isinstance(owner, Leaving) and owner.sending is not None:
                owner.sending.finish()

    def _poll(self) -> bool:
        """Moves everything on; returns whether anything has moved."""
        moved = False
        while self._new:
            self._in_flight.add(*self._new.popleft())
        while self._receive_frame():
            moved = True
        for owner in self._in_flight.take_done():
            moved = True
            if isinstance(owner, Leaving) and owner.sending is not None:
                owner.sending.finish()
        if moved:
            self._deliver()
        return moved

    def _receive_frame(self) -> bool:
        """Begins the message of the next frame; returns whether a frame was here.

        A receive from any source that is always posted would do the same; but over shared memory
        and a network together, MPICH 5.0 hung in one here.
        """
        mpi = load_mpi()
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
        if not self._mesh.accept(source, nbytes, kind, code & ~FROM_DEVICE):
            return
        dtype, numel = DTYPES[code & ~FROM_DEVICE], nbytes // DTYPES[code & ~FROM_DEVICE].itemsize
        key = (channel, tag)
        earlier = self._arriving.setdefault((source, key), deque())
        # A receive belongs to the first message of its mailbox, which may be here already.
        may_claim = all(arriving.is_claimed for arriving in earlier)
        expected = self._mesh.mailboxes.claim(source, key, dtype, nbytes) if may_claim else None
        payload = None if expected is None else expected.into
        if payload is None:
            payload = self._memory_for(numel, dtype, is_from_device=bool(code & FROM_DEVICE))
        chunks = []
        if len(frame) > HEADER.size:
            bytes_of(payload)[:] = memoryview(frame)[HEADER.size :]
        else:
            chunks = chunks_of(memory_of(payload))
        arriving = Arriving(kind, payload, expected is not None, len(chunks))
        earlier.append(arriving)
        for chunk in chunks:
            request = self._communicator.Irecv([chunk, load_mpi().BYTE], source, _PAYLOAD)
            self._in_flight.add(request, arriving)

    def _memory_for(self, numel: int, dtype: torch.dtype, *, is_from_device: bool) -> Tensor:
        """Returns memory for a message; on a device only this thread's stream has used it."""
        device = self._mesh.port.device
        if is_from_device and self.reads_devices and device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return buffer(numel, dtype)

    def _deliver(self) -> None:
        """Delivers what is here, each mailbox in the order in which its messages were sent."""
        mailboxes = self._mesh.mailboxes
        for (source, key), queue in list(self._arriving.items()):
            while queue and not queue[0].num_chunks:
                arrived = queue.popleft()
                mailboxes.deliver(source, key, arrived.kind, arrived.payload)
            if not queue:
                del self._arriving[source, key]
        for source in self._ending - self._gone:
            if not any(sender == source for sender, _ in self._arriving):
                self._gone.add(source)
                mailboxes.break_off(left=source)


class _Outlet:
    """Hands the stager's messages to one rank to MPI, each message whole."""

    def __init__(self, wire: MPIWire, dst: int) -> None:
        self._wire, self._dst = wire, dst
        self._header = b""

    def begin(self, header: bytes) -> None:
        self._header = header

    def add(self, chunk: Tensor, *, is_last: bool) -> Work[None]:
        assert is_last
        return self._wire.send_now(self._dst, self._header, chunk, copy=False)


@dataclass
class Arriving:
    """A message whose payload is on its way."""

    kind: int
    payload: Tensor
    is_claimed: bool
    num_chunks: int


@dataclass
class Leaving:
    """A message that MPI may still read, and its memory."""

    memory: list[Any]
    num_chunks: int
    sending: Sending | None = None


@dataclass
class InFlight:
    """The requests under way, and each one's message; only the wire's thread may touch them."""

    requests: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def add(self, request: Any, owner: Any) -> None:
        """Adds a request, which is one chunk of its owner, a message."""
        self.requests.append(request)
        self.owners.append(owner)

    def take_done(self) -> list[Any]:
        """Takes out and returns the messages whose last chunk is complete."""
        if not self.requests:
            return []
        done = load_mpi().Request.Testsome(self.requests)
        if not done:
            return []
        finished = []
        for index in done:
            self.owners[index].num_chunks -= 1
            if not self.owners[index].num_chunks:
                finished.append(self.owners[index])
        left = sorted(set(range(len(self.requests))).difference(done))
        self.requests = [self.requests[index] for index in left]
        self.owners = [self.owners[index] for index in left]
        return finished


def memory_of(x: Tensor) -> Any:
    """Returns the memory of a contiguous tensor, as mpi4py takes it."""
    return bytes_of(x) if is_on_host(x) else x.detach().view(torch.uint8)


def chunks_of(memory: Any) -> list[Any]:
    """Returns memory in pieces that MPI can count."""
    return [memory[at : at + _CHUNK_BYTES] for at in range(0, len(memory), _CHUNK_BYTES)]
