"""What the core asks of replicas that several ranks hold together: a door to the wing `sharded`.

A row of ranks holds a replica; a column of ranks holds the same shard of all replicas.  What is
asked where a rank is lost stands in `elastic.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.flat import Whole
from lightning_dsgd.transport import PeerLost, Transport
from lightning_dsgd.transport.view import View


class Sharding(Protocol):
    """Which ranks hold the same shard, and what the ranks of a replica do together."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold this rank's shard, one of each replica, in the replicas' order."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many replicas of the model there are."""
        ...

    @property
    def num_shards(self) -> int:
        """How many ranks hold a replica together."""
        ...

    def column(self, net: Transport) -> View:
        """The network of the ranks that hold the same shard."""
        ...

    def check_ranks(self, net: Transport) -> None:
        """Raises, on every rank, unless every rank is in one column, and all are as long."""
        ...

    def layout(
        self,
        net: Transport,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
    ) -> Whole:
        """How a model that the algorithm can train is laid out; all ranks call it together."""
        ...

    def lost_behind(self, session: Any, exception: BaseException) -> PeerLost | None:
        """The lost rank that has made a collective of the shards fail, if that is what it was."""
        ...

    def save(self, session: Any, path: str, checkpoint: Callable[[], dict[str, Any]]) -> None:
        """Saves what all ranks agree on, and each rank's own beside it; on all ranks together."""
        ...

    def load_model(
        self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Takes over weights and buffers, in shards or whole."""
        ...

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Takes over an optimizer's state, in shards or whole."""
        ...
