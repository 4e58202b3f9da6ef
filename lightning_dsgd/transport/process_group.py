"""The network between processes that torch.distributed has joined.

Messages travel on TCP connections of our own; the process group is where ranks find each other's
addresses, and, on CUDA, what sums dense tensors (NCCL).  Why not gloo's send and receive: they can
neither be polled nor cancelled, and do not notice a dead peer.

    rank i -- connection i to j, made when i first sends to j --> rank j

One thread per process, the *mesh*, moves all bytes that a caller could not move at once.  A receive
that was posted before its message came is filled in place.  A message is a header and the payload:

    channel, tag     which mailbox               kind     message, or which collective
    dtype, nbytes    what follows

**Who is alive.**  Every rank keeps a connection to rank 0 and back, and both ends speak up every
`heartbeat_timeout_s / 4`.  A connection that ends without a farewell, or a silence longer than
`heartbeat_timeout_s`, is a lost rank; whoever notices tells all that it can reach, and rank 0 tells
everyone.  A rank that fails says so itself, with its reason.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import fcntl
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.transport import (
    ANY,
    Counters,
    Lane,
    LaneStopped,
    PeerLost,
    Timeout,
    TransportError,
    Work,
)
from lightning_dsgd.transport.endpoint import Done, Endpoint, check_message, describe
from lightning_dsgd.transport.room import copy_of, room

HEADER: Final = struct.Struct("<qqQBB")
_HELLO: Final = struct.Struct("<16sI")
_HEARTBEAT, FAREWELL, _LOST = 253, 254, 255  # kinds of control frames
DTYPES: Final = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_EMPTY: Final = torch.empty(0, dtype=torch.uint8)
_CARD_BYTES: Final = 256
_STAGING_BYTES: Final = 1 << 16
_READS_IN_A_ROW: Final = 16
_SIOCGIFADDR: Final = 0x8915
_CONNECT_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 5.0
_SWITCH_INTERVAL_S: Final = 0.0005
"""How soon the mesh gets the interpreter from a thread that runs Python (by default: 5 ms)."""

_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class ProcessGroupTransport(Endpoint):
    """This process's end of a network over the default process group; all ranks open it together.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        native_devices: device types whose world-wide all-reduces from the training thread go
            through torch's own collectives
    """

    ends_with_peers = False
    """Whether the launcher ends this process when another rank dies, in the midst of its work."""

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        native_devices: Sequence[str] = ("cuda",),
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout_s, Counters())
        self._lane: _Lane | None = None
        self._native_devices = frozenset(native_devices)
        # Made before anything can use it, and on all ranks alike.
        native = self.world_size > 1 and _group_device() in self._native_devices
        self._native: Any = dist.new_group() if native else None
        self._mesh = Mesh(self.rank, self.world_size, timeout_s, heartbeat_timeout_s)
        try:
            self._mesh.open(self._wire(), self._check_wires)
            self._open_wire()
            self.sub("opening").barrier().wait()  # nobody leaves before all have found each other
        except BaseException as exception:
            self.fail(f"failed: {type(exception).__name__}: {exception}")
            raise

    def _wire(self) -> str:
        """What carries this rank's messages; its first word is the same on all ranks."""
        return "process_group"

    def _check_wires(self, wires: list[str]) -> None:
        """Raises, on every rank, unless all send their messages the same way."""
        kinds = [wire.split()[0] for wire in wires]
        if len(set(kinds)) > 1:
            listed = ", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds))
            raise TransportError(
                f"the transport must be the same on all ranks, got {listed}; name it: "
                'transport="process_group" or "mpi"'
            )

    def _open_wire(self) -> None:
        """Makes what carries messages instead of the mesh's connections."""

    def now(self) -> float:
        return time.monotonic()

    def check(self) -> None:
        self._mesh.check("a check between two steps")

    def on_lost(self, callback: Callable[[PeerLost], None]) -> None:
        """Has the mesh's thread call `callback` when another rank is lost; at once if it is."""
        self._mesh.on_lost = callback
        lost = self._mesh.mailboxes.failure
        if lost is not None and lost.rank != self.rank:
            callback(lost)

    @contextlib.contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """Around another library's collective: raises `PeerLost` if it failed for a lost rank."""
        try:
            yield
        except RuntimeError:
            self._mesh.await_verdict()
            self._mesh.check(what)
            raise

    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed, and closes."""
        self._mesh.lose(self.rank, reason)
        self.close()

    def close(self) -> None:
        """Says farewell and ends the mesh; no other rank may still need this one."""
        self._mesh.close()
        if self._native is not None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self._native)
            self._native = None

    def sub(self, name: str) -> ProcessGroupTransport:
        return self._at(f"{self.path}/{name}")

    def _at(self, path: str) -> ProcessGroupTransport:
        twin = copy.copy(self)  # the same mesh
        Endpoint.__init__(twin, self.rank, self.world_size, self.timeout_s, self.counters, path)
        return twin

    def _start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        return _Lane(self._at(name), fn)

    def is_native(self, device: torch.device) -> bool:
        """Whether all-reduces of all ranks go through a collective of torch's own there."""
        return self._native is not None and device.type in self._native_devices

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        if group is not None or self._lane is not None or not self.is_native(x.device):
            return super().all_reduce(x, group)
        self.check()
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        self.counters.bytes_sent += 2 * y.nbytes * (self.world_size - 1) // self.world_size
        self.counters.messages_sent += 2 * (self.world_size - 1)
        return _NativeWork(dist.all_reduce(y, group=self._native, async_op=True), x, y, self)

    def _post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        self._mesh.check(f"sending to rank {dst}")
        if dst == self.rank:
            self._mesh.mailboxes.deliver(dst, (channel, tag), kind, x.detach().clone())
            return Done(None)
        self.counters.bytes_sent += x.nbytes
        self.counters.messages_sent += 1
        header = HEADER.pack(channel, tag, x.nbytes, kind, _CODES[x.dtype])
        return self._mesh.send(dst, header, x, copy=copy)

    def _collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> _Receipt:
        return _Receipt(self, like, src, channel, tag, kind, into)


