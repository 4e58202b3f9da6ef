"""Over which network interface each kind of traffic between ranks leaves this machine.

    messages          GLOO_SOCKET_IFNAME, else the interface that leads to the rendezvous
    gloo              GLOO_SOCKET_IFNAME, else the one whose address this machine's name has
    NCCL, UCX, MPI    their own variables; without one, the library chooses, and nothing is told

Traffic that takes a second, slower network makes a job slow, and no error tells it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final

from lightning_dsgd.transport.names import NODE_LISTS, first_node

_SIOCGIFADDR: Final = 0x8915
_OWN_VARIABLES: Final = {
    "NCCL": "NCCL_SOCKET_IFNAME",
    "UCX": "UCX_NET_DEVICES",
    "libfabric": "FI_TCP_IFACE",
    "Open MPI": "OMPI_MCA_btl_tcp_if_include",
}


def rendezvous(variables: Mapping[str, str] = os.environ) -> str:
    """Returns the machine where the ranks of this job meet; empty if no launcher has named it."""
    given = variables.get("MASTER_ADDR", "")
    lists = [variables[name] for name in NODE_LISTS if name in variables]
    return given or (first_node(lists[0]) if lists else "")


def interfaces(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the interface of each kind of traffic, as far as it is known.

    Raises:
        OSError: if a name does not resolve
    """
    chosen = variables.get("GLOO_SOCKET_IFNAME", "")
    found = {
        "messages": chosen or _interface_of(_address_towards(rendezvous(variables))),
        "gloo": chosen or _interface_of(socket.gethostbyname(socket.gethostname())),
    }
    for name, variable in _OWN_VARIABLES.items():
        given = variables.get(variable, "").lstrip("=")
        if given and not given.startswith("^"):  # which leaves interfaces out
            found[name] = given
    return found


def _address_towards(host: str) -> str:
    """Returns this machine's address on the way to a host."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """Returns the interface with this address, or the address where none has it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return address
