"""With whom a rank talks: what must hold of every graph, matching and group, for any P."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dsgd.primitives import topology
from lightning_dsgd.primitives.topology import GRAPHS
from tests.support import matrices

UP_TO_40 = range(1, 41)
SIZES = (*range(1, 10), 13, 16, 17, 24, 32, 33)
DOUBLY = ("exponential", "ring", "bipartite_exponential", "complete")
"""Where every rank receives as many shares as it sends."""


def matrix(graph: str, step: int, world_size: int, num_peers: int = 1, seed: int = 0) -> Tensor:
    rows = matrices.mixing_matrix(graph, step, world_size, num_peers, seed)
    return torch.tensor(rows, dtype=torch.float64)


# ---- neighbours ----


# ---- groups ----
def test_groups_of_four_among_eight_are_those_of_the_paper() -> None:
    assert topology.groups(0, 8, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.groups(1, 8, 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("world_size", UP_TO_40)
def test_groups_partition_the_ranks_into_nearly_equal_sizes(world_size: int) -> None:
    for size in range(1, world_size + 1):
        for version in range(3):
            groups = topology.groups(version, world_size, size)
            assert sorted(rank for group in groups for rank in group) == list(range(world_size))
            sizes = {len(group) for group in groups}
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= size


@pytest.mark.parametrize("world_size", range(2, 41))
def test_every_update_reaches_every_rank_within_twice_log_s_p_versions(world_size: int) -> None:
    for size in range(2, world_size + 1):
        # ceil(2 log_S P) in whole numbers: the least v with S^v >= P^2
        versions = next(v for v in range(1, 99) if size**v >= world_size**2)
        for begin in range(2):
            known = [1 << rank for rank in range(world_size)]
            for version in range(begin, begin + versions):
                for group in topology.groups(version, world_size, size):
                    union = 0
                    for rank in group:
                        union |= known[rank]
                    for rank in group:
                        known[rank] = union
            assert all(k == (1 << world_size) - 1 for k in known), (size, begin)


# ---- directed graphs ----
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("num_peers", [1, 2, 3])
def test_columns_sum_to_one_and_rows_of_balanced_graphs_too(graph: str, num_peers: int) -> None:
    for world_size in SIZES:
        for step in range(7):
            w = matrix(graph, step, world_size, num_peers)
            ones = torch.ones(world_size).double()
            torch.testing.assert_close(w.sum(0), ones)
            if graph in DOUBLY and (graph != "bipartite_exponential" or num_peers == 1):
                torch.testing.assert_close(w.sum(1), ones)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("num_peers", [1, 2])
def test_receivers_know_who_sends(graph: str, num_peers: int) -> None:
    for world_size in SIZES:
        for step in range(4):
            out = [
                topology.out_peers(graph, step, rank, world_size, num_peers, seed=3)
                for rank in range(world_size)
            ]
            for rank in range(world_size):
                assert rank not in out[rank]
                assert len(set(out[rank])) == len(out[rank]) <= num_peers
                into = topology.in_peers(graph, step, rank, world_size, num_peers, seed=3)
                assert sorted(into) == [j for j in range(world_size) if rank in out[j]]
                neighbours = topology.neighbours(graph, rank, world_size)
                assert set(into) | set(out[rank]) <= set(neighbours)
                assert all(rank in topology.neighbours(graph, j, world_size) for j in neighbours)


def test_the_hops_of_the_exponential_graph_are_those_of_the_paper() -> None:
    hops = [topology.out_peers("exponential", step, 0, 8) for step in range(4)]
    assert hops == [[1], [2], [4], [1]]
    pairs = [topology.out_peers("exponential", step, 0, 8, 2) for step in range(4)]
    assert pairs == [[1, 2], [2, 4], [4, 1], [1, 2]]


def second_singular_value(graph: str, num_steps: int, seed: int = 0) -> float:
    w = torch.eye(32).double()
    for step in range(num_steps):
        w = matrix(graph, step, 32, seed=seed) @ w
    return float(torch.linalg.svdvals(w)[1])


def decay_of_averaging_errors() -> dict[str, float]:
    """Squared second singular values of 5 steps' product for P = 32; the mean of 50 random draws.

    The squares are what SGP's appendix A.1 gives: how a sum of squared errors shrinks.
    """
    return {
        graph: sum(second_singular_value(graph, 5, s) ** 2 for s in range(runs)) / runs
        for graph in GRAPHS
        for runs in [50 if graph.startswith("random") else 1]
    }


@pytest.mark.exhaustive
def test_the_averaging_errors_of_32_ranks_after_five_steps_are_those_of_the_paper() -> None:
    table = decay_of_averaging_errors()
    assert table["exponential"] < 1e-30
    assert table["complete"] == pytest.approx(0.6, abs=0.05)
    assert table["random_exponential"] == pytest.approx(0.4, abs=0.05)
    assert table["random"] == pytest.approx(0.2, abs=0.05)
    # Not in the paper: pairs, and the graph that mixes worst.
    assert table["bipartite_exponential"] == pytest.approx(0.175, abs=0.01)
    assert table["ring"] > 0.9


# ---- pairs ----
@pytest.mark.parametrize("kind", ["complete", "cycle"])
def test_partners_are_mutual_and_leave_out_one_rank_where_p_is_odd(kind: str) -> None:
    for world_size in UP_TO_40:
        for version in range(20):
            partners = topology.random_partners(version, world_size, kind)
            assert [partners[p] for p in partners] == list(range(world_size))
            idle = sum(p == rank for rank, p in enumerate(partners))
            assert idle == world_size % 2
            if kind == "cycle":
                distances = {(p - rank) % world_size for rank, p in enumerate(partners)}
                assert distances <= {0, 1, world_size - 1}
