"""What a step of gossip does to the weights of all ranks, as a matrix."""

from __future__ import annotations

from lightning_dsgd.primitives.topology import neighbours, out_peers


def ring_matrix(world_size: int) -> list[list[float]]:
    """W of the ring: equal weights for a rank and its neighbours; symmetric, doubly stochastic."""
    rows = []
    for rank in range(world_size):
        members = [rank, *neighbours("ring", rank, world_size)]
        rows.append([1 / len(members) if j in members else 0.0 for j in range(world_size)])
    return rows


def mixing_matrix(
    graph: str, step: int, world_size: int, num_peers: int = 1, seed: int = 0
) -> list[list[float]]:
    """P of a step: row i holds the weights with which i takes in what the others hold.

    Each rank gives equal shares to itself and to its out-neighbours: columns sum to one.
    """
    matrix = [[0.0] * world_size for _ in range(world_size)]
    for j in range(world_size):
        receivers = [j, *out_peers(graph, step, j, world_size, num_peers, seed)]
        for i in receivers:
            matrix[i][j] = 1 / len(receivers)
    return matrix