class _NativeWork:
    """A collective of torch's own; on CUDA, `wait` holds up the stream and not the caller."""

    def __init__(self, work: Any, x: Tensor, y: Tensor, net: ProcessGroupTransport) -> None:
        self._work, self._x, self._y, self._net = work, x, y, net
        self._begin = time.monotonic()

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> Tensor:
        begin = time.monotonic()
        with self._net.blaming("all_reduce over all ranks"):
            self._work.wait()
        if self._y is not self._x:
            self._x.copy_(self._y)
        self._net.counters.wait_s += time.monotonic() - begin
        self._net.counters.comm_s += time.monotonic() - self._begin
        return self._x


class _Receipt:
    """A receive: waits in its mailbox until the mesh fills it."""

    def __init__(
        self,
        net: ProcessGroupTransport,
        like: Tensor,
        src: int,
        channel: int,
        tag: int,
        kind: int,
        into: Tensor | None,
    ) -> None:
        self.source = src
        self.key = (channel, tag)
        self.wanted = src
        self.into = into if into is not None and not into.is_cuda else None
        self.claimed = False
        self.arrived = threading.Event()
        self.payload: Tensor | None = None
        self.kind = kind
        self.failure: BaseException | None = None
        self._net, self._like, self._into, self._kind = net, like, into, kind
        self._begin = self._end = time.monotonic()
        self._waited = False
        self._posted = True
        net._mesh.mailboxes.collect(self)

    def fill(self, source: int, kind: int, payload: Tensor) -> None:
        self.source, self.kind, self.payload = source, kind, payload
        self._end = time.monotonic()
        self.arrived.set()

    def break_off(self, failure: BaseException) -> None:
        self.failure = failure
        self.arrived.set()

    def describe(self) -> str:
        return describe(self._net.path, self.wanted, self.key[1], self._kind)

    def done(self) -> bool:
        if self._net._lane is not None:
            self._net._lane.check_stop()
        return self.arrived.is_set()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        net, lane = self._net, self._net._lane
        limit = min(net.timeout_s if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)
        if not self._posted:  # it was given up before
            self._posted = True
            net._mesh.mailboxes.collect(self)
        if not self.arrived.is_set():
            begin = time.monotonic()
            if lane is not None:
                lane.waiting = self
                lane.check_stop()
            net._mesh.expect()
            in_time = self.arrived.wait(limit)
            if lane is None:
                net.counters.wait_s += time.monotonic() - begin
            else:
                lane.waiting = None
            if not in_time:
                self._posted = not net._mesh.mailboxes.withdraw(self)
                # What cannot be withdrawn is half read: its end may be near.
                if not self._posted or not self.arrived.wait(limit):
                    raise Timeout(f"rank {net.rank} has waited {limit:g} s for {self.describe()}")
        if self.failure is not None:
            net._mesh.mailboxes.withdraw(self)
            if isinstance(self.failure, PeerLost):
                raise PeerLost(self.failure.rank, self.failure.reason, self.describe())
            raise self.failure
        payload = self.payload
        assert payload is not None
        if not self._waited:
            self._waited = True
            net.counters.comm_s += self._end - self._begin
            check_message(
                self._like,
                self._into,
                payload.dtype,
                payload.numel(),
                self.source,
                (self.kind, self._kind),
            )
            if self._into is not None and payload.data_ptr() != self._into.data_ptr():
                self._into.copy_(payload)
            if payload.device != self._like.device:
                self.payload = payload = payload.to(self._like.device)
        return payload if self._into is None else self._into


