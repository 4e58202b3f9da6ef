"""The beginning and the end of the threads of one run, and what became of each."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY, LaneStopped
from lightning_dsgd.transport.simulated import RankFailed, SimulatedWorld

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second


def test_a_rank_that_fails_is_the_root_cause():
    def fn(net):
        net.compute(1.0)
        if net.rank == 1:
            raise ValueError("no such luck")
        net.barrier().wait()

    text = r"^rank 1 failed at 1 s .* ValueError: no such luck$"
    with pytest.raises(RankFailed, match=text) as info:
        SimulatedWorld(3).run(fn)
    assert isinstance(info.value.__cause__, ValueError)


def test_a_failed_lane_fails_its_rank_while_that_computes():
    def lane(net):
        net.compute(1.0)
        raise ValueError("in the lane")

    def unaware(net):
        if net.rank == 0:
            net.spawn_lane(lane)
            net.compute(5.0)
            return
        net.recv(KB, 0).wait()

    mine, other = SimulatedWorld(2).outcomes(unaware)
    assert repr(mine) == "ValueError('in the lane')"
    assert other.reason == "failed: ValueError: in the lane"


def test_lanes_that_outlive_their_rank_are_a_failure():
    def lane(net):
        try:
            net.recv(KB, ANY).wait()
        except LaneStopped:
            stopped.append(net.rank)
            raise

    def fn(net):
        net.spawn_lane(lane, "server")
        net.compute(1.0)

    stopped: list[int] = []
    with pytest.raises(RankFailed, match="returned without stopping its lanes:\n  server-1: waits"):
        SimulatedWorld(2).run(fn)
    assert stopped == [0, 1]
