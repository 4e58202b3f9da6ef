"""`sgp` and `wagma` between nodes, whose ranks hold the same weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.rank import Rank

NODE = 4
N = 103  # not divisible by the ranks of a node
NODES = f":node_size={NODE}"
SPECS = ["sgp", "sgp:overlap=1", "wagma:overlap=true", "wagma:wire_dtype=int8:sync_period=5"]
PIECES = ["sgp:num_buckets=3", "wagma:overlap=true:num_buckets=3"]


def train(net: Any, spec: str, counts: list[int]) -> list[Tensor]:
    """Every update of node i adds i + 1 to each weight; gives the weights after each step."""
    x = torch.zeros(N, dtype=torch.float64 if "wire_dtype" not in spec else torch.float32)
    rank, xs = Rank(net, make_algorithm(spec + NODES), x), []
    chance = torch.Generator().manual_seed(net.rank // NODE)
    for _ in range(counts[net.rank]):
        seconds = 0.1 + float(torch.rand(1, generator=chance))
        rank.descend(torch.full_like(x, -float(net.rank // NODE + 1)), seconds=seconds)
        xs.append(x.clone())
    xs.append(rank.settle())
    return [*xs, rank.algorithm.consensus(x), rank.finish()]


@pytest.mark.parametrize("spec", SPECS + PIECES)
def test_the_mean_is_the_start_and_all_updates_of_all_nodes(spec: str) -> None:
    num_steps, num_nodes = 12, 3
    world = SimulatedWorld(num_nodes * NODE, latency_s=0.02)
    ranks = world.run(train, spec, [num_steps] * num_nodes * NODE)
    mean = torch.full((N,), num_steps * sum(range(1, num_nodes + 1)) / num_nodes)
    for rank, xs in enumerate(ranks):
        node = ranks[rank // NODE * NODE]
        assert all(map(torch.equal, xs, node)), "ranks of a node hold the same weights"
        torch.testing.assert_close(xs[-1].float(), mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(xs[-1], ranks[0][-1])


@pytest.mark.parametrize("spec", SPECS[:3] + PIECES)
@pytest.mark.parametrize("counts", [[3, 5, 2, 2], [6, 0, 0, 0]])
def test_a_node_goes_on_as_long_as_one_of_its_ranks(counts: list[int], spec: str) -> None:
    ranks = SimulatedWorld(2 * NODE, latency_s=0.05).run(train, spec, counts + [4] * NODE)
    mean = torch.full((N,), (max(counts) * 1 + 4 * 2) / 2, dtype=torch.float64)
    for rank, xs in enumerate(ranks):
        assert torch.equal(xs[-3], ranks[rank // NODE * NODE][-3])
        assert torch.equal(xs[-1], ranks[0][-1])
        torch.testing.assert_close(xs[-1], mean)


def descend(net: Any, spec: str, save_at: int = -1) -> list[Tensor]:
    """The weights of every step, with a save and a load at one of them."""
    spec += ":node_size=2"
    rank, xs = Rank(net, make_algorithm(spec), torch.ones(N).double()), []
    for k in range(10):
        if k == save_at:
            rank.settle()
            rank.resume(make_algorithm(spec))
        rank.descend(rank.x - net.rank, 0.1)
        xs.append(rank.x.clone())
    return [*xs, rank.finish()]


@pytest.mark.parametrize("num_buckets", [None, 3])
@pytest.mark.parametrize("spec", ["sgp", "wagma:grace_s=Infinity:sync_period=3"])
def test_a_resume_goes_on_as_if_there_had_been_none(spec: str, num_buckets: int | None) -> None:
    spec += f":num_buckets={num_buckets}"
    straight, saved = (SimulatedWorld(8).run(descend, spec, save_at) for save_at in (-1, 5))
    for xs, ys in zip(straight, saved, strict=True):
        assert all(map(torch.equal, xs, ys))


def test_two_nodes_of_two_ranks_are_two_ranks_with_their_mean_gradients() -> None:
    ranks = SimulatedWorld(4).run(descend, "sgp")
    z = torch.ones(2, 1).double()
    for k in range(10):
        half = z - 0.1 * (z - torch.tensor([[0.5], [2.5]]).double())
        z = half.mean(0).expand(2, 1)  # two nodes: both weights 1/2
        for rank, xs in enumerate(ranks):
            torch.testing.assert_close(xs[k], z[rank // 2].expand(N), rtol=0, atol=1e-13)


def test_the_launch_tells_the_size_of_a_node() -> None:
    WAGMA(node_size="auto").check(8, Conditions(ranks_per_node=4))


def train_early(
    net: Any, spec: str, counts: list[int], *, gives_up: bool = False
) -> tuple[Tensor, float]:
    """Makes steps whose backward pass takes 0.4 s; gives the weights, and when they are there.

    A rank that gives up a step has handed over half of its gradient before it settles.
    """
    algorithm, n = make_algorithm(spec), 4096
    rank, chance = Rank(net, algorithm, torch.zeros(n)), torch.Generator().manual_seed(net.rank)
    for step in range(counts[net.rank] + gives_up):
        g = torch.randn(n, generator=chance)
        is_made = step < counts[net.rank]
        for quarter in (3, 2, 1, 0) if is_made else (3, 2):
            net.compute(0.1)
            if algorithm.traits.takes_pieces:
                algorithm.gradient_made(g, quarter * n // 4)
        if is_made:
            rank.descend(g, 0.1)
    own, now = rank.settle(), net.now()
    algorithm.stop()
    return own, now


def world(size: int) -> SimulatedWorld:
    """A sum of 16 kB takes about half a backward pass."""
    return SimulatedWorld(size, latency_s=1e-4, bandwidth_bytes_s=1e5)


@pytest.mark.parametrize("spec", ["sgp", "wagma:grace_s=Infinity"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_travel_during_the_backward_pass_and_change_no_bit(size: int, spec: str) -> None:
    counts = [5] * 2 * size
    after, during = (
        world(2 * size).run(train_early, f"{spec}:node_size={size}:num_buckets={num}", counts)
        for num in (None, 4)
    )
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(after, during, strict=True))
    sum_s = 2 * (size - 1) / size * 4 * 4096 / 1e5
    saved_s = (after[0][1] - during[0][1]) / counts[0]
    assert saved_s > 0.7 * sum_s, "three of four pieces are hidden"


@pytest.mark.parametrize("spec", ["sgp", "wagma:overlap=true"])
@pytest.mark.parametrize("counts", [[2, 4, 3, 3], [0, 0, 0, 0], [3, 3, 3, 3]])
def test_a_node_stays_together_where_steps_are_given_up(counts: list[int], spec: str) -> None:
    spec += ":node_size=2:num_buckets=4"
    ranks = world(4).run(partial(train_early, gives_up=True), spec, counts)
    found = [x for x, _ in ranks]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


@pytest.mark.parametrize("spec", ["sgp", "wagma:overlap=true"])
@pytest.mark.parametrize("counts", [[2, 4], [4, 2], [3, 3]])
def test_no_step_is_lost_where_a_rank_of_the_node_gives_one_up(
    counts: list[int], spec: str
) -> None:
    """Of that step the others' mean has the half that the rank has handed over."""
    spec += ":node_size=2:num_buckets=4"
    chances = [torch.Generator().manual_seed(rank) for rank in range(2)]
    expected, handed_over = torch.zeros(4096), torch.arange(4096) >= 2048
    for step in range(max(counts)):
        gradients = [
            torch.randn(4096, generator=chance) * (1 if step < count else handed_over)
            for chance, count in zip(chances, counts, strict=True)
            if step <= count
        ]
        expected -= 0.1 * torch.stack(gradients).mean(0)
    for x, _ in world(2).run(partial(train_early, gives_up=True), spec, counts):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)
