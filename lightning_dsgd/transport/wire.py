"""What carries messages between processes: the contract of a wire, and the wire of TCP.

A transport is given a wire, that of TCP or of the wing `mpi`; who is alive is the mesh's matter,
whatever the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.staging import Staging


class Wire(Protocol):
    """Carries the messages of all threads of this process, and fills its mailboxes.

    A wire gives up by itself once the mesh has lost a rank.
    """

    engine: str
    """What carries messages, as users and `Counters` name it."""
    reads_devices: bool = False
    """Whether it reads and writes the memory of devices, once it is open."""

    expect: Callable[[], None] | None = None
    """Tells the wire that a thread has begun to wait, where it does not read at all times."""

    @property
    def name(self) -> str:
        """What this rank tells the others of its wire; the first word is the same on all ranks."""
        ...

    def check_names(self, names: list[str]) -> None:
        """Raises `TransportError`, on every rank, if this wire cannot join these ranks."""
        return  # without a statement, mypy takes a protocol's method for abstract

    def open(self, mesh: Mesh) -> None:
        """Makes the wire ready, once the mesh is ready: all ranks call it together."""
        ...

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Starts sending a message; messages for one channel and tag arrive in order.

        With `copy`, `x` may change at once, else once the Work is done.
        """
        ...

    def close(self) -> bool:
        """Ends the wire, at once if a rank is lost; else says farewell behind its last message.

        Returns whether the wire has carried messages beside the mesh's connections: then a
        farewell on these is not the last that comes from this rank.
        """
        ...


class TCPWire(Wire):
    """Carries messages on the mesh's connections, between the news.

    So one stream brings all that a rank sends, its farewell last.  This wire has no thread but the
    mesh's and the stager's.
    """

    name = "process_group"
    """The name by which users choose this wire."""
    engine = "TCP"

    _connections: Connections
    _staging: Staging | None = None

    def open(self, mesh: Mesh) -> None:
        """Takes the mesh's connections, each of which is made when it is first needed."""
        self._connections = mesh.connections
        self._staging = Staging(mesh, self._connections.to)

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands over what the connection takes at once; the mesh's thread sends the rest."""
        assert self._staging is not None
        if self._staging.admit_past(dst, header, x):
            return self._connections.to(dst).send(header, x, copy=copy)
        return self._staging.send(dst, header, x, copy=copy)

    def close(self) -> bool:
        """Sends what comes from a device; the mesh says farewell and closes the connections."""
        if self._staging is not None:
            self._staging.close()
        return False
