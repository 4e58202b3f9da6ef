"""What a rank that is lost in a simulated world leaves behind."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY
from lightning_dsgd.transport.simulated import (
    Killed,
    RankFailed,
    SimulatedTransport,
    SimulatedWorld,
)

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second


def steps(net: SimulatedTransport, num_steps: int = 10) -> float:
    x = torch.ones(4)
    for _ in range(num_steps):
        net.compute(1.0)
        net.all_reduce(x).wait()
    return net.now()


def test_a_killed_rank_is_named_in_a_wait_and_as_the_cause_of_a_failed_run():
    world = SimulatedWorld(4, detect_s=0.25)
    world.kill(2, 3.875)
    for rank in (0, 1, 3):
        assert world.outcomes(steps)[rank].waited_for.startswith("all_reduce number 3 from rank ")
    with pytest.raises(
        RankFailed, match=r"rank 2 failed at 3.875 s .and 3 more of 4.: Killed: rank 2"
    ):
        world.run(steps)


def test_a_killed_rank_ends_with_its_lanes_and_does_not_clean_up():
    def lane(net):
        try:
            net.recv(KB, ANY).wait()
        except Exception:
            pytest.fail("nothing of this rank lives on")

    def fn(net):
        if net.rank == 1:
            return
        handle = net.spawn_lane(lane)
        try:
            net.compute(10.0)
        finally:
            handle.stop()

    world = SimulatedWorld(2)
    world.kill(0, 1.0)
    assert [type(outcome) for outcome in world.outcomes(fn)] == [Killed, type(None)]
