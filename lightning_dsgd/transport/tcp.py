"""The wire of TCP: messages travel on the mesh's connections, between the news.

So one stream brings all that a rank sends, its farewell last.
"""

from __future__ import annotations

from torch import Tensor

from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.staging import Staging
from lightning_dsgd.transport.wire import Wire


class TCPWire(Wire):
    """Carries messages over TCP; has no thread but the mesh's and the stager's."""

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