class _Mailboxes:
    """Messages that nobody has asked for yet, and receives whose message has not come yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[tuple[int, int], deque[tuple[int, int, Tensor]]] = {}
        self._posted: dict[tuple[int, int], list[_Receipt]] = {}
        self.left: set[int] = set()
        self.failure: PeerLost | None = None

    def collect(self, receipt: _Receipt) -> None:
        with self._lock:
            queue = self._arrived.get(receipt.key, ())
            for place, (source, kind, payload) in enumerate(queue):
                if receipt.wanted in (ANY, source):
                    del queue[place]  # type: ignore[union-attr]
                    if not queue:
                        del self._arrived[receipt.key]
                    receipt.fill(source, kind, payload)
                    return
            self._posted.setdefault(receipt.key, []).append(receipt)
            self._break_off_if_vain(receipt)

    def claim(
        self, source: int, key: tuple[int, int], dtype: torch.dtype, nbytes: int
    ) -> Tensor | None:
        """The tensor that waits for a message, if one does, to read it straight into."""
        with self._lock:
            for receipt in self._posted.get(key, ()):
                if receipt.wanted in (ANY, source) and not receipt.claimed:
                    into = receipt.into
                    if into is None or into.dtype != dtype or into.nbytes != nbytes:
                        break
                    receipt.claimed = True
                    receipt.wanted = source
                    return into
        return None

    def deliver(self, source: int, key: tuple[int, int], kind: int, payload: Tensor) -> None:
        with self._lock:
            posted = self._posted.get(key, [])
            for place, receipt in enumerate(posted):
                if receipt.wanted in (ANY, source):
                    del posted[place]
                    if not posted:
                        del self._posted[key]
                    receipt.fill(source, kind, payload)
                    return
            self._arrived.setdefault(key, deque()).append((source, kind, payload))

    def withdraw(self, receipt: _Receipt) -> bool:
        """Takes a receive back; False if its message has come or is being read into it."""
        with self._lock:
            posted = self._posted.get(receipt.key, [])
            if receipt.claimed or receipt not in posted:
                return False
            posted.remove(receipt)
            if not posted:
                del self._posted[receipt.key]
            return True

    def break_off(self, failure: PeerLost | None = None, left: int | None = None) -> None:
        """Fails the receives that have become vain: all, or those that want a rank that left."""
        with self._lock:
            if failure is not None:
                self.failure = failure
            if left is not None:
                self.left.add(left)
            for posted in self._posted.values():
                for receipt in posted:
                    self._break_off_if_vain(receipt)

    def _break_off_if_vain(self, receipt: _Receipt) -> None:
        if self.failure is not None:
            receipt.break_off(self.failure)
        elif receipt.wanted in self.left:
            receipt.break_off(PeerLost(receipt.wanted, "has left (its training is over)"))


class _Connection:
    """One TCP connection.

    Messages travel on the one that their sender made, news of life and death (heartbeat, farewell,
    loss) in both directions.
    """

    def __init__(self, mesh: Mesh, sock: socket.socket, rank: int = -1) -> None:
        self.rank = rank  # -1: unknown until the hello
        self.is_ending = False  # the peer has said farewell on it
        self.sock = sock
        self._mesh = mesh
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, Sending | None]] = deque()
        self._staging = bytearray(_STAGING_BYTES)
        self._filled = 0
        self._header: tuple[int, int, int, int, int] | None = None
        self._payload = _EMPTY
        self._target = memoryview(b"")
        self._read = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)

    # ---- sending, from any thread ----

    def send(self, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands over what the connection takes at once; the mesh's thread sends the rest."""
        if x.is_cuda:
            x, copy = x.cpu(), False
        payload = bytes_of(x)
        with self._lock:
            sent = 0 if self._queue else self._try_send([memoryview(header), payload])
            if sent == len(header) + len(payload):
                return Done(None)
            if sent < len(header):
                self._queue.append((memoryview(header)[sent:], None))
            rest = payload[max(0, sent - len(header)) :]
            sending = Sending(self._mesh, self.rank, x)
            if copy:
                rest = bytes_of(copy_of(x.detach().view(torch.uint8)[x.nbytes - len(rest) :]))
            self._queue.append((rest, sending))
        self._mesh.attend(self)
        return Done(None) if copy else sending

    def flush(self) -> bool:
        """Sends what the connection takes; True when nothing is left."""
        with self._lock:
            while self._queue:
                sent = self._try_send([part for part, _ in list(self._queue)[:16]])
                while self._queue and sent >= len(self._queue[0][0]):
                    part, sending = self._queue.popleft()
                    sent -= len(part)
                    if sending is not None:
                        sending.finished.set()
                if self._queue:
                    part, sending = self._queue[0]
                    self._queue[0] = (part[sent:], sending)
                    if not sent:
                        return False
            return True

    def drop_queue(self) -> None:
        """Nobody will read what is left."""
        with self._lock:
            while self._queue:
                sending = self._queue.popleft()[1]
                if sending is not None:
                    sending.finished.set()

    def _try_send(self, parts: list[memoryview]) -> int:
        try:
            return self.sock.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The reading side finds out what became of the peer, and says so.
            return sum(len(part) for part in parts)

    # ---- receiving, in the mesh's thread ----

    def read(self) -> bool:
        """Reads what has come and cuts it into messages; False at the end of the stream."""
        for _ in range(_READS_IN_A_ROW):
            direct = self._header is not None and len(self._target) - self._read >= _STAGING_BYTES
            target = (
                self._target[self._read :] if direct else memoryview(self._staging)[self._filled :]
            )
            try:
                count = self.sock.recv_into(target)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            if not count:
                return False
            self._mesh.hear(self.rank)
            if direct:
                self._read += count
                self._end_message_if_read()
            else:
                self._filled += count
                if not self._cut():
                    return False
        return True

    def _cut(self) -> bool:
        """Takes hello, headers and payloads out of the staging area."""
        staging, at = memoryview(self._staging), 0
        while True:
            left = self._filled - at
            if self.rank < 0:
                if left < _HELLO.size:
                    break
                token, rank = _HELLO.unpack_from(staging, at)
                at += _HELLO.size
                if not secrets.compare_digest(token, self._mesh.token):
                    return False
                self.rank = rank
            elif self._header is None:
                if left < HEADER.size:
                    break
                self._begin_message(HEADER.unpack_from(staging, at))
                at += HEADER.size
            else:
                count = min(left, len(self._target) - self._read)
                if not count:
                    break
                self._target[self._read : self._read + count] = staging[at : at + count]
                self._read += count
                at += count
            self._end_message_if_read()
        self._staging[: self._filled - at] = staging[at : self._filled]
        self._filled -= at
        return True

    def _begin_message(self, header: tuple[int, int, int, int, int]) -> None:
        channel, tag, nbytes, kind, code = self._header = header
        if kind >= _HEARTBEAT:
            self._payload = torch.empty(nbytes, dtype=torch.uint8)
        else:
            dtype = DTYPES[code]
            into = self._mesh.mailboxes.claim(self.rank, (channel, tag), dtype, nbytes)
            self._payload = room(nbytes // dtype.itemsize, dtype) if into is None else into
        self._target = bytes_of(self._payload)
        self._read = 0

    def _end_message_if_read(self) -> None:
        if self._header is None or self._read < len(self._target):
            return
        channel, tag, _, kind, _ = self._header
        payload = self._payload
        self._header, self._payload, self._target = None, _EMPTY, memoryview(b"")
        if kind >= _HEARTBEAT:
            self._mesh.hear_news(self, kind, tag, bytes(payload.numpy()))
        else:
            self._mesh.mailboxes.deliver(self.rank, (channel, tag), kind, payload)


class Sending:
    """The rest of a message, on its way; keeps its tensor alive."""

    def __init__(self, mesh: Mesh, rank: int, x: Tensor) -> None:
        self.finished = threading.Event()
        self._mesh, self._rank, self._x = mesh, rank, x

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        what = f"rank {self._rank} to take a message"
        limit = self._mesh.timeout_s if timeout_s is None else timeout_s
        if not self.finished.wait(limit):
            raise Timeout(f"rank {self._mesh.rank} has waited {limit:g} s for {what}")
        self._mesh.check(what)


class Wire(Protocol):
    """What carries messages instead of the mesh's connections, which then carry only news.

    It delivers to the mesh's mailboxes, and gives up by itself once these have failed.
    """

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Starts sending; messages for one channel and tag arrive in order."""
        ...

    def expect(self) -> None:
        """Somebody has begun to wait for a message."""
        ...

    def close(self) -> None:
        """Says farewell behind the last message, and ends; at once if a rank is lost."""
        ...


class Mesh:
    """All connections of this process, and the thread that serves them."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, heartbeat_timeout_s: float
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.token = b""
        self.mailboxes = _Mailboxes()
        self.wire: Wire | None = None
        self.on_lost: Callable[[PeerLost], None] | None = None
        self._world_size = world_size
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watched = range(1, world_size) if rank == 0 else range(1)  # whose silence we notice
        self._heard: dict[int, float] = {}
        self._addresses: list[tuple[str, int]] = []
        self._outgoing: dict[int, _Connection] = {}
        self._incoming: list[_Connection] = []
        self._connecting = threading.Lock()
        self._to_attend: deque[_Connection] = deque()
        self._losing = threading.Lock()
        self._verdict = threading.Event()
        self._closing_at = float("inf")
        self._thread: threading.Thread | None = None
        self._switch_interval_s = sys.getswitchinterval()

    def open(self, wire: str, check_wires: Callable[[list[str]], None]) -> None:
        """Connects, unless the check of what every rank says of its wire raises."""
        if self._world_size == 1:
            return
        _allow_open_files(4 * self._world_size + 256)
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=self._world_size)
        here = {
            "host": host,
            "port": self._listener.getsockname()[1],
            "token": secrets.token_hex(16),
            "wire": wire,
        }
        entries = _gather_json(here)
        try:
            check_wires([str(entry["wire"]) for entry in entries])
        except TransportError:
            self._listener.close()
            raise
        self._addresses = [(str(entry["host"]), int(entry["port"])) for entry in entries]
        self.token = bytes.fromhex(
            entries[0]["token"]
        )  # known to the ranks only: lets no stranger in
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        _meshes.add(self)
        atexit.register(self.end)
        sys.setswitchinterval(min(self._switch_interval_s, _SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._serve, name="dsgd-mesh", daemon=True)
        self._thread.start()
        for peer in self._watched:
            self.outgoing(peer)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.end)
        if self.wire is not None:
            self.wire.close()
        self._say_farewell()
        self._closing_at = time.monotonic() + _CLOSE_TIMEOUT_S
        self._wake()
        thread.join()
        sys.setswitchinterval(self._switch_interval_s)

    def end(self) -> None:
        """The process ends; its other threads live on while it waits for child processes."""
        self.lose(self.rank, "ended before it had closed its network")
        self.close()

    # ---- failure ----

    def check(self, waited_for: str) -> None:
        lost = self.mailboxes.failure
        if lost is not None:
            raise PeerLost(lost.rank, lost.reason, waited_for)

    def await_verdict(self) -> None:
        """Gives the mesh the time to find out which rank another library's error is about."""
        self._verdict.wait(self._heartbeat_timeout_s)

    def lose(self, rank: int, reason: str) -> None:
        """A rank is gone: fails all waits here and tells the others; only the first loss counts."""
        with self._losing:
            if self.mailboxes.failure is not None:
                return
            failure = PeerLost(rank, reason)
            self.mailboxes.break_off(failure)
        if self.on_lost is not None and rank != self.rank:
            self.on_lost(failure)  # first: an MPI launcher ends this process within milliseconds
        for connection in self._connections():
            if connection.rank == rank != self.rank:
                connection.drop_queue()
        self._announce(_LOST, _encode([rank, reason]))
        self._verdict.set()

    def hear(self, rank: int) -> None:
        self._heard[rank] = time.monotonic()

    def hear_news(self, connection: _Connection, kind: int, tag: int, text: bytes) -> None:
        if kind == FAREWELL:
            connection.is_ending = True
            if not tag:
                self.mailboxes.break_off(left=connection.rank)
        elif kind == _LOST:
            rank, reason = json.loads(text)
            self.lose(int(rank), str(reason))

    def _say_farewell(self) -> None:
        """On every connection; its tag is 1 where another one may still bring messages of ours."""
        lost = self.mailboxes.failure
        if lost is not None:  # so that whoever has connected since does not take us for the cause
            self._announce(_LOST, _encode([lost.rank, lost.reason]))
        for connection in self._connections():
            if connection.rank >= 0:
                ours = self._outgoing.get(connection.rank, connection)
                is_last = ours is connection and self.wire is None
                header = HEADER.pack(0, int(not is_last), 0, FAREWELL, 0)
                connection.send(header, _EMPTY, copy=True)

    def _announce(self, kind: int, text: Tensor) -> None:
        header = HEADER.pack(0, 0, len(text), kind, 0)
        for connection in self._connections():
            if connection.rank >= 0:
                connection.send(header, text, copy=True)

    # ---- connections ----

    def _connections(self) -> list[_Connection]:
        return [*self._outgoing.values(), *self._incoming]

    def outgoing(self, rank: int) -> _Connection:
        if rank in self._outgoing:
            return self._outgoing[rank]
        with self._connecting:
            if rank not in self._outgoing:
                try:
                    sock = socket.create_connection(self._addresses[rank], _CONNECT_TIMEOUT_S)
                    sock.sendall(_HELLO.pack(self.token, self.rank))
                except OSError as err:
                    host, port = self._addresses[rank]
                    self.lose(
                        rank,
                        f"cannot be reached at {host}:{port}: {err}; if that is not its address "
                        "here, set GLOO_SOCKET_IFNAME there",
                    )
                    self.check(f"connecting to rank {rank}")
                    raise
                connection = _Connection(self, sock, rank)
                self._outgoing[rank] = connection
                self.attend(connection)
            return self._outgoing[rank]

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Sends a message, by the wire if there is one."""
        if self.wire is not None:
            return self.wire.send(dst, header, x, copy=copy)
        return self.outgoing(dst).send(header, x, copy=copy)

    def expect(self) -> None:
        """Has the wire look out for a message that somebody waits for."""
        if self.wire is not None:
            self.wire.expect()

    def attend(self, connection: _Connection) -> None:
        """Has the thread look after a connection that is new or has something left to send."""
        self._to_attend.append(connection)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake anyway
            self._wake_write.send(b"\0")

    # ---- the thread ----

    def _serve(self) -> None:
        period = self._heartbeat_timeout_s / 4
        next_beat = time.monotonic() + period
        try:
            while not self._may_end():
                now = time.monotonic()
                if now >= next_beat:
                    # A thread that was itself held up must not judge the silence of others.
                    self._beat(judge=now < next_beat + period)
                    next_beat = now + period
                patience = 0.05 if self._closing_at < float("inf") else next_beat - now
                for key, events in self._selector.select(max(0.0, patience)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_read:
                        self._wake_read.recv(4096)
                    else:
                        self._serve_connection(key.data, events)
                while self._to_attend:
                    self._watch(self._to_attend.popleft())
        except Exception as error:
            self.lose(self.rank, f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            for connection in self._connections():
                connection.drop_queue()  # whoever waits for the rest of a message has its answer
            self.close_files()
            self._selector.close()

    def _may_end(self) -> bool:
        if self._closing_at == float("inf"):
            return False
        flushed = [connection.flush() for connection in self._connections()]
        return all(flushed) or time.monotonic() > self._closing_at

    def _beat(self, *, judge: bool) -> None:
        self._announce_to_watched()
        now = time.monotonic()
        for peer in self._watched:
            silence = now - self._heard.setdefault(peer, now)
            if not judge:
                self._heard[peer] = now
            elif silence > self._heartbeat_timeout_s and peer not in self.mailboxes.left:
                self.lose(peer, f"has not answered for {silence:.1f} s (stopped or cut off)")

    def _announce_to_watched(self) -> None:
        header = HEADER.pack(0, 0, 0, _HEARTBEAT, 0)
        for peer in self._watched:
            if peer in self._outgoing:
                self._outgoing[peer].send(header, _EMPTY, copy=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            connection = _Connection(self, sock)
            self._incoming.append(connection)
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Waits for bytes to read, and for room to write where something is left to send."""
        events = selectors.EVENT_READ | (0 if connection.flush() else selectors.EVENT_WRITE)
        if connection.sock.fileno() < 0:
            return
        try:
            self._selector.modify(connection.sock, events, connection)
        except KeyError:
            self._selector.register(connection.sock, events, connection)

    def _serve_connection(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_READ and not connection.read():
            self._end_connection(connection)
        elif events & selectors.EVENT_WRITE:
            self._watch(connection)

    def _end_connection(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        connection.drop_queue()
        if connection in self._incoming:
            self._incoming.remove(connection)
        is_over = connection.is_ending or connection.rank in self.mailboxes.left
        if connection.rank >= 0 and not is_over:
            self.lose(connection.rank, "died (its connection ended without a farewell)")

    def close_files(self) -> None:
        """Closes all sockets: at the end, and in a forked child, which would keep them open."""
        sockets = [connection.sock for connection in self._connections()]
        for sock in (*sockets, self._listener, self._wake_read, self._wake_write):
            sock.close()


class _Lane:
    """A thread with channels of its own, beside the training thread."""

    def __init__(self, net: ProcessGroupTransport, fn: Callable[[Any], None]) -> None:
        self.net = net
        self.waiting: _Receipt | None = None
        self._fn = fn
        self._stopping = False
        self._failure: BaseException | None = None
        net._lane = self
        self._thread = threading.Thread(target=self._run, name=f"dsgd{net.path}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fn(self.net)
        except LaneStopped:
            pass
        except BaseException as failure:
            self._failure = failure
            self.net._mesh.lose(self.net.rank, f"failed: {type(failure).__name__}: {failure}")

    def check_stop(self) -> None:
        if self._stopping:
            raise LaneStopped

    def stop(self, timeout_s: float | None = None) -> None:
        self._stopping = True
        waiting = self.waiting
        if waiting is not None:
            waiting.break_off(LaneStopped())
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        limit = self.net.timeout_s if timeout_s is None else timeout_s
        self._thread.join(limit)
        if self._thread.is_alive():
            raise Timeout(
                f"rank {self.net.rank} has waited {limit:g} s for its {self._thread.name} to end"
            )
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(x.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _gather_json(value: Any) -> list[Any]:
    """Every rank's value, through the process group."""
    text = _encode(value)
    card = torch.zeros(_CARD_BYTES, dtype=torch.uint8, device=_group_device())
    card[: len(text)] = text
    cards = [torch.empty_like(card) for _ in range(dist.get_world_size())]
    dist.all_gather(cards, card)
    return [json.loads(bytes(card.cpu().numpy()).rstrip(b"\0")) for card in cards]


def _group_device() -> str:
    """The type of device whose tensors the default process group moves."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def own_address() -> str:
    """The address at which the other ranks reach this one.

    That of the interface named by GLOO_SOCKET_IFNAME, as for gloo; else the one from which the
    rendezvous host, MASTER_ADDR, is reached.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        request = struct.pack("256s", interface.split(",")[0].encode())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError as err:
                names = ", ".join(name for _, name in socket.if_nameindex())
                raise TransportError(
                    f"GLOO_SOCKET_IFNAME must name an interface with an IPv4 address, "
                    f"got {interface!r}; this machine has {names}"
                ) from err
        return socket.inet_ntoa(answer[20:24])
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "1")
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def _close_files_after_fork() -> None:
    # A DataLoader worker that kept them would hide its parent's death from the other ranks.
    for mesh in list(_meshes):
        atexit.unregister(mesh.end)
        mesh.close_files()


os.register_at_fork(after_in_child=_close_files_after_fork)
