"""What `lightning-dsgd probe` has found out about a cluster, as a file and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "lightning_dsgd cluster 1"


@dataclass(frozen=True)
class Link:
    """Describes what connects two ranks.

    Args:
        latency_s: the time of a message of 8 bytes, one way
        bandwidth_bytes_s: the rate of one large message, while nobody else sends
        together_bytes_s: the rate of each rank, while all ranks send and receive at once
    """

    latency_s: float
    bandwidth_bytes_s: float
    together_bytes_s: float


@dataclass(frozen=True)
class Processor:
    """Says what one core takes for its part in communication, in seconds.

    Args:
        send_s: to send a message, whatever its length, all threads of the process together
        send_s_per_byte: to send each byte of a message
        receive_s: to receive a message
        receive_s_per_byte: to receive each byte of a message
        add_s_per_byte: to add what has arrived to a sum, in memory
        copy_s_per_byte: to copy what has arrived
        topk_s: to take an exact top-k, for each element from which it is taken
        threshold_s: to accumulate and select by a known threshold, for each element
        unpack_s_per_byte: to unpack selected entries, and add them to a sum
        sparse_s: by the name of a sparse strategy: the time of its own code in a step, besides
            sending and unpacking, whatever the length of the gradient, and for each element of it;
            empty where ranks do not compute on processors
        dense_s_per_byte: by the name of another strategy: the time for the numbers that it
            receives, besides receiving, for each byte of them
    """

    send_s: float
    send_s_per_byte: float
    receive_s: float
    receive_s_per_byte: float
    add_s_per_byte: float
    copy_s_per_byte: float
    topk_s: float
    threshold_s: float
    unpack_s_per_byte: float
    sparse_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    dense_s_per_byte: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Describes a cluster, as far as it was probed.

    Args:
        ranks: the number of ranks
        ranks_per_node: ranks on each node; on the largest, where nodes differ
        ranks_per_machine: ranks that share the cores of one kernel; emulated nodes share one
        cores: the cores of a machine
        device: the device on which ranks compute
        transport: what carries messages
        inside: the link between two ranks of a node; None if there were none
        between: the link between ranks of two nodes; None if there were none
        all_reduce: pairs of bytes and seconds
        processor: what communication takes of a core
    """

    ranks: int
    ranks_per_node: int
    ranks_per_machine: int
    cores: int
    device: str
    transport: str
    inside: Link | None
    between: Link | None
    all_reduce: tuple[tuple[int, float], ...]
    processor: Processor

    @property
    def link(self) -> Link:
        """The link between nodes; inside the node where there is only one."""
        link = self.between or self.inside
        if link is None:
            raise ValueError("a cluster must have two ranks to have a link, got one; probe with 2")
        return link

    def to_json(self) -> dict[str, Any]:
        """Returns the cluster as JSON, for a file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Cluster:
        """Reads what `lightning-dsgd probe --output` has written."""
        try:
            found = json.loads(path.read_text())
            got = f"one without the format {FORMAT!r}"
        except FileNotFoundError:
            found, got = None, f"none; `lightning-dsgd probe --ranks 4 --output {path}` writes one"
        except ValueError:
            found, got = None, "one that is no JSON"
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{path} must be a file of `lightning-dsgd probe --output`, got {got}")

        def link(name: str) -> Link | None:
            return Link(**found[name]) if found[name] else None

        costs = found["processor"]
        sparse_s = {name: (least, each) for name, (least, each) in costs["sparse_s"].items()}
        return cls(
            ranks=found["ranks"],
            ranks_per_node=found["ranks_per_node"],
            ranks_per_machine=found["ranks_per_machine"],
            cores=found["cores"],
            device=found["device"],
            transport=found["transport"],
            inside=link("inside"),
            between=link("between"),
            all_reduce=tuple((int(size), float(s)) for size, s in found["all_reduce"]),
            processor=Processor(**{**costs, "sparse_s": sparse_s}),
        )


def table(cluster: Cluster) -> str:
    """Returns the cluster as a table for people."""
    nodes = -(-cluster.ranks // cluster.ranks_per_node)
    rows: list[tuple[str, str]] = [
        ("ranks", f"{cluster.ranks}, {cluster.ranks_per_node} on each of {nodes} nodes"),
        ("cores", f"{cluster.cores} for {cluster.ranks_per_machine} ranks"),
        ("device", cluster.device),
        ("transport", cluster.transport),
    ]
    for name, link in (("inside a node", cluster.inside), ("between nodes", cluster.between)):
        if link is not None:
            rate, together = link.bandwidth_bytes_s, link.together_bytes_s
            rows.append((name, f"latency {_time(link.latency_s)}, {_rate(rate)}"))
            rows.append(
                ("  all at once", f"{_rate(together)} for each rank, {together / rate:.2f}")
            )
    for size, seconds in cluster.all_reduce:
        rows.append((f"all-reduce of {_size(size)}", _time(seconds)))
    cpu = cluster.processor
    rows += [
        ("to send", f"{_time(cpu.send_s)} a message, {_rate(1 / cpu.send_s_per_byte)}"),
        ("to receive", f"{_time(cpu.receive_s)} a message, {_rate(1 / cpu.receive_s_per_byte)}"),
        ("to add", _rate(1 / cpu.add_s_per_byte)),
        ("to copy", _rate(1 / cpu.copy_s_per_byte)),
        ("exact top-k", f"{1e9 * cpu.topk_s:.2f} ns for each element"),
        ("by a threshold", f"{1e9 * cpu.threshold_s:.2f} ns for each element"),
        ("to unpack", _rate(1 / cpu.unpack_s_per_byte)),
    ]
    for name, (least_s, each_s) in cpu.sparse_s.items():
        rows.append((name, f"{_time(least_s)} a step, {1e9 * each_s:.1f} ns for each element"))
    for name, byte_s in cpu.dense_s_per_byte.items():
        rows.append((name, f"{1e9 * byte_s:.2f} ns for each byte received"))
    return in_columns(rows)


def in_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Returns two columns of text."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.3g} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.3g} MB/s"


def _size(size: int) -> str:
    return f"{size / 1e6:g} MB" if size >= 1_000_000 else f"{size / 1e3:g} kB"
