"""Life and death: which ranks are alive, who is lost and why, and how all come to know it.

**Who is alive.**  Every rank keeps a connection to rank 0 and back, and both ends send a heartbeat
every `heartbeat_timeout_s / 4`.  A connection that ends without a farewell, or a silence longer
than `heartbeat_timeout_s`, is a lost rank; whoever notices tells all that it can reach, and rank 0
tells everyone.  A rank that fails says so itself, with its reason.  The first loss that a rank
hears of is the one that it goes by.

A mesh that survives goes on after a loss instead, see `survival`.

What carries messages is no matter of the mesh, see `wire`; its news travel on its own connections,
which the wire of TCP uses too.

**Scope.**  These connections carry news and control, messages of CPU tensors, and what no engine
can carry: messages to ranks that have not asked for them yet.  They are not to become faster for
large tensors: MPI (`mpi`) and NCCL (`native`) are the engines for these.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.devices import HOST, Port
from lightning_dsgd.transport.connection import EMPTY, Connection
from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import LEAST_LIMIT, PeerLost, TransportError, failed
from lightning_dsgd.transport.frames import (
    AGREEMENT,
    FAREWELL,
    FROM_DEVICE,
    HEADER,
    HEARTBEAT,
    LOST,
    MEMORY_BYTES,
    why_no_message,
)
from lightning_dsgd.transport.mailboxes import Mailboxes
from lightning_dsgd.transport.pinned import Pinned
from lightning_dsgd.transport.survival import Survival

_LONGEST_REASON: Final = 50_000
"""How many characters are sent; JSON makes up to twelve bytes of each."""
_CLOSE_TIMEOUT_S: Final = 5.0
_SWITCH_INTERVAL_S: Final = 0.0005
"""How soon the mesh gets the interpreter from a thread that runs Python (by default: 5 ms)."""

_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """Knows who is alive, by a thread that also moves all bytes that no caller could move.

    The thread that opens the network opens and closes the mesh.  Any thread may ask who is lost,
    or `lose` a rank: `_losing` makes one loss the first.  `_heard` is the mesh's thread's alone;
    `on_lost`, `_closing_at` and `_thread` are single references that one thread writes.

    Args:
        rank: this process's rank
        world_size: P
        timeout_s: how long a message may take to leave
        heartbeat_timeout_s: after how much silence a rank counts as lost
        port: the port of the device that this rank computes on
        is_newcomer: whether this process comes to ranks that were there before
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        heartbeat_timeout_s: float,
        port: Port = HOST,
        *,
        is_newcomer: bool = False,
    ) -> None:
        self.port = port
        self.pinned = Pinned()
        self.rank = rank
        self.timeout_s = timeout_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.mailboxes = Mailboxes()
        self.connections = Connections(self, world_size)
        self.on_lost: Callable[[PeerLost], None] | None = None
        self.secret = b""
        self._most_bytes: int | None = None
        self._pid = os.getpid()
        self._world_size = world_size
        self.has_failed = False
        """Whether this rank itself has said that it is lost."""
        self._watched: Sequence[int] = ()  # the ranks whose silence we notice
        if not is_newcomer:
            self._watched = range(1, world_size) if rank == 0 else range(1)
        self._survival: Survival | None = None
        self._heard: dict[int, float] = {}
        self._losing = threading.Lock()
        self._verdict = threading.Event()
        self._closing_at = float("inf")
        self._thread: threading.Thread | None = None
        self._switch_interval_s = sys.getswitchinterval()

    def open(self, addresses: Mapping[int, tuple[str, int]], secret: bytes) -> None:
        """Begins to watch the ranks that listen at these addresses."""
        self.secret = secret
        self.connections.open(addresses, secret)
        _meshes.add(self)
        sys.setswitchinterval(min(self._switch_interval_s, _SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._serve, name="dsgd-mesh", daemon=True)
        self._thread.start()
        for peer in self._watched:
            self.connections.to(peer)

    def close(self, *, is_last: bool) -> None:
        """Says farewell, and ends the thread; does nothing if the mesh has not been opened.

        Args:
            is_last: whether a farewell on the connections is the last that this rank sends
        """
        thread, self._thread = self._thread, None
        if self.is_forks or thread is None:
            return
        self._say_farewell(is_last)
        self._closing_at = time.monotonic() + _CLOSE_TIMEOUT_S
        self.connections.wake()
        thread.join()
        sys.setswitchinterval(self._switch_interval_s)

    # ---- going on after a loss ----

    @property
    def survives(self) -> bool:
        """Whether a loss is followed by a view of the ranks that are left."""
        return self._survival is not None

    def survive(self, min_ranks: int | None, groups: Sequence[Sequence[int]] = ()) -> None:
        """Has a view follow each loss from now on; connects to every rank, and watches it."""
        others = [rank for rank in range(self._world_size) if rank != self.rank]
        for peer in others:
            self.connections.to(peer)
        self.connections.let_in_newcomers()
        self._watched = others
        self._begin_to_survive(min_ranks, groups)

    def join(self, min_ranks: int | None, within_s: float) -> None:
        """Asks the ranks whose addresses `open` was given to let this newcomer in.

        Raises:
            TransportError: if none of them can be reached
        """
        self.connections.let_in_newcomers()
        contacts: list[int] = []
        for rank in self.connections.known():
            if self.connections.reaches(rank):
                contacts.append(rank)
                self._watched = tuple(contacts)  # they hear from this rank while it tries others
        if not contacts:
            raise TransportError(
                f"a newcomer must reach a rank that trains, but none of "
                f"{list(self.connections.known())} answers; start the job anew"
            )
        self._begin_to_survive(min_ranks, (), contacts, within_s)
        self.connections.wake()

    def _begin_to_survive(
        self,
        min_ranks: int | None,
        groups: Sequence[Sequence[int]],
        contacts: Sequence[int] | None = None,
        join_within_s: float | None = None,
    ) -> None:
        self._survival = Survival(
            self.rank,
            self._world_size,
            self.connections,
            self.mailboxes,
            patience_s=self.heartbeat_timeout_s / 2,
            min_ranks=min_ranks,
            send=self._send_agreement,
            contacts=contacts,
            join_within_s=join_within_s,
            groups=groups,
            on_end=self._hear_of_own_end,
        )

    def _hear_of_own_end(self, lost: PeerLost) -> None:
        """Tells that this rank cannot go on: its replica's collective may hang in training."""
        if self.on_lost is not None:
            self.on_lost(lost)

    def renew(self) -> None:
        """Has the ranks agree on the next view: see `Endpoint.renew`."""
        if self._survival is not None:
            self._survival.renew()

    @property
    def is_outside(self) -> bool:
        """Whether no next view will hold this rank: see `Endpoint.is_outside`."""
        return self._survival is not None and self._survival.is_outside

    def newcomers(self) -> tuple[int, ...]:
        """Returns the newcomers that have asked to be let in, and wait."""
        return () if self._survival is None else self._survival.newcomers()

    def admit(self, newcomers: Sequence[int]) -> bool:
        """Has the ranks agree on a view with these newcomers: see `Endpoint.admit`."""
        return self._survival is not None and self._survival.admit(newcomers)

    def part(self, leavers: Sequence[int]) -> bool:
        """Has the ranks agree on a view without these ranks: see `Endpoint.part`."""
        return self._survival is not None and self._survival.part(leavers)

    def next_view(self, lost: PeerLost) -> tuple[int, tuple[int, ...]]:
        """Returns the next view after a loss: see `Endpoint.next_view`."""
        if self._survival is None:
            raise lost
        return self._survival.next_view(lost)

    def _send_agreement(self, rank: int, message: Any) -> None:
        connection = self.connections.made_to(rank)
        if connection is not None:
            text = encode(message)
            connection.send(HEADER.pack(0, 0, len(text), AGREEMENT, 0), text, copy=True)

    # ---- what is known, from any thread ----

    @property
    def is_forks(self) -> bool:
        """Whether this process is forked from the one that opened the mesh: `_leave_to_parent`."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises in a process that was forked from the one that opened the network."""
        if self.is_forks:
            raise TransportError(
                f"only process {self._pid} may train as rank {self.rank}, got process "
                f"{os.getpid()}, forked from it; end a forked process where it was forked, "
                "with os._exit(0)"
            )

    def check(self, waited_for: str) -> None:
        """Raises `PeerLost` if a rank is lost, and in a forked process."""
        self.check_process()
        lost = self.mailboxes.failure
        if lost is not None:
            raise PeerLost(lost.rank, lost.reason, waited_for)

    def blame(self, what: str) -> None:
        """Raises `PeerLost` if another library's error comes of a lost rank; waits to know that."""
        self.check_process()
        if self._survival is not None:
            self._survival.blame(what, self.heartbeat_timeout_s)
            return
        self._verdict.wait(self.heartbeat_timeout_s)
        self.check(what)

    def lose(self, rank: int, reason: str, *, died: bool = False) -> None:
        """Takes a rank for lost: ends all waits here, tells the others; only the first loss counts.

        Args:
            rank: the rank that is lost
            reason: what became of it
            died: whether its process has ended, and not only fallen silent
        """
        if self.is_forks:
            return
        if self._survival is not None and rank != self.rank:
            self._survival.lose(rank, reason, died=died)
            return
        with self._losing:
            lost = self.mailboxes.failure
            if lost is not None and (self._survival is None or self.has_failed):
                return
            self.has_failed |= rank == self.rank
            failure = PeerLost(rank, reason)
            self.mailboxes.break_off(failure)
        if self.on_lost is not None and rank != self.rank:
            self.on_lost(failure)  # first: an MPI launcher ends this process within milliseconds
        for connection in self.connections.all():
            if connection.rank == rank != self.rank:
                connection.drop_queue()
        self._announce_loss(failure)
        self._verdict.set()

    def expect_at_most(self, nbytes: int) -> None:
        """Limits the bytes of a message: see `Transport.expect_at_most`."""
        self._most_bytes = max(nbytes, self._most_bytes or LEAST_LIMIT)

    @property
    def most_bytes(self) -> int:
        """The most bytes that a message may have."""
        return MEMORY_BYTES if self._most_bytes is None else min(self._most_bytes, MEMORY_BYTES)

    def takes(self, sender: int, nbytes: int, kind: int, code: int) -> bool:
        """Returns whether a header announces a message; if not, its sender counts as lost."""
        why_not = why_no_message(nbytes, kind, code & ~FROM_DEVICE, self.most_bytes)
        if why_not:
            self.lose(sender, why_not)
        return not why_not

    # ---- news ----

    def _say_farewell(self, is_last: bool) -> None:
        """Says farewell on every connection; tag 1 means that another still brings messages."""
        lost = self.mailboxes.failure
        if lost is not None:  # a rank that has connected since must not take us for the cause
            self._announce_loss(lost)
        for connection in self.connections.all():
            ours = self.connections.made_to(connection.rank) or connection
            tag = int(not (is_last and ours is connection))
            connection.send(HEADER.pack(0, tag, 0, FAREWELL, 0), EMPTY, copy=True)

    def _announce_loss(self, lost: PeerLost) -> None:
        text = encode([lost.rank, lost.reason[:_LONGEST_REASON]])
        header = HEADER.pack(0, 0, len(text), LOST, 0)
        for connection in self.connections.all():
            connection.send(header, text, copy=True)

    def hear_newcomer(self, rank: int) -> None:
        """Hears, in the mesh's thread, that a process has come that was not there at the start."""
        if rank not in self._watched:
            self._heard[rank] = time.monotonic()
            self._watched = [*self._watched, rank]

    def hear(self, rank: int) -> None:
        """Hears, in the mesh's thread, that a rank has sent something."""
        self._heard[rank] = time.monotonic()

    def hear_news(self, connection: Connection, kind: int, tag: int, text: bytes) -> None:
        """Hears, in the mesh's thread, a farewell, a loss, or a word of the agreement."""
        if kind == FAREWELL:
            connection.is_ending = True
            if not tag:
                self.mailboxes.break_off(left=connection.rank)
                if self._survival is not None:
                    self._survival.leave(connection.rank)
        elif kind == LOST:
            try:
                rank, reason = json.loads(text)
                if self._survival is None:
                    self.lose(range(self._world_size)[rank], str(reason), died=True)
                elif rank == connection.rank:
                    self.lose(connection.rank, str(reason), died=True)
            except (ValueError, TypeError, IndexError):
                self.lose(connection.rank, "told of the loss of a rank in an unknown form")
        elif kind == AGREEMENT and self._survival is not None:
            try:
                self._survival.hear(connection.rank, text)
            except (ValueError, TypeError):
                self.lose(connection.rank, "spoke of a view in an unknown form")

    def hear_end(self, connection: Connection) -> None:
        """Hears, in the mesh's thread, that a connection has ended, with a farewell or without."""
        peer = connection.rank
        if connection.is_ending or peer in self.mailboxes.left:
            return
        if connection.is_cut():
            self.lose(peer, self._describe_cut(peer))
        else:
            self.lose(peer, "died (its connection ended without a farewell)", died=True)

    def _describe_cut(self, peer: int) -> str:
        ends = [f"rank {rank} at {self.connections.address(rank)}" for rank in (self.rank, peer)]
        return (
            f"has not answered for {self.heartbeat_timeout_s:g} s on the link between "
            f"{' and '.join(ends)} (stopped, or the link is cut)"
        )

    # ---- the thread ----

    def _serve(self) -> None:
        period = self.heartbeat_timeout_s / 4
        next_beat = time.monotonic() + period
        try:
            self.port.enter()
            while not self._may_end():
                now = time.monotonic()
                if now >= next_beat:
                    # A thread that was itself held up must not judge the silence of others.
                    self._beat(judge=now < next_beat + period)
                    next_beat = now + period
                is_closing = self._closing_at < float("inf")
                until = time.monotonic() + 0.05 if is_closing else next_beat
                if self._survival is not None:
                    self._survival.tick()
                    until = min(until, self._survival.next_at)
                self.connections.serve(until)
        except Exception as error:
            self.lose(self.rank, failed(error))
            raise
        finally:
            self.connections.end()

    def _may_end(self) -> bool:
        if self._closing_at == float("inf"):
            return False
        return self.connections.flush() or time.monotonic() > self._closing_at

    def _beat(self, *, judge: bool) -> None:
        self._announce_to_watched()
        now = time.monotonic()
        for peer in self._watched:
            silence = now - self._heard.setdefault(peer, now)
            if not judge:
                self._heard[peer] = now
            elif silence > self.heartbeat_timeout_s and peer not in self.mailboxes.left:
                self.lose(peer, f"has not answered for {silence:.1f} s (stopped or cut off)")

    def _announce_to_watched(self) -> None:
        header = HEADER.pack(0, 0, 0, HEARTBEAT, 0)
        for peer in self._watched:
            connection = self.connections.made_to(peer)
            if connection is not None:
                connection.send(header, EMPTY, copy=True)


def encode(value: Any) -> Tensor:
    """Returns a value's JSON, as bytes in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _leave_to_parent() -> None:
    """Leaves the network to the parent, in a process that was forked from this one.

    The child closes its copies of the sockets: a DataLoader's worker that kept them would hide its
    parent's death from the other ranks.

    The child has one thread, the one that forked, and copies of locks that others may have held
    just then, for ever.  It cannot hang in any of ours, for it takes none: whatever sends,
    receives, waits, or starts a lane begins with `check_process`, which raises; `lose`, `fail`,
    `close`, what a transport does at exit, and the stop and join of a lane do nothing.  So it comes
    to no lock of `Mailboxes`, `Connection`, `Connections`, `Mesh` or MPI's wire, to no event of a
    receipt, a `Sending` or the verdict, and joins no thread.  The locks of a strategy
    (`AgreedBatch`, `Published`) lie behind its hooks, which begin the same way.  The one lock that
    no mesh guards, that of `buffers`, is held by the thread that forks, so that it is free in the
    child.

    What other libraries would wait for at the end of the child is left out by whoever trains, who
    ends it as soon as an exception comes out of its step: see `session.ending.end_fork`.
    """
    for mesh in list(_meshes):
        mesh.connections.close_files()


os.register_at_fork(after_in_child=_leave_to_parent)
