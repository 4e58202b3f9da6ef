"""A cluster on one machine: every node a network namespace behind a link of a chosen speed.

    node 0: eth0 10.77.0.1  --tbf-->  p0 \
    node 1: eth0 10.77.0.2  --tbf-->  p1  > a bridge, in a namespace of its own
    ...                     <--tbf--     /

A token bucket at both ends of each link lets so many bits a second through in each direction, as a
full-duplex network card does; `netem` adds the latency where the kernel has it.  TCP is Reno, which
fills such a link in the many short turns of an all-reduce, with an idle connection as fast as a
busy one: BBR, the default of some machines, reaches but 0.6 of the rate with 8 nodes.  Needs root,
`ip` and `tc` of iproute2, and `unshare`.  The names hold the process that made them, so that what a
killed process has left behind is known and removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from lightning_dsgd.lab.link import Link

SUBNET: Final = "10.77.0"
INTERFACE: Final = "eth0"
MAX_NODES: Final = 250
_PREFIX: Final = "dsgd"
_COMMAND_TIMEOUT_S: Final = 30
_BURST_S: Final = 0.002
"""A bucket holds what its link carries in this time: as little as the kernel's timers allow."""
_LEAST_BURST: Final = 128_000
"""Room for what TCP hands over at once, which else is cut into packets at great cost."""
_QUEUE_S: Final = 0.128
"""A link holds back what it carries in this time, and so loses nothing."""
_TCP: Final = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}


def why_not() -> str:
    """Says why this machine cannot make namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"nodes need {' and '.join(missing)} (packages iproute2, util-linux, hostname)"
    probe = f"{_PREFIX}{os.getpid()}-probe"
    made = _try("ip", "netns", "add", probe)
    _try("ip", "netns", "del", probe)
    return f"this machine makes no network namespaces: {made}" if made else ""


def demanded(text: str | None) -> Link | None:
    """Returns the links of `--network`; raises `ValueError` if this machine cannot make them."""
    link = Link.parse(text) if text else None
    if link is not None and why_not():
        raise ValueError(f"--network cannot be had here: {why_not()}; leave it out")
    return link


class Network:
    """Makes nodes behind links, while the `with` block lasts.

    Args:
        num_nodes: the number of nodes
        link: the link of every node
    """

    def __init__(self, num_nodes: int, link: Link) -> None:
        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(
                f"the number of nodes must be from 1 to {MAX_NODES}, got {num_nodes}; try 8"
            )
        self.num_nodes = num_nodes
        self.link = link
        self._owner = f"{_PREFIX}{os.getpid()}"
        self._switch = f"{self._owner}-sw"

    def __enter__(self) -> Network:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._remove()

    def namespace(self, node: int) -> str:
        """Returns the name of a node's namespace, for `ip netns exec`."""
        return f"{self._owner}-{node}"

    def address(self, node: int) -> str:
        """Returns the address at which the other nodes reach a node."""
        return f"{SUBNET}.{node + 1}"

    def inside(self, node: int) -> list[str]:
        """Returns what a command is preceded by to run on this node.

        The node's host name is its address, which every node can resolve.
        """
        named = f'hostname {self.address(node)} && exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace(node)]
        return [*enter, "unshare", "--uts", "sh", "-c", named, "sh"]

    def shell(self, folder: Path) -> Path:
        """Makes a program that stands in for ssh; it takes the nodes' addresses for hosts."""
        names = self.namespace(0).removesuffix("-0")
        program = folder / "nsrsh"
        program.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            "host=$1; node=$((${1##*.} - 1)); shift\n"
            f'exec ip netns exec {names}-$node unshare --uts sh -c "hostname $host; $*"\n'
        )
        program.chmod(0o700)
        return program

    def cut(self, *nodes: int) -> None:
        """Lets nothing through between these nodes any more, as a broken switch does."""
        self._isolate(nodes, "on")

    def mend(self, *nodes: int) -> None:
        """Lets everything through between these nodes again."""
        self._isolate(nodes, "off")

    def _isolate(self, nodes: tuple[int, ...], switched: str) -> None:
        for node in nodes:
            port = ["dev", f"p{node}", "type", "bridge_slave"]
            _run("ip", "-n", self._switch, "link", "set", *port, "isolated", switched)

    def _build(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for node in range(self.num_nodes):
            name, port = self.namespace(node), f"p{node}"
            _run("ip", "netns", "add", name)
            pair = [INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "link", "add", *pair)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            for key, value in _TCP.items():
                write = f"echo {value} > /proc/sys/net/ipv4/{key}"
                _run("ip", "netns", "exec", name, "sh", "-c", write)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            self._shape(name, INTERFACE)
            self._shape(switch, port)

    def _shape(self, namespace: str, device: str) -> None:
        rate = self.link.rate_bit_s
        burst = max(_LEAST_BURST, round(rate / 8 * _BURST_S))
        queue = max(16 * _LEAST_BURST, round(rate / 8 * _QUEUE_S))
        tc = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
        bucket = ["rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(queue)]
        _run(*tc, "root", "handle", "1:", "tbf", *bucket)
        if self.link.latency_s and device == INTERFACE:
            delay = [f"{self.link.latency_s * 1e6:.0f}us", "limit", "100000"]
            refused = _try(*tc, "parent", "1:1", "handle", "10:", "netem", "delay", *delay)
            if refused:
                raise RuntimeError(
                    f"a link of {self.link.latency_s * 1e3:g} ms needs the kernel's netem, which "
                    f"is not here ({refused}); leave the latency out"
                )

    def _remove(self) -> None:
        for namespace in (*map(self.namespace, range(self.num_nodes)), self._switch):
            _try("ip", "netns", "del", namespace)


def remove_stale() -> list[str]:
    """Removes, and names, what processes that are gone have left behind."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
    ).stdout
    stale = [
        match[0]
        for match in re.finditer(rf"^{_PREFIX}(\d+)-\w+", listed, re.MULTILINE)
        if not os.path.exists(f"/proc/{match[1]}")
    ]
    for namespace in stale:
        _try("ip", "netns", "del", namespace)
    return stale


def describe(link: Link | None) -> dict[str, Any]:
    """Describes, for a result file, the network over which it was measured."""
    if link is None:
        return {"emulated": False, "rate_bit_s": None, "latency_s": None}
    settings = {"rate_bit_s": link.rate_bit_s, "latency_s": link.latency_s}
    return {"emulated": True, **settings, "tcp": _TCP["tcp_congestion_control"]}


def _run(*command: str) -> None:
    refused = _try(*command)
    if refused:
        raise RuntimeError(f"`{' '.join(command)}` failed: {refused}")


def _try(*command: str) -> str:
    """Runs the command; returns its complaint, empty if it had none."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
