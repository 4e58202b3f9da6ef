"""`wagma` whose groups are of nodes, each rank of which sends a shard of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.transport.simulated import SimulatedWorld

NODE = 4
N = 103  # not divisible by the ranks of a node
OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"wait_avoiding": False},
    {"group_period": 2, "sync_period": 4},
    {"wire_dtype": "int8", "sync_period": 5},
]


def train(net: Any, options: dict[str, Any], counts: list[int], seed: int) -> list[Tensor]:
    """Every update of node i adds i + 1 to each weight; gives the weights after each step."""
    x = torch.zeros(N, dtype=torch.float64 if "wire_dtype" not in options else torch.float32)
    algorithm = WAGMA(hierarchical=True, node_size=NODE, **options)
    algorithm.start(net, x)
    chance = torch.Generator().manual_seed(100 * seed + net.rank // NODE)
    xs = []
    for _ in range(counts[net.rank]):
        net.compute(0.1 + float(torch.rand(1, generator=chance)))
        g = torch.full_like(x, -float(net.rank // NODE + 1))
        algorithm.before_update(x, g)
        x -= g
        algorithm.after_update(x)
        xs.append(x.clone())
    algorithm.settle(x)
    xs.append(x.clone())
    xs.append(algorithm.consensus(x))
    algorithm.finish(x)
    return [*xs, x]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_the_start_and_all_updates_of_all_nodes(options, seed) -> None:
    num_steps, num_nodes = 12, 3
    world = SimulatedWorld(num_nodes * NODE, latency_s=0.02)
    ranks = world.run(train, options, [num_steps] * num_nodes * NODE, seed)
    mean = torch.full((N,), num_steps * sum(range(1, num_nodes + 1)) / num_nodes)
    for rank, xs in enumerate(ranks):
        node = ranks[rank // NODE * NODE]
        assert all(map(torch.equal, xs, node)), "ranks of a node hold the same weights"
        torch.testing.assert_close(xs[-1].float(), mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(xs[-1], ranks[0][-1])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("counts", [[3, 5, 2, 2], [0, 4, 4, 1], [6, 0, 0, 0], [1, 1, 5, 9]])
def test_a_node_goes_on_as_long_as_one_of_its_ranks(counts: list[int], overlap: bool) -> None:
    options = {"overlap": overlap}
    both = SimulatedWorld(2 * NODE, latency_s=0.05).run(train, options, counts + [4] * NODE, 0)
    mean = torch.full((N,), (max(counts) * 1 + 4 * 2) / 2, dtype=torch.float64)
    for rank, xs in enumerate(both):
        assert torch.equal(xs[-3], both[rank // NODE * NODE][-3])
        assert torch.equal(xs[-1], both[0][-1])
        torch.testing.assert_close(xs[-1], mean)


def sent_by(net: Any, hierarchical: bool) -> int:
    """Bytes of 8 steps, all in groups."""
    x = torch.zeros(4096)
    options = {"hierarchical": True, "node_size": NODE} if hierarchical else {}
    algorithm = WAGMA(group_size=2, sync_period=100, **options)
    algorithm.start(net, x)
    net.barrier().wait()
    before = net.counters.bytes_sent
    for _ in range(8):
        net.compute(0.1)
        algorithm.before_update(x, torch.zeros_like(x) if hierarchical else x[:0])
        algorithm.after_update(x)
    sent: int = net.counters.bytes_sent - before
    algorithm.settle(x)
    algorithm.stop()
    return sent


def test_a_node_sends_the_weights_once_to_others_and_not_once_for_each_rank() -> None:
    world = SimulatedWorld(4 * NODE, latency_s=1e-4)
    x_bytes, inside = 4096 * 4, 3 * (NODE - 1) / NODE  # the sum of g, and the shards of x
    for sent in world.run(sent_by, True):
        assert sent / 8 == pytest.approx(x_bytes * (inside + 1 / NODE), rel=0.1)
    for sent in world.run(sent_by, False):
        assert sent / 8 == pytest.approx(x_bytes, rel=0.1)


def go_on(net: Any, at: int, num_steps: int) -> Tensor:
    """The weights after so many steps, with a save and a load at one of them."""
    x = torch.zeros(N, dtype=torch.float64)
    algorithm = WAGMA(hierarchical=True, node_size=2, wait_avoiding=False, sync_period=3)
    algorithm.start(net, x)
    for k in range(num_steps):
        if k == at:
            algorithm.settle(x)
            state = algorithm.state_dict()
            algorithm.stop()
            algorithm = WAGMA(hierarchical=True, node_size=2, wait_avoiding=False, sync_period=3)
            algorithm.start(net.sub("again"), x)
            algorithm.load_state_dict(state)
        g = (x - net.rank // 2) * 0.1
        algorithm.before_update(x, g)
        x -= g
        algorithm.after_update(x)
    algorithm.settle(x)
    algorithm.finish(x)
    return x


def test_a_resume_goes_on_as_if_there_had_been_none() -> None:
    world = SimulatedWorld(8)
    for saved, straight in zip(world.run(go_on, 5, 11), world.run(go_on, -1, 11), strict=True):
        assert torch.equal(saved, straight)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"node_size": 3}, "node_size must divide world_size, got node_size=3"),
        ({"node_size": 2, "group_size": 8}, "no larger than the number of nodes, got group_size=8"),
        ({}, "node_size must divide world_size, got node_size=None"),
    ],
)
def test_what_does_not_suit_the_nodes_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WAGMA(hierarchical=True, **options).check(8)
    WAGMA(hierarchical=True).check(8, Conditions(ranks_per_node=4))
