"""With whom a rank talks: pure functions of (rank, world_size)."""

from __future__ import annotations


def ring(rank: int, world_size: int) -> list[int]:
    """The neighbours on the ring, each once: none for one rank, one for two, else two."""
    neighbours = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
    return sorted(neighbours)


def ring_matrix(world_size: int) -> list[list[float]]:
    """W of the ring: equal weights for a rank and its neighbours; symmetric, doubly stochastic."""
    rows = []
    for rank in range(world_size):
        members = [rank, *ring(rank, world_size)]
        rows.append([1 / len(members) if j in members else 0.0 for j in range(world_size)])
    return rows
