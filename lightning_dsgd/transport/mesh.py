"""Life and death: which ranks are alive, who is lost and why, and how all come to know it.

**Who is alive.**  Every rank keeps a connection to rank 0 and back, and both ends send a heartbeat
every `heartbeat_timeout_s / 4`.  A connection that ends without a farewell, or a silence longer
than `heartbeat_timeout_s`, is a lost rank; whoever notices tells all that it can reach, and rank 0
tells everyone.  A rank that fails says so itself, with its reason.  The first loss that a rank
hears of is the one that it goes by.

**On slow links** heartbeats wait behind no message: they go on the connection that the other rank
has made, which brings it news alone.  All bytes are a sign of life: those that come, and those that
the other rank takes out of a kernel's memory that was full.

**What follows a loss** is a matter of the mesh's `policy`: by default, the network ends.  The wing
`elastic` has one by which the ranks that are left go on.

What carries messages is no matter of the mesh, see `wire`; its news travel on its own connections,
which the wire of TCP uses too.

**Scope.**  These connections carry news and control, messages of CPU tensors, and what no engine
can carry: messages to ranks that have not asked for them yet.  They are not to become faster for
large tensors: MPI (the wing `mpi`) and NCCL (`native`) are the engines for these.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd import wings
from lightning_dsgd.devices import HOST, Port
from lightning_dsgd.transport.connection import EMPTY, Connection
from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import (
    PeerLost,
    Reason,
    TransportError,
    Views,
    failed,
)
from lightning_dsgd.transport.mailboxes import Key, Mailboxes
from lightning_dsgd.transport.memory import Memory
from lightning_dsgd.transport.messages import (
    AGREEMENT,
    ASKED,
    FAREWELL,
    HEADER,
    HEARTBEAT,
    HELD,
    LOST,
    MAILBOX,
    TAKEN,
    why_no_message,
)

_LONGEST_REASON: Final = 50_000
"""How many characters are sent; JSON makes up to twelve bytes of each."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long what is left to send may take, once the network is closed."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How soon another thread gets the interpreter from one that runs Python; by default it is 5 ms.

