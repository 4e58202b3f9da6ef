"""Replicas that several ranks hold together: which ranks are lost, and come, together.

    row       the k ranks that hold a replica; the ranks of the start in the rows of their mesh
    column    the ranks that hold the same shard, one of each row

A lost rank takes its row out of the training.  The ranks of that row cannot go on, as FSDP's groups
cannot take a new member; so all of them end, and come again together, as newcomers (`gathering`).

**Numbers.**  The ranks of a Trainer's replica are consecutive: rank n is in row n // k and in
column n % k.  Newcomers keep to that: a row of them takes k numbers at once, from a multiple of k
on.  So nobody keeps a table of rows that have come.  The mesh of a loop in plain PyTorch may have
other rows; nobody joins a loop.

**No snapshot.**  What a newcomer needs, its column has: the others there hold the same shard, and
the optimizer's state for it, on other nodes, as it is now.  The first of them that is no newcomer
gives both (`changes`).  With one replica there is nobody to give them: its job ends with a lost
rank, and resumes from a checkpoint.

This module is also a door to the wing `sharded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lightning_dsgd.transport import PeerLost, Transport
from lightning_dsgd.transport.view import View


def consecutive(num_ranks: int, num_shards: int) -> list[tuple[int, ...]]:
    """Returns the ranks of each replica, where these are consecutive."""
    return [tuple(range(n, n + num_shards)) for n in range(0, num_ranks, num_shards)]


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

    def meet(self) -> None:
        """Waits for the other ranks of the row, which call it too, before it is in a view.

        Raises:
            RuntimeError: if one of them has ended
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

    def row_of(self, session: Any, rows: Sequence[tuple[int, ...]] | None) -> Row:
        """The ranks that hold this replica together; all ranks call it together.

        Args:
            session: the session of this rank
            rows: the ranks of each replica; None: of a process group of this row alone
        """
        ...
