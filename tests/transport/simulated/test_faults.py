"""Who is lost in a simulated world, and by what."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY, PeerLost
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


def test_a_killed_rank_is_lost_to_all():
    world = SimulatedWorld(4, detect_s=0.25)
    world.kill(2, 3.875)
    outcomes = world.outcomes(steps)
    assert isinstance(outcomes[2], Killed)
    for rank in (0, 1, 3):
        error = outcomes[rank]
        assert isinstance(error, PeerLost)
        assert (error.rank, error.reason) == (2, "was killed at 3.875 s")
        assert error.waited_for.startswith("all_reduce number 3 from rank ")
    with pytest.raises(
        RankFailed, match=r"rank 2 failed at 3.875 s .and 3 more of 4.: Killed: rank 2"
    ):
        world.run(steps)


def test_a_loss_reaches_waits_that_had_nothing_to_do_with_it_and_check_and_send():
    def fn(net):
        if net.rank == 0:
            net.compute(100.0)
        elif net.rank == 1:
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: a message"):
                net.recv(KB, 2).wait()
            noticed = net.now()
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: a check"):
                net.check()
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: sending to"):
                net.send(KB, 2)
            return noticed
        else:
            net.compute(4.0)
            net.check()
            net.compute(10.0)
        return None

    world = SimulatedWorld(3, detect_s=0.5)
    world.kill(0, 5.0)
    killed, noticed, _ = world.outcomes(fn)
    assert isinstance(killed, Killed)
    assert noticed == 5.5


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


def test_messages_that_had_not_left_die_with_their_sender():
    def fn(net):
        if net.rank == 0:
            for _ in range(3):
                net.send(KB, 1)
            net.compute(50.0)
            return None
        times = []
        with pytest.raises(PeerLost):  # noqa: PT012 - how far it gets is the point
            while True:
                net.recv(KB, 0).wait()
                times.append(net.now())
        return times

    world = SimulatedWorld(2, 0.5, 1000.0, detect_s=10.0)
    world.kill(0, 1.5)
    assert world.outcomes(fn)[1] == [1.5, 2.5]


def test_a_dropped_rank_is_lost_after_the_heartbeat_timeout():
    def fn(net):
        try:
            return steps(net)
        except PeerLost as error:
            return error.rank, error.reason, net.now()

    world = SimulatedWorld(3, heartbeat_timeout_s=5.0)
    world.drop(1, 2.5)
    reason = "stopped answering: not heard of for 5 s"
    assert world.outcomes(fn) == [(1, reason, 7.5), (0, reason, 7.5), (1, reason, 7.5)]