A lane answers five times as soon so beside plain Python: `benchmarks/lane_latency.py`.
"""

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
        self.rank = rank
        self.timeout_s = timeout_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.mailboxes = Mailboxes(self.say)
        self.memory = Memory()
        self.connections = Connections(self, world_size)
        self.on_lost: Callable[[PeerLost], None] | None = None
        self.at_exit: Callable[[], None] | None = None
        self.secret = b""
        self._pid = os.getpid()
        self.world_size = world_size
        self.has_failed = False
        """Whether this rank itself has said that it is lost."""
        self.watched: Sequence[int] = ()
        """The ranks whose silence this one notices."""
        if not is_newcomer:
            self.watched = range(1, world_size) if rank == 0 else range(1)
        self.policy = LossPolicy(self)
        """What becomes of a loss."""
        self._heard: dict[int, float] = {}
        self._losing = threading.Lock()
        self.verdict = threading.Event()
        self._closing_at = math.inf
        self._thread: threading.Thread | None = None
        self._switches = QuickSwitches()

    def open(self, addresses: Mapping[int, tuple[str, int]], secret: bytes) -> None:
        """Begins to watch the ranks that listen at these addresses."""
        self.secret = secret
        self.connections.open(addresses, secret)
        _meshes.add(self)
        self._switches.begin()
        self._thread = threading.Thread(target=self._serve, name="dsgd-mesh", daemon=True)
        self._thread.start()
        for peer in self.watched:
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
        self._closing_at = time.monotonic() + CLOSE_TIMEOUT_S
        self.connections.wake()
        thread.join()
        self._switches.end()

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
        is_watching = self._thread is not None
        if is_watching or self.mailboxes.failure is not None:
            self.policy.blame(what)

    def lose(self, rank: int, reason: str, *, died: bool = False) -> None:
        """Takes a rank for lost; the `policy` says what becomes of that, if it is another rank.

        Args:
            rank: the rank that is lost
            reason: what became of it
            died: whether its process has ended, and not only fallen silent
        """
        if self.is_forks:
            return
        if rank == self.rank:
            self.end(rank, reason)
        else:
            self.policy.lose(rank, reason, died=died)

    def end(self, rank: int, reason: str) -> None:
        """Ends all waits here with the loss of a rank, and tells the others; the first one counts.

        Args:
            rank: the rank that is lost
            reason: what became of it
        """
        with self._losing:
            if self.has_failed or (self.mailboxes.failure is not None and not self.policy.goes_on):
                return
            self.has_failed |= rank == self.rank
            failure = PeerLost(rank, reason)
            self.mailboxes.break_off(failure)
        if rank != self.rank:
            self.tell_loss(failure)  # first: an MPI launcher ends this process within milliseconds
        for connection in self.connections.all():
            if connection.rank == rank != self.rank:
                connection.drop_queue()
        self._announce_loss(failure)
        self.verdict.set()

    def tell_loss(self, lost: PeerLost) -> None:
        """Tells whoever wants to hear of losses on this rank."""
        if self.on_lost is not None:
            self.on_lost(lost)

    def accept(self, sender: int, nbytes: int, kind: int, code: int) -> bool:
        """Accepts a header that announces a message; else takes its sender for lost.

        Returns whether the header is accepted.
        """
        why_not = why_no_message(nbytes, kind, code, self.memory.most_bytes)
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
        text = encode([lost.rank, lost.reason[:_LONGEST_REASON], lost.ends_all])
        header = HEADER.pack(0, 0, len(text), LOST, 0)
        for connection in self.connections.all():
            connection.send(header, text, copy=True)

    def hear_newcomer(self, rank: int) -> None:
        """Hears, in the mesh's thread, that a process has come that was not there at the start."""
        if rank not in self.watched:
            self._heard[rank] = time.monotonic()
            self.watched = [*self.watched, rank]

    def hear(self, rank: int) -> None:
        """Hears, in the mesh's thread, that a rank has sent something."""
        self._heard[rank] = time.monotonic()

    def say(self, rank: int, kind: int, key: Key) -> bool:
        """Tells a rank what may lie there; returns False if no connection is made for that."""
        if rank == self.rank:
            return True
        connection = self.connections.for_news(rank)
        if connection is None and kind == HELD:
            connection = self.connections.to(rank)
        if connection is not None:
            connection.send(HEADER.pack(*key, 0, kind, 0), EMPTY, copy=True)
        return connection is not None

    def hear_news(self, connection: Connection, kind: int, key: Key, text: bytes) -> None:
        """Hears, in the mesh's thread, a farewell, a loss, what may lie where, or the agreement."""
        if kind == TAKEN:
            self.memory.window.hear_taken(connection.rank, key[1])
        elif kind == ASKED:
            self.memory.window.hear_asked(connection.rank, MAILBOX.pack(*key))
        elif kind == HELD:
            self.mailboxes.hear_held(connection.rank, key)
        elif kind == FAREWELL:
            connection.is_ending = True
            if not key[1]:
                self.mailboxes.break_off(left=connection.rank)
                self.policy.leave(connection.rank)
        elif kind == LOST:
            try:
                rank, words, ends_all = json.loads(text)
                reason = Reason(str(words), ends_all=ends_all is True)
                self.policy.hear_loss(connection.rank, rank, reason)
            except (ValueError, TypeError, IndexError):
                self.lose(connection.rank, "told of the loss of a rank in an unknown form")
        elif kind == AGREEMENT:
            try:
                self.policy.hear(connection.rank, text)
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
                is_closing = self._closing_at < math.inf
                until = time.monotonic() + 0.05 if is_closing else next_beat
                self.connections.serve(min(until, self.policy.tick()))
        except Exception as error:
            self.lose(self.rank, failed(error))
            raise
        finally:
            self.connections.end()

    def _may_end(self) -> bool:
        if self._closing_at == math.inf:
            return False
        return self.connections.flush() or time.monotonic() > self._closing_at

    def _beat(self, *, judge: bool) -> None:
        now, header = time.monotonic(), HEADER.pack(0, 0, 0, HEARTBEAT, 0)
        for peer in self.watched:
            if connection := self.connections.for_news(peer):
                connection.send(header, EMPTY, copy=True)
            silence = now - self._heard.setdefault(peer, now)
            if not judge:
                self._heard[peer] = now
            elif silence > self.heartbeat_timeout_s and peer not in self.mailboxes.left:
                self.lose(peer, f"has not answered for {silence:.1f} s (stopped or cut off)")


class LossPolicy(Views):
    """What becomes of a loss that the mesh notices; in this class, the network ends.

    Args:
        mesh: the mesh
    """

    goes_on = False
    """Whether a loss is followed by a view of the ranks that are left."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def survive(self, min_ranks: int | None, groups: Sequence[Sequence[int]] = ()) -> None:
        """Has a view follow each loss from now on; the wing that does so takes this one's place."""
        survival = wings.load("elastic.survival", 'on_loss="continue"')
        survival.survive(self._mesh, min_ranks, groups)

    def lose(self, rank: int, reason: str, *, died: bool) -> None:
        """Takes another rank for lost; any thread calls it."""
        self._mesh.end(rank, reason)

    def blame(self, what: str) -> None:
        """Raises `PeerLost` if another library's collective fails for a rank that is lost."""
        self._mesh.verdict.wait(self._mesh.heartbeat_timeout_s)
        self._mesh.check(what)

    # ---- in the mesh's thread ----

    def tick(self) -> float:
        """Does what is due; returns the time of the next call at the latest."""
        return math.inf

    def leave(self, rank: int) -> None:
        """Hears a rank's farewell."""

    def hear_loss(self, sender: int, rank: int, reason: str) -> None:
        """Hears from a rank that one is lost; raises `IndexError` or `TypeError` for no rank."""
        self._mesh.lose(range(self._mesh.world_size)[rank], reason, died=True)

    def hear(self, sender: int, text: bytes) -> None:
        """Hears news of an agreement; raises `ValueError` or `TypeError` where they are none."""


class QuickSwitches:
    """Has this process's threads hand over the interpreter sooner, while a network is open."""

    def __init__(self) -> None:
        self._before_s = sys.getswitchinterval()

    def begin(self) -> None:
        """Shortens the interval, unless it is shorter already."""
        sys.setswitchinterval(min(self._before_s, _SWITCH_INTERVAL_S))

    def end(self) -> None:
        """Gives back the interval of before."""
        sys.setswitchinterval(self._before_s)


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
