"""Processor time of communication, which ranks of a machine share; and nodes with one uplink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_dsgd.transport.simulated import Costs, Nodes, SimulatedWorld

MB = torch.zeros(1_000_000, dtype=torch.int8)
FLOATS = torch.zeros(250_000)
FREE = Costs(cores=1, ranks=1)


def to_the_next(net: Any, x: torch.Tensor = MB) -> float:
    if net.rank % 2 == 0:
        net.send(x, net.rank + 1)
    else:
        net.recv(x, net.rank - 1).wait()
    return float(net.now())


def test_work_on_a_message_overlaps_with_its_way() -> None:
    costs = replace(FREE, send_s_per_byte=4e-7, receive_s_per_byte=5e-7)
    world = SimulatedWorld(2, bandwidth_bytes_s=1e6, costs=costs)
    assert world.run(to_the_next) == pytest.approx([0.4, 1.0])


def test_what_arrives_is_added_or_unpacked() -> None:
    costs = replace(FREE, add_s_per_byte=1e-6, unpack_s_per_byte=2e-6)
    world = SimulatedWorld(2, bandwidth_bytes_s=1e6, costs=costs)
    assert world.run(to_the_next, FLOATS)[1] == pytest.approx(2.0)
    assert world.run(to_the_next, MB.view(torch.uint8))[1] == pytest.approx(3.0)
    assert world.run(to_the_next, MB.view(torch.int64)[:10])[1] == pytest.approx(8e-5)


def test_what_is_received_into_its_place_is_worked_on_too() -> None:
    def to_all(net: Any) -> float:
        net.broadcast(FLOATS.clone(), 0).wait()
        return float(net.now())

    costs = replace(FREE, add_s_per_byte=3e-6)
    for placed_s_per_byte, expected in ((0.0, 1.0), (1e-6, 2.0)):
        placed = replace(costs, placed_s_per_byte=placed_s_per_byte)
        world = SimulatedWorld(2, bandwidth_bytes_s=1e6, costs=placed)
        assert world.run(to_all)[1] == pytest.approx(expected)


def test_ranks_of_a_machine_wait_for_a_core() -> None:
    def select(net: Any) -> float:
        net.work(1.0)
        return float(net.now())

    for cores, expected in ((1, [1, 2, 3, 4]), (2, [1, 1, 2, 2]), (4, [1, 1, 1, 1])):
        costs = Costs(cores, ranks=4)
        assert sorted(SimulatedWorld(4, costs=costs).run(select)) == expected
    assert SimulatedWorld(4, costs=Costs(1, ranks=2)).run(select) == [1, 2, 1, 2]
    assert SimulatedWorld(4).run(select) == [1] * 4


def test_a_rank_that_waits_for_a_core_sends_later() -> None:
    costs = Costs(cores=1, ranks=4, send_s=1.0)
    arrived = SimulatedWorld(4, latency_s=0.25, costs=costs).run(to_the_next)
    assert arrived == pytest.approx([1.0, 0.25, 2.0, 1.25])


def test_ranks_of_a_node_share_its_uplink() -> None:
    def to_the_other_node(net: Any) -> float:
        other = (net.rank + 2) % 4
        if net.rank < 2:
            net.send(MB, other)
        else:
            net.recv(MB, other).wait()
        return float(net.now())

    inside = {"latency_s": 0.0, "bandwidth_bytes_s": 1e8}
    for uplink_bytes_s, expected in ((1e6, [1.0, 2.0]), (1e9, [1.0, 1.001])):
        nodes = Nodes(2, uplink_bytes_s=uplink_bytes_s, **inside)
        world = SimulatedWorld(4, bandwidth_bytes_s=1e6, nodes=nodes)
        assert world.run(to_the_other_node)[2:] == pytest.approx(expected)
        assert world.run(to_the_next)[1::2] == pytest.approx([0.01, 0.01])


def test_a_shared_link_and_nodes_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="shared_link=True must be left out with nodes"):
        SimulatedWorld(2, shared_link=True, nodes=Nodes(2, 0.0, 1e9))
