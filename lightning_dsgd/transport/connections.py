"""All connections of this process: who is called, who calls, and who is turned away.

    rank i -- connection i to j, made when i first sends to j --> rank j

They are served in rounds (`serve`), by the mesh's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from lightning_dsgd.transport.connection import Connection, Owner, prepare
from lightning_dsgd.transport.contract import TransportError
from lightning_dsgd.transport.handshake import MOST_STRANGERS, Secret, Stranger

_SIOCGIFADDR: Final = 0x8915
_PLACE_ON_NODE: Final = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID",
)  # fmt: skip
"""Variables in which a launcher tells a rank which of its node's ranks it is."""
_CONNECT_TIMEOUT_S: Final = 30.0
"""A rank that cannot be reached for so long, or for `heartbeat_timeout_s`, is lost."""
_CONNECT_AGAIN_S: Final = 0.05
_ACCEPTS_IN_A_ROW: Final = 64
_ACCEPT_AGAIN_S: Final = 0.1
"""After how long to look again whether there are descriptors for more connections."""


class Connections:
    """The connections to and from the other ranks.

    The thread that opens the network calls `listen`, and `open` or `stop_listening`, before the
    mesh's thread starts.  Any thread may ask for a connection `to` a rank: `_connecting` is held
    while one is made.  The selector, the listener and the strangers are the mesh's thread's.
    `_outgoing`, `_incoming` and `_to_attend` are written by one thread and copied or taken from by
    another in single operations of a dict, list or deque, which relies on the interpreter's lock.

    Args:
        owner: the mesh
        world_size: P
    """

    def __init__(self, owner: Owner, world_size: int) -> None:
        self._owner = owner
        self._world_size = world_size
        self._addresses: dict[int, tuple[str, int]] = {}
        self._outgoing: dict[int, Connection] = {}
        self._incoming: list[Connection] = []
        self._strangers: dict[Stranger, None] = {}  # the first has waited longest
        self._accept_again_at = float("inf")
        self._connecting = threading.Lock()
        self._to_attend: deque[Connection] = deque()

    # ---- opening ----

    def listen(self) -> tuple[str, int]:
        """Begins to listen; returns where the other ranks reach this one."""
        _allow_open_files(4 * self._world_size + 256)
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        backlog = self._world_size + MOST_STRANGERS
        self._listener = socket.create_server((host, 0), family=family, backlog=backlog)
        return host, self._listener.getsockname()[1]

    def stop_listening(self) -> None:
        """Closes the listening socket of a network that will not be opened."""
        self._listener.close()

    def open(self, addresses: Mapping[int, tuple[str, int]], secret: bytes) -> None:
        """Makes connections possible, to these addresses, with the job's secret."""
        self._addresses = dict(addresses)
        self._secret = Secret(secret, self._owner.rank, self._world_size)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def let_in_newcomers(self) -> None:
        """Lets ranks with higher numbers come that were not there at the start."""
        self._secret.knows_newcomers = True

    # ---- from any thread ----

    def own(self) -> tuple[str, int]:
        """Returns the host and port where this rank listens."""
        return self._addresses[self._owner.rank]

    def known(self) -> list[int]:
        """Returns the other ranks whose address was given."""
        return [rank for rank in self._addresses if rank != self._owner.rank]

    def reaches(self, rank: int) -> bool:
        """Returns whether a rank can be reached; one that cannot does not count as lost."""
        try:
            with self._connecting:
                if rank not in self._outgoing:
                    self._keep(rank, self._connect(rank))
        except OSError:
            return False
        return True

    def all(self) -> list[Connection]:
        """Returns the connections whose other end is known."""
        return [*self._outgoing.values(), *self._incoming]

    def made_to(self, rank: int) -> Connection | None:
        """Returns the connection on which this rank sends to another, if there is one."""
        return self._outgoing.get(rank)

    def for_news(self, rank: int) -> Connection | None:
        """Returns the connection on which news wait behind no message, if there is one: theirs.

        Any thread calls it, while the mesh's may change the list.
        """
        theirs = (connection for connection in [*self._incoming] if connection.rank == rank)
        return next(theirs, self._outgoing.get(rank))

    def to(self, rank: int) -> Connection:
        """Returns the connection on which to send to a rank; one out of reach is lost."""
        if rank in self._outgoing:
            return self._outgoing[rank]
        with self._connecting:
            if rank not in self._outgoing:
                try:
                    if rank not in self._addresses:
                        raise ConnectionError("it has not connected to this rank")
                    sock = self._connect(rank)
                except OSError as err:
                    me = self._owner.rank
                    self._owner.lose(
                        rank,
                        f"cannot be reached at {self.address(rank)} from rank {me} at "
                        f"{self.address(me)}: {err}; if that is not its address there, set "
                        f"GLOO_SOCKET_IFNAME on rank {rank}",
                    )
                    self._owner.check(f"connecting to rank {rank}")
                    raise
                self._keep(rank, sock)
            return self._outgoing[rank]

    def _keep(self, rank: int, sock: socket.socket) -> None:
        prepare(sock, self._owner.heartbeat_timeout_s)
        connection = Connection(sock, rank, self._owner, self._attend)
        self._outgoing[rank] = connection
        self._attend(connection)

    def _connect(self, rank: int) -> socket.socket:
        """Returns a socket at whose other end that rank is."""
        limit = min(_CONNECT_TIMEOUT_S, self._owner.heartbeat_timeout_s)
        deadline = time.monotonic() + limit
        while True:
            patience = max(_CONNECT_AGAIN_S, deadline - time.monotonic())
            sock = socket.create_connection(self._addresses[rank], patience)
            try:
                self._secret.introduce(sock, rank)
                return sock
            except OSError as err:
                sock.close()
                if not isinstance(err, ConnectionError) or time.monotonic() > deadline:
                    raise
            self._owner.check(f"connecting to rank {rank}")
            time.sleep(_CONNECT_AGAIN_S)  # this rank was turned away, among too many strangers

    def _attend(self, connection: Connection) -> None:
        """Has the mesh's thread serve a connection that is new or has something left to send."""
        self._to_attend.append(connection)
        self.wake()

    def wake(self) -> None:
        """Ends the round in which the mesh's thread waits."""
        with contextlib.suppress(OSError):  # full: the thread will wake anyway
            self._wake_write.send(b"\0")

    def address(self, rank: int) -> str:
        """Says in words where the rank listens."""
        host, port = self._addresses.get(rank, ("an address", "that it has not told"))
        return f"{host}:{port}"

    # ---- in the mesh's thread ----

    def serve(self, until: float) -> None:
        """Waits, until then at most, for something to come or leave, and moves it on: one round."""
        for key, events in self._selector.select(self._patience(until)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_read:
                self._wake_read.recv(4096)
            elif isinstance(key.data, Stranger):
                self._serve_stranger(key.data)
            else:
                self._serve_connection(key.data, events)
        while self._to_attend:
            self._watch(self._to_attend.popleft())
        self._look_after_strangers()  # once all that strangers have said is read

    def _patience(self, until: float) -> float:
        """Returns for how long there is nothing to do if nothing comes."""
        first = next(iter(self._strangers)).until if self._strangers else until
        return max(0.0, min(until, first, self._accept_again_at) - time.monotonic())

    def flush(self) -> bool:
        """Sends what the connections take; returns whether nothing is left."""
        flushed = [connection.flush() for connection in self.all()]
        return all(flushed)

    def end(self) -> None:
        """Closes all connections; every wait for the rest of a message to leave ends."""
        for connection in self.all():
            connection.drop_queue()
        self.close_files()
        self._selector.close()

    def close_files(self) -> None:
        """Closes all sockets: at the end, and in a forked child, which would keep them open."""
        known = [connection.sock for connection in self.all()]
        unknown = [stranger.sock for stranger in self._strangers]
        for sock in (*known, *unknown, self._listener, self._wake_read, self._wake_write):
            sock.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptors: to ask again at once would take a core
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + _ACCEPT_AGAIN_S
                return
            try:
                prepare(sock, self._owner.heartbeat_timeout_s)
                stranger = Stranger(sock, self._secret)
            except OSError:  # the stranger has gone already
                sock.close()
                continue
            self._strangers[stranger] = None
            self._selector.register(sock, selectors.EVENT_READ, stranger)
            if len(self._strangers) > self._world_size + MOST_STRANGERS:
                self._turn_away(next(iter(self._strangers)))

    def _serve_stranger(self, stranger: Stranger) -> None:
        if stranger not in self._strangers:
            return  # the stranger was turned away, in the same round
        if not stranger.read():
            self._turn_away(stranger)
        elif stranger.rank is not None:
            del self._strangers[stranger]
            connection = Connection(stranger.sock, stranger.rank, self._owner, self._attend)
            # From here on other threads may send.
            if stranger.rank in self._addresses:
                self._incoming.append(connection)
            else:  # a newcomer: this rank sends to it on the same connection
                self._outgoing[stranger.rank] = connection
                self._owner.hear_newcomer(stranger.rank)
            self._watch(connection)

    def _turn_away(self, stranger: Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.sock)
        stranger.sock.close()

    def _look_after_strangers(self) -> None:
        """Turns away strangers that have had their time, and listens again once it is time."""
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers)).until <= now:
            self._turn_away(next(iter(self._strangers)))
        if self._accept_again_at <= now:
            self._accept_again_at = float("inf")
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _watch(self, connection: Connection) -> None:
        """Has a round wait for bytes to read, and for space where something is left to send."""
        events = selectors.EVENT_READ | (0 if connection.flush() else selectors.EVENT_WRITE)
        if connection.sock.fileno() < 0:
            return
        try:
            self._selector.modify(connection.sock, events, connection)
        except KeyError:
            self._selector.register(connection.sock, events, connection)

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_READ and not connection.read():
            self._selector.unregister(connection.sock)
            connection.sock.close()
            connection.drop_queue()
            if connection in self._incoming:
                self._incoming.remove(connection)
            self._owner.hear_end(connection)
        elif events & selectors.EVENT_WRITE:
            self._owner.hear(connection.rank)  # it has taken what filled the kernel's memory
            self._watch(connection)


def own_address() -> str:
    """Returns the address at which the other ranks reach this one.

    The interface that GLOO_SOCKET_IFNAME names has this address, as for gloo; without the variable,
    the interface from which the rendezvous host, MASTER_ADDR, is reached.  Where it names several,
    the ranks of a node take them in turn.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        given = interface.split(",")
        place = next((int(os.environ[v]) for v in _PLACE_ON_NODE if v in os.environ), 0)
        interface = given[place % len(given)].strip()
        request = struct.pack("256s", interface.encode())
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
