"""The network over NIXL: large payloads are read one-sidedly, all else travels on the mesh.

    below _SMALLEST_BYTES          a message on the mesh's connections, as with TCP
    above, to a rank that can      the message stays where it is, in memory that other ranks may
    read this one's memory         read; its receiver is told where, reads it, and says so

The receiver reads, and not the sender writes: one message on the mesh announces both the message
and its memory, and a sender that computes is not asked for anything more.

    sender                                        receiver
      EXPOSED  a region, before its first use  -->
      OFFER    number, address, header         -->  reads; puts the message into its mailbox
               gives the memory back           <--  TAKEN   number
               sends it on the connection      <--  REFUSED number, where it cannot be read

**Why messages keep their order.**  All of one rank's news and messages come on one connection.
While an offer for a mailbox has no answer, every later message for it is an offer too, however
small; the receiver puts them into the mailbox in the order of the offers, and answers in it.  Once
one read of a rank has failed, all its offers are refused, so that they are all sent again in order.

**Why no memory is used again too early.**  A sender keeps what it has offered until the answer has
come, or the receiver has left, or a rank is lost: then nobody waits for that message any more.  A
receive of a mesh that survives losses is never filled in place, as its memory may be weights.

**Why nobody waits for ever.**  A receiver reads at once, whether somebody waits for the message or
not.  If it is stopped, the mesh's heartbeat judges, and not NIXL, for which such a read is still
under way; the loss ends all waits.

**Which ranks.**  Those of one machine, where a read is a copy by the reader's processor, and, where
both ranks have RDMA, all others.  Over TCP, UCX emulates reads by messages, which is slower than a
message on the mesh; so payloads to other ranks stay there.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from lightning_dsgd.transport.connection import Connection
from lightning_dsgd.transport.contract import TransportError, Work, failed
from lightning_dsgd.transport.frames import EXPOSED, HEADER, OFFER, REFUSED
from lightning_dsgd.transport.mailboxes import Key
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.nixl_agent import Agent, Memory, Region, installed
from lightning_dsgd.transport.nixl_ranks import Card, who_reads
from lightning_dsgd.transport.nixl_reads import OFFER_TEXT, Reads, tell
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.works import Done, Sending

_SMALLEST_BYTES: Final = 1 << 21
"""Of a message that is read: where the copy that is saved pays for one more thread to be woken."""
_POLLS_IN_A_ROW: Final = 20
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 2e-3
_LOOK_EVERY_S: Final = 0.5
_CLOSE_TIMEOUT_S: Final = 5.0
_kept: Final[list[Any]] = []
"""What a network that was lost may still be reading and writing."""


class NIXLTransport(ProcessGroupTransport):
    """This process's end of a network over NIXL; all ranks open it together.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        required: whether to raise where no rank can read another's memory; else all messages
            travel on the mesh then, as those of `ProcessGroupTransport`
    """

    def __init__(
        self, timeout_s: float = 1800.0, heartbeat_timeout_s: float = 20.0, *, required: bool = True
    ) -> None:
        wire = NIXLWire(required=required)
        super().__init__(timeout_s, heartbeat_timeout_s, wire=wire)
        self.choice = wire.choice
        """What carries large messages, and why, in one line."""


@dataclass
class _Lent:
    """An offer that has no answer yet.

    Args:
        dst: whom it was made to
        key: of the mailbox that it is for
        header: the message's
        x: the message
        sending: ends with the answer
    """

    dst: int
    key: Key
    header: bytes
    x: Tensor
    sending: Sending


class NIXLWire:
    """Offers messages for all threads of this process, and reads those of others in its own.

    Any thread may send: `_sending`, one lock for each rank, keeps what is sent to it in order, and
    guards what it has been told (`_told`) and asked (`_asked`).  The mesh's thread hands news over
    in `_heard`, a deque; of `_lent`, a dict, single operations are used.  All else is the wire's
    thread's from when it is started; `_closing_at` and `_has_ended` are single references that one
    thread writes.

    Args:
        required: whether to raise where it is of no use
    """

    _mesh: Mesh
    _agent: Agent
    _memory: Memory
    _reads: Reads

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._own = Card.own(self._make_agent())
        self._cards: list[Card] = []
        self.choice = "process_group"
        """What carries large messages, and why, in one line."""
        self._readers: list[set[int]] = []  # of each rank's memory
        self._told: list[set[int]] = []  # the regions that each rank knows
        self._asked: list[Counter[Key]] = []  # the offers to each rank that have no answer
        self._sending: list[threading.Lock] = []
        self._numbers = itertools.count()
        self._lent: dict[int, _Lent] = {}
        self._heard: deque[tuple[Connection, int, int, bytes]] = deque()
        self._woken = threading.Event()
        self._closing_at = math.inf
        self._has_ended = False
        self._thread: threading.Thread | None = None

    # ---- in the thread that opens and closes the network ----

    def _make_agent(self) -> str:
        """Why there is none; empty if there is one."""
        if not installed():
            return "it is not installed"
        try:
            self._agent = Agent(f"{os.getpid()}-{secrets.token_hex(8)}")
        except Exception as error:  # whatever the library cannot load
            return f"{type(error).__name__}: {error}"
        self._memory = Memory(self._agent)
        return ""

    @property
    def name(self) -> str:
        """What users choose it by, and what the others are to know of this rank."""
        return f"{'nixl' if self._required else 'process_group'} {self._own.words}"

    def check_names(self, names: list[str]) -> None:
        """Finds out which ranks can read which; raises if it is required, and none can."""
        self._cards = [Card.read(name.partition(" ")[2]) for name in names]
        self._readers, why_not = who_reads(self._cards)
        num_pairs, num_ranks = sum(map(len, self._readers)), len(names)
        self.choice = f"nixl between {num_pairs} of {num_ranks * (num_ranks - 1)} pairs of ranks"
        if why_not:
            self.choice = f"process_group, as {why_not}"
        if why_not and self._required:
            raise TransportError(
                'transport="nixl" needs NIXL on all ranks, and two that share a machine or have '
                f"RDMA devices, but {why_not}; pip install nixl-cu12 (or nixl-cu13), or use "
                'transport="process_group"'
            )

    def open(self, mesh: Mesh) -> None:
        """Starts the thread, where ranks can read each other's memory."""
        self._mesh = mesh
        if not any(self._readers):
            return
        own = self._cards[mesh.rank]
        near = {rank for rank, card in enumerate(self._cards) if own.is_near(card)}
        self._reads = Reads(mesh, self._agent, self._memory, near)
        self._told = [set() for _ in self._cards]
        self._asked = [Counter() for _ in self._cards]
        self._sending = [threading.Lock() for _ in self._cards]
        mesh.on_memory_news = self._hear
        self._thread = threading.Thread(target=self._serve, name="dsgd-nixl", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Waits until what was offered has been read; at once if a rank is lost."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing_at = time.monotonic() + _CLOSE_TIMEOUT_S
            self._woken.set()
            thread.join()
        if not self._own.why_not and not self._is_busy():
            self._memory.close()
            self._agent.close()
        return False

    # ---- from any thread ----

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Offers a large message to a rank that can read it; sends others on the connection."""
        connection = self._mesh.connections.to(dst)
        if dst >= len(self._asked):  # it has joined later, or no rank reads another's memory
            return connection.send(header, x, copy=copy)
        key = HEADER.unpack(header)[:2]
        is_for_reading = x.nbytes >= _SMALLEST_BYTES and dst in self._readers[self._mesh.rank]
        lent = self._memory.lend(x, copy=copy) if is_for_reading else None
        with self._sending[dst]:
            if lent is None:
                if not self._asked[dst][key]:
                    return connection.send(header, x, copy=copy)
                lent = self._memory.lend(x, copy=copy)  # behind others that are yet to be read
            sending = self._offer(connection, header, key, *lent)
        self._woken.set()
        if self._has_ended:  # since the mesh was asked: nobody else would say so
            sending.finish()
        return sending if lent[1] is x else Done(None)

    def _offer(
        self, connection: Connection, header: bytes, key: Key, region: Region, x: Tensor
    ) -> Sending:
        dst, number = connection.rank, next(self._numbers)
        sending = Sending(self._mesh, dst, x)
        self._lent[number] = _Lent(dst, key, header, x, sending)
        self._asked[dst][key] += 1
        if region.number not in self._told[dst]:
            self._told[dst].add(region.number)
            tell(connection, EXPOSED, region.number, region.introduction)
        tell(connection, OFFER, number, OFFER_TEXT.pack(x.data_ptr(), *HEADER.unpack(header)))
        return sending

    def expect(self) -> None:
        """The mesh's thread looks out for messages and offers at all times."""

    def _hear(self, connection: Connection, kind: int, number: int, text: bytes) -> None:
        """In the mesh's thread: news of memory."""
        self._heard.append((connection, kind, number, text))
        self._woken.set()

    # ---- the thread ----

    def _serve(self) -> None:
        try:
            num_idle = 0
            while not self._may_end():
                if self._move_on():
                    num_idle = 0
                elif num_idle < _POLLS_IN_A_ROW and self._is_busy():
                    num_idle += 1
                    time.sleep(0)  # lets another thread run
                else:
                    num_idle += 1
                    doublings = min(max(0, num_idle - _POLLS_IN_A_ROW), 10)
                    pause = min(_SHORTEST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)
                    if self._woken.wait(pause if self._is_busy() else _LOOK_EVERY_S):
                        self._woken.clear()
                        num_idle = 0
        except Exception as error:
            self._mesh.lose(self._mesh.rank, failed(error))
            raise
        finally:
            self._end()

    def _is_busy(self) -> bool:
        """Whether something is under way that nobody tells the end of."""
        return bool(self._lent or (self._asked and self._reads))

    def _may_end(self) -> bool:
        lost = self._mesh.mailboxes.failure
        if lost is not None and (not self._mesh.survives or self._mesh.has_failed):
            return True
        if self._closing_at == math.inf:
            return False
        is_quiet = not self._heard and not self._is_busy()
        return is_quiet or time.monotonic() > self._closing_at

    def _end(self) -> None:
        self._has_ended = True
        if self._is_busy():
            _kept.append((self._agent, self._memory, self._reads))
        for lent in list(self._lent.values()):
            lent.sending.finish()

    def _move_on(self) -> bool:
        """Does what there is to do; whether there was something."""
        has_moved = bool(self._heard)
        while self._heard:
            connection, kind, number, text = self._heard.popleft()
            if kind == EXPOSED:
                self._reads.meet(connection.rank, text)
            elif kind == OFFER:
                self._reads.begin(connection, number, text)
            else:
                self._take_back(kind, number, text)
        has_moved |= self._reads.move_on()
        if self._is_busy():
            self._agent.progress()
            self._forget_those_gone()
        return has_moved

    def _take_back(self, kind: int, number: int, text: bytes) -> None:
        """An offer is answered."""
        lent = self._lent.pop(number, None)
        if lent is None:
            return
        asked = self._asked[lent.dst]
        with self._sending[lent.dst]:
            asked[lent.key] -= 1
            if not asked[lent.key]:
                del asked[lent.key]
            if kind == REFUSED:
                self._mesh.connections.to(lent.dst).send(lent.header, lent.x, copy=True)
        lent.sending.finish()
        readers = self._readers[self._mesh.rank]
        if kind == REFUSED and lent.dst in readers:
            readers.discard(lent.dst)
            warnings.warn(
                f"rank {lent.dst} cannot read the memory of rank {self._mesh.rank} by NIXL: "
                f"{text.decode(errors='replace')}; messages to it travel by TCP from now on",
                stacklevel=2,
            )

    def _forget_those_gone(self) -> None:
        """Whoever is gone answers no offer, and its own are read by nobody."""
        for number, lent in list(self._lent.items()):
            if self._mesh.is_gone(lent.dst):
                del self._lent[number]
                lent.sending.finish()
