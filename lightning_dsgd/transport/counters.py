"""What a rank has sent, by which engine, and how long it has waited."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dsgd.transport.watch import Watch


@dataclass
class Traffic:
    """What one engine has carried away from this rank."""

    bytes: int = 0
    messages: int = 0


@dataclass
class Counters:
    """What this rank has sent and how long it has waited; its lanes share one object."""

    sent: dict[str, Traffic] = field(default_factory=dict)
    """By engine: "TCP" and "MPI" carry messages; "NCCL", or "gloo" on CPUs, makes sums."""
    wait_s: float = 0.0
    comm_s: float = 0.0
    watch: Watch | None = None
    """Is told of every wait, the waits of lanes included."""

    def count(self, engine: str, num_bytes: int, num_messages: int = 1) -> None:
        """Counts what an engine carries away from this rank."""
        traffic = self.sent.setdefault(engine, Traffic())
        traffic.bytes += num_bytes
        traffic.messages += num_messages

    @property
    def bytes_sent(self) -> int:
        """The bytes that all engines have carried."""
        return sum(traffic.bytes for traffic in list(self.sent.values()))

    @property
    def messages_sent(self) -> int:
        """The messages that all engines have carried."""
        return sum(traffic.messages for traffic in list(self.sent.values()))
