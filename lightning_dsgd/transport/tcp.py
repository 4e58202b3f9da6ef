"""The wire of TCP: messages travel on the mesh's connections, between the news.

So one stream brings all that comes from a rank, its farewell last.
"""

from __future__ import annotations

from torch import Tensor

from lightning_dsgd.devices import is_on_host
from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.frames import from_device
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.staging import Staging


class TCPWire:
    """What carries messages in place of gloo; has no thread but the mesh's and the stager's."""

    name = "process_group"
    """What users choose it by."""
    carrier = "TCP"

    _connections: Connections
    _staging: Staging | None = None

    def check_names(self, names: list[str]) -> None:
        """All ranks that have one can be joined."""

    def open(self, mesh: Mesh) -> None:
        """Takes the mesh's connections, which are made when they are first needed."""
        self._connections = mesh.connections
        self._staging = Staging(mesh, self._connections.to)

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands over what the connection takes at once; the mesh's thread sends the rest."""
        assert self._staging is not None
        if not self._staging.takes(dst, header, x):
            return self._connections.to(dst).send(header, x, copy=copy)
        return self._staging.send(
            dst, header if is_on_host(x) else from_device(header), x, copy=copy
        )

    def expect(self) -> None:
        """The mesh's thread looks out for messages at all times."""

    def close(self) -> bool:
        """Sends what comes from a device; the mesh says farewell, and closes the connections."""
        if self._staging is not None:
            self._staging.close()
        return False
