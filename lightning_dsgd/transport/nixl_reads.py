"""The messages that other ranks offer: read, put into their mailboxes, and answered, in order."""

from __future__ import annotations

import struct
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.transport.connection import EMPTY, Connection
from lightning_dsgd.transport.frames import DTYPES, HEADER, REFUSED, TAKEN
from lightning_dsgd.transport.mailboxes import Key
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.nixl_agent import Agent, Memory, Read

OFFER_TEXT: Final = struct.Struct("<QqqQBB")  # address, and the message's header
_PART_BYTES: Final = 1 << 24
"""Of one read, after which it is another message's turn."""
_MOST_SLOW: Final = 8
"""Reads of memory of this machine, over a connection that was there, that were no copy at once."""


@dataclass
class _Arriving:
    """An offer that has come.

    Args:
        connection: on which, and so from which rank
        number: the sender's
        kind: the message's
        payload: where it is read to
        is_claimed: whether that is the memory of a receive
        parts: what is yet to be read: there, here, and how many bytes
        registered: that memory, if it was registered for this message alone
        read: the part that is being read
        is_over_connection: whether an earlier read had made the connection when it was begun
    """

    connection: Connection
    number: int
    kind: int
    payload: Tensor
    is_claimed: bool
    parts: deque[tuple[int, int, int]]
    registered: Any = None
    read: Read | None = None
    is_over_connection: bool = False


class Reads:
    """All of them; belongs to the wire's thread.

    Args:
        mesh: whose mailboxes are filled
        agent: which reads
        memory: where messages go that no receive offers memory for
        near: the ranks of this machine
    """

    def __init__(self, mesh: Mesh, agent: Agent, memory: Memory, near: set[int]) -> None:
        self._mesh, self._agent, self._memory, self._near = mesh, agent, memory, near
        self._names: dict[int, str] = {}  # of the agents of other ranks
        self._slow: Counter[int] = Counter()
        self._connected: set[int] = set()  # ranks of which something has been read
        self._unreadable: dict[int, str] = {}  # ranks, and why
        self._arriving: dict[tuple[int, Key], deque[_Arriving]] = {}

    def __bool__(self) -> bool:
        return bool(self._arriving)

    def meet(self, source: int, introduction: bytes) -> None:
        """A rank has told of memory that this one may read."""
        try:
            self._names[source] = self._agent.meet(introduction)
        except Exception as error:  # the library's own, of which there are many
            self._unreadable[source] = f"{type(error).__name__}: {error}"

    def begin(self, connection: Connection, number: int, text: bytes) -> None:
        """A rank offers a message."""
        address, channel, tag, nbytes, kind, code = OFFER_TEXT.unpack(text)
        source, key = connection.rank, (channel, tag)
        if not self._mesh.takes(source, nbytes, kind, code):
            return
        dtype = DTYPES[code]
        earlier = self._arriving.setdefault((source, key), deque())
        # A receive belongs to the first message of its mailbox, which may be here already.
        may_claim = all(arriving.is_claimed for arriving in earlier) and not self._mesh.survives
        into = self._mesh.mailboxes.claim(source, key, dtype, nbytes) if may_claim else None
        payload, registered = into, None
        if payload is None:
            payload = self._memory.buffer(nbytes // dtype.itemsize, dtype)
        elif nbytes and self._memory.region_of(payload) is None:
            registered = self._agent.register_to_write(payload.data_ptr(), nbytes)
        parts = deque(
            (address + at, payload.data_ptr() + at, min(_PART_BYTES, nbytes - at))
            for at in range(0, nbytes, _PART_BYTES)
        )
        earlier.append(
            _Arriving(connection, number, kind, payload, into is not None, parts, registered)
        )

    def move_on(self) -> bool:
        """Reads one part of each message, and passes on what is here; whether it got further."""
        has_moved = False
        for queue in list(self._arriving.values()):
            for arriving in queue:
                has_moved |= self._read_on(arriving)
        self._pass_on()
        return has_moved

    def _read_on(self, arriving: _Arriving) -> bool:
        source = arriving.connection.rank
        if source in self._unreadable:
            arriving.parts.clear()
        try:
            if arriving.read is None:
                if not arriving.parts:
                    return False
                arriving.is_over_connection = source in self._connected
                arriving.read = self._agent.read(self._names[source], *arriving.parts.popleft())
            if not arriving.read.done():
                return False
            if arriving.is_over_connection:
                self._judge(source, arriving.read)
            self._connected.add(source)
        except Exception as error:  # the library's own, of which there are many
            self._unreadable[source] = f"{type(error).__name__}: {error}"
        arriving.read = None
        return True

    def _judge(self, source: int, read: Read) -> None:
        """Gives up to read a rank of this machine where that is slower than its message."""
        if source in self._near:
            self._slow[source] = 0 if read.was_immediate else self._slow[source] + 1
            if self._slow[source] > _MOST_SLOW:
                self._unreadable[source] = "no copy from process to process (process_vm_readv)"

    def _pass_on(self) -> None:
        """Each mailbox in the order in which its messages were offered."""
        for (source, key), queue in list(self._arriving.items()):
            while queue and queue[0].read is None and not queue[0].parts:
                arrived = queue.popleft()
                if arrived.registered is not None:
                    self._agent.deregister(arrived.registered)
                why_not = self._unreadable.get(source, "")
                if not why_not:
                    self._mesh.mailboxes.deliver(source, key, arrived.kind, arrived.payload)
                answer = REFUSED if why_not else TAKEN
                tell(arrived.connection, answer, arrived.number, why_not.encode())
            if not queue:
                del self._arriving[source, key]


def tell(connection: Connection, kind: int, number: int, text: bytes) -> None:
    """Sends news of memory."""
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else EMPTY
    connection.send(HEADER.pack(0, number, len(text), kind, 0), payload, copy=True)
