"""A job whose ranks hold several replicas of a model, each of them in shards.

    ranks of a mesh of 2 replicas x 3 shards       0 1 2     replica 0
                                                   3 4 5     replica 1

FSDP2 or tensor parallelism works within a replica: a row.  An algorithm works between replicas:
each column of ranks, which hold the same shard, has a network of its own (`column`), and
one instance of the algorithm for each part of that shard.  All ranks meet as in any other training.

What its ranks do together stands in `together`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_dsgd.agreement import by_rank, everyones, refuse_unless_alike
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.sharding import Sharding
from lightning_dsgd.sharded.shards import SHARD, Shards, local
from lightning_dsgd.sharded.together import ProcessRow, lost_behind, save
from lightning_dsgd.transport import PeerLost, Transport
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.view import View

_TIMELESS: Final = "local_sgd, diloco, dpsgd or sgp with overlap=0"


def check_algorithm(algorithm: Algorithm) -> None:
    """Raises unless an algorithm exchanges weights."""
    if algorithm.traits.uses_gradient:
        raise ValueError(
            "between sharded replicas an algorithm must exchange weights, got "
            f"{algorithm.name!r} with {algorithm.hyperparameters()}, which exchanges "
            "gradients, as FSDP does by itself: call fully_shard with a mesh of both "
            "dimensions and leave the algorithm out, or use for example LocalSGD or WAGMA"
        )


@dataclass(frozen=True)
class MeshSharding(Sharding):
    """The `Sharding` of a DeviceMesh.

    Args:
        members: the ranks that hold this rank's shard, one in each replica, in the replicas' order
        world_size: how many ranks there are
    """

    members: tuple[int, ...]
    world_size: int
    in_rows = True

    @staticmethod
    def of_mesh(mesh: Any, world_size: int) -> MeshSharding:
        """Returns the sharding of the dimension of a DeviceMesh along which the replicas lie."""
        if not hasattr(mesh, "mesh") or mesh.ndim != 1:
            raise ValueError(
                "replicas must be one dimension of a DeviceMesh, that of the replicas, got "
                f'{mesh!r}; use replicas=mesh["replica"]'
            )
        return MeshSharding(tuple(mesh.mesh.reshape(-1).tolist()), world_size)

    @property
    def num_replicas(self) -> int:
        """How many replicas of the model there are."""
        return len(self.members)

    @property
    def num_shards(self) -> int:
        """How many ranks hold a replica together."""
        return self.world_size // len(self.members)

    def rows(self, net: Transport) -> list[tuple[int, ...]]:
        """Returns the ranks of each replica; all ranks call it together."""
        columns = self._columns(net)
        return [
            tuple(rank for rank, column in enumerate(columns) if column.index(rank) == number)
            for number in range(self.num_replicas)
        ]

    def among(self, members: Sequence[int], rows: Sequence[tuple[int, ...]]) -> MeshSharding:
        """Returns the same sharding among the ranks of a view, by their numbers in the view.

        Newcomers are in rows of consecutive ranks, as those of the start are then.

        Args:
            members: the members of the view
            rows: the ranks of each replica at the start; the view has all of a replica's, or none
        """
        row_of = {rank: row for row in rows for rank in row}
        column = self.members[0] % self.num_shards
        new = [n for n in members if n not in row_of and n % self.num_shards == column]
        left = sorted((rank for rank in self.members if rank in members), key=row_of.__getitem__)
        return MeshSharding(tuple(map(members.index, [*left, *sorted(new)])), len(members))

    def column(self, net: Transport) -> View:
        """Returns the network of the ranks that hold the same shard; all ranks call it together.

        A replica's own collectives run while its lanes sum, in an order that only its ranks share.
        NCCL needs one order, so lanes sum by messages.
        """
        assert isinstance(net, Endpoint)
        columns = list(dict.fromkeys(self._columns(net)))
        return View.one_of(net, columns, sums_in_lanes=False)

    # ---- what cannot work ----

    def check_ranks(self, net: Transport) -> None:
        """Raises, on every rank, unless every rank is in one column and all columns are as long."""
        columns = self._columns(net)
        known = {rank: column for rank, column in enumerate(columns) if rank in column}
        is_whole = all(column == known.get(rank) for column in columns for rank in column)
        is_whole = is_whole and len(known) == len(columns) and len(set(map(len, columns))) == 1
        if not is_whole or columns[0][0] != 0:
            texts = [",".join(map(str, column)) for column in columns]
            raise ValueError(
                "replicas must be a dimension of a mesh that holds every rank once, with rank 0 in "
                "the first replica, got "
                f"{by_rank(texts)}; make it with init_device_mesh(device, (num_replicas, "
                f'num_shards), mesh_dim_names=("replica", "shard")) for all {net.world_size} ranks'
            )

    def _columns(self, net: Transport) -> list[tuple[int, ...]]:
        """Returns, for each rank, the ranks that hold its shard."""
        texts = everyones(net, ",".join(map(str, self.members)))
        return [tuple(map(int, text.split(","))) for text in texts]

    def layout(
        self,
        net: Transport,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
    ) -> Shards:
        """Returns the layout of a model that an algorithm can train; all ranks call it together."""
        layout = Shards(model)
        self._check_model(net, layout, optimizers, algorithm)
        return layout

    def _check_model(
        self,
        net: Transport,
        layout: Shards,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
    ) -> None:
        trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        others = set(self.members) - {net.rank}
        for parameter in trained:
            if isinstance(parameter, DTensor):
                ranks = set(parameter.device_mesh.mesh.reshape(-1).tolist())
                if ranks & others:
                    raise ValueError(
                        "a parameter must be sharded within its replica alone, got one on the "
                        f"ranks {sorted(ranks)}, of which {sorted(ranks & others)} belong to other "
                        'replicas; use fully_shard(module, mesh=mesh["shard"])'
                    )
        if self.num_shards == 1 or all(map(layout.is_fully_sharded, trained)):
            return
        if algorithm.traits.follows_time:
            with_scaling = " with scale_steps=True" if algorithm.traits.scales_steps else ""
            raise ValueError(
                "where several ranks of a replica hold the same parameter, as with tensor "
                "parallelism, an algorithm must not depend on which rank comes first, as they "
                f"would end with different values, got {algorithm.name!r}{with_scaling}; use "
                f"{_TIMELESS}, with scale_steps=False, or "
                "shard every parameter with fully_shard alone"
            )
        refuse_unless_alike(
            net,
            ", ".join(str(layout.length(parameter)) for parameter in trained),
            "with tensor parallelism, the sizes of all shards",
            "choose sizes that the number of ranks divides",
        )

    # ---- what the ranks of a replica do together ----

    def row_of(self, session: Session[Any], rows: Sequence[tuple[int, ...]] | None) -> ProcessRow:
        """See `Sharding.row_of`."""
        return ProcessRow(session, rows)

    def lost_behind(self, session: Session[Any], exception: BaseException) -> PeerLost | None:
        """See `Sharding.lost_behind`."""
        return lost_behind(session, exception)

    def save(
        self, session: Session[Any], path: str, checkpoint: Callable[[], dict[str, Any]]
    ) -> None:
        """See `Sharding.save`."""
        save(session, path, checkpoint)

    # ---- what is loaded ----

    def load_model(
        self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Takes over weights and buffers, in shards or whole."""
        mine = model.state_dict()
        placed = {name: _placed_like(mine.get(name), value) for name, value in state.items()}
        model.load_state_dict(placed, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Takes over an optimizer's state, in shards or whole."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        placed = {
            index: {name: _placed_like(parameters[index], value) for name, value in own.items()}
            for index, own in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": placed})


def _placed_like(target: Any, value: Any) -> Any:
    """Returns a saved value, sharded as its target is."""
    if not isinstance(target, DTensor):
        return value
    if isinstance(value, dict) and SHARD in value:
        mine = value[SHARD]
        if mine.shape != local(target).shape:
            raise ValueError(
                "a checkpoint must be of the same model, got a shard of shape "
                f"{tuple(mine.shape)} for one of {tuple(local(target).shape)}; build the model "
                "from the same arguments"
            )
        return DTensor.from_local(
            mine.to(target.device),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )
    if isinstance(value, Tensor) and value.shape == target.shape:
        whole = value.to(target.device)
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    return value
