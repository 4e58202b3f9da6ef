"""Which ranks hold the same shard, also once some are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.sharded.mesh_sharding import MeshSharding
from lightning_dsgd.transport.native import NativeCollective
from tests.support.worlds import NativeWorld


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([(0, 1), (2, 3)], [1]),
        ([(0, 1), (2, 3), (4, 5)], [0, 2]),
        ([(0, 1, 2), (3, 4, 5), (6, 7, 8)], [1, 2]),
        ([(0, 2), (1, 3)], [1]),
        ([(0, 3), (4, 5), (1, 2)], [1, 2]),  # whose replicas do not lie in the order of the ranks
    ],
)
def test_a_views_replicas_are_those_left(rows: list[tuple[int, ...]], left: list[int]) -> None:
    members = sorted(rank for number in left for rank in rows[number])
    columns = [tuple(row[shard] for row in rows) for shard in range(len(rows[0]))]
    sorted_rows = [tuple(sorted(row)) for row in rows]
    for column in columns:
        now = MeshSharding(column, sum(map(len, rows))).among(members, sorted_rows)
        assert now.num_replicas == len(left)
        assert now.num_shards == len(rows[0])
        assert {members[place] for place in now.members} == {*column} & {*members}
        # The first replica is that of the view's rank 0, which writes what it gathers.
        first = next(row for row in rows if members[0] in row)
        assert members[now.members[0]] in first
        order = [next(i for i, row in enumerate(rows) if members[m] in row) for m in now.members]
        assert order == sorted(order, key=lambda i: min(rows[i]))


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
