"""Which ranks hold the same shard, also once some are lost."""

from __future__ import annotations

import pytest

from lightning_dsgd.sharded.mesh_sharding import MeshSharding


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
def test_the_replicas_of_a_view_are_those_that_are_left(
    rows: list[tuple[int, ...]], left: list[int]
) -> None:
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
