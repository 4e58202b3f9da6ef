"""`sgp` and `wagma` between nodes, whose ranks hold the same weights."""

from __future__ import annotations

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


@pytest.mark.parametrize("spec", SPECS)
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


@pytest.mark.parametrize("spec", SPECS[:3])
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


@pytest.mark.parametrize("spec", ["sgp", "wagma:grace_s=Infinity:sync_period=3"])
def test_a_resume_goes_on_as_if_there_had_been_none(spec: str) -> None:
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
