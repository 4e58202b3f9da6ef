"""How replicas lie on ranks: here each rank holds one; a door to the wing `sharded`.

There a row of ranks holds a replica; a column of ranks holds the same shard of all replicas.  What
is asked where a rank is lost stands in `elastic.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.flat import Whole
from lightning_dsgd.session.checkpoint import files
from lightning_dsgd.session.checkpoint.saving import save
from lightning_dsgd.transport import PeerLost, Transport


class Sharding:
    """Which ranks hold the same shard, and what the ranks of a replica do together."""

    in_rows = False
    """Whether ranks are in rows and columns."""

    @property
    def num_shards(self) -> int:
        """How many ranks hold a replica together."""
        return 1

    def column(self, net: Transport) -> Transport:
        """Returns the network of the ranks that hold the same shard."""
        return net

    def check_ranks(self, net: Transport) -> None:
        """Raises, on every rank, unless every rank is in one column and all columns are as long."""

    def layout(
        self,
        net: Transport,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
    ) -> Whole:
        """Returns the layout of a model that an algorithm can train; all ranks call it together."""
        return Whole()

    def lost_behind(self, session: Any, exception: BaseException) -> PeerLost | None:
        """Returns the lost rank that has made a collective of the shards fail, if one has."""
        return None

    def save(self, session: Any, path: str, checkpoint: Callable[[], dict[str, Any]]) -> None:
        """Saves what all ranks agree on, and each rank's own beside it; on all ranks together."""
        save(session, files.TorchFiles(), path, checkpoint(), has_replicas=True)

    def load_model(
        self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Takes over weights and buffers, in shards or whole."""
        model.load_state_dict(state, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Takes over an optimizer's state, in shards or whole."""
        optimizer.load_state_dict(state)
