"""Sums among the ranks that hold the same shard."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dsgd.sharded.mesh_sharding import MeshSharding
from lightning_dsgd.transport.native import NativeCollective
from tests.support.worlds import NativeWorld


def sum_by_messages(net: Any) -> None:
    """Beside a replica's own collectives, a lane's sums would be in no order with them."""
    work = net.all_reduce(torch.ones(1))
    assert not isinstance(work, NativeCollective)
    work.wait()


def sum_in_a_column(net: Any) -> None:
    pairs = [[rank, rank + net.world_size // 2] for rank in range(net.world_size // 2)]
    column = MeshSharding(tuple(pairs[net.rank % len(pairs)]), net.world_size).column(net)
    work = column.all_reduce(torch.ones(1))
    assert isinstance(work, NativeCollective)
    assert work.wait() == 2
    column.spawn_lane(sum_by_messages).join()
    net.barrier().wait()  # rank 2 passes rank 3's ticket on, though it is in another column


def test_columns_sum_by_torchs_collectives_in_the_training_thread() -> None:
    NativeWorld().run(4, sum_in_a_column)
