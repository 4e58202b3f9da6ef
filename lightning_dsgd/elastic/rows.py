"""What this wing asks of replicas that several ranks hold: a door to the wing `sharded`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lightning_dsgd.transport import PeerLost, Transport
from lightning_dsgd.transport.view import View


class Row(Protocol):
    """Asks the ranks that hold a replica together with this one."""

    def has_lost(self, lost: PeerLost | None) -> bool:
        """Returns whether any rank of the row has met a loss; all call it and get the same answer.

        Args:
            lost: the loss that this rank has met

        Raises:
            PeerLost: if a rank of the row is lost
        """
        ...


class ShardingInRows(Protocol):
    """Which ranks hold the same shard, and which ranks are lost together."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold this rank's shard, one of each replica, in the replicas' order."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many replicas of the model there are."""
        ...

    def column(self, net: Transport) -> View:
        """The network of the ranks that hold the same shard."""
        ...

    def rows(self, net: Transport) -> list[tuple[int, ...]]:
        """The ranks of each replica; all ranks call it together."""
        ...

    def among(self, members: Sequence[int], rows: Sequence[tuple[int, ...]]) -> ShardingInRows:
        """The same sharding among the ranks of a view, by their numbers in it."""
        ...

    def row_of(self, session: Any, rows: list[tuple[int, ...]]) -> Row:
        """The ranks that hold this replica together; all ranks call it together."""
        ...
