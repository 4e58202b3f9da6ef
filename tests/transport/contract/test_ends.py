"""Errors that end the world, and how ranks leave it, on every transport."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY, PeerLost, Transport
from tests.transport.contract.helpers import EMPTY, PATIENCE_S, others, pause, same
from tests.transport.helpers import BIG


def a_rank_fails(net: Transport) -> None:
    net.barrier().wait()
    if net.rank == 1:
        for rank in (0, 2):
            net.recv(EMPTY, rank).wait()  # each has begun what is to be ended
        raise ValueError("no such luck")
    # Nothing to do with rank 1 on rank 0.
    work = net.recv(EMPTY, 2) if net.rank == 0 else net.barrier()
    net.send(EMPTY, 1)
    work.wait()


def test_a_failed_rank_is_named_to_all(world):
    zero, one, two = world.outcomes(3, a_rank_fails)
    assert one.error == "ValueError: no such luck"
    for outcome in (zero, two):
        assert outcome.error.startswith(
            "PeerLost: rank 1 failed: ValueError: no such luck; noticed"
        )
    assert "a message with tag 0 from rank 2" in zero.error
    assert "barrier number 1" in two.error


def a_lane_fails(net: Transport) -> list[str]:
    def fn(lane_net: Transport) -> None:
        lane_net.recv(EMPTY, 1).wait()
        raise ValueError("in the lane")

    heard: list[str] = []
    if net.rank == 0:
        lane = net.spawn_lane(fn)
        lane.check()
        net.send(EMPTY, 1)
        with pytest.raises(ValueError, match="in the lane"):
            lane.join()
        for look in (lane.check, lane.stop):
            with pytest.raises(ValueError, match="in the lane"):
                look()
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.recv(EMPTY, 1).wait()
    else:
        net.recv(EMPTY, 0).wait()
        net.spawn_lane(lambda lane_net: lane_net.send(EMPTY, 0) and None).join()
        with pytest.raises(PeerLost) as info:
            net.recv(EMPTY, ANY).wait()
        same((info.value.rank, info.value.reason), (0, "failed: ValueError: in the lane"))
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.check()
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.send(EMPTY, 0)
        heard.append(info.value.waited_for)
    return heard


def test_a_failed_lane_is_raised_at_home_and_fails_its_rank(world):
    outcomes = world.outcomes(2, a_lane_fails)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[1].result == ["a message with tag 0 from any rank"]


def a_rank_says_that_it_fails(net: Transport) -> list[tuple[int, str]]:
    """What this rank's callback was told."""
    heard: list[tuple[int, str]] = []
    net.on_lost(lambda lost: heard.append((lost.rank, lost.reason)))
    if net.rank == 1:
        for rank in others(net):
            net.recv(EMPTY, rank, tag=1).wait()  # nobody waits for this one any more
        net.fail("is out of order")
        with pytest.raises(PeerLost, match="rank 1 is out of order; noticed in: a check"):
            net.check()
        return heard
    net.send(EMPTY, 1, tag=1)
    with pytest.raises(PeerLost, match="rank 1 is out of order; noticed in: a message with tag 0"):
        net.recv(EMPTY, ANY).wait()
    with pytest.raises(PeerLost, match="rank 1 is out of order; noticed in: another's sum"):
        fail_in_another_library(net)
    deadline = net.now() + PATIENCE_S
    while not heard:
        assert net.now() < deadline, "nobody was told of the loss"
        pause(net, 1e-3)
    at_once: list[PeerLost] = []
    net.on_lost(at_once.append)
    same([lost.rank for lost in at_once], [1])
    with pytest.raises(PeerLost, match="rank 1 is out of order"):
        net.views.next_view(at_once[0])  # no rank has called `survive`: a loss is final
    return heard


def fail_in_another_library(net: Transport) -> None:
    with net.blaming("another's sum"):
        raise RuntimeError("connection closed by peer")


def test_a_rank_that_says_that_it_fails_is_named_to_all(world):
    outcomes = world.outcomes(3, a_rank_says_that_it_fails)
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    told = [(1, "is out of order")]
    assert [outcome.result for outcome in outcomes] == [told, [], told]


def a_rank_leaves(net: Transport, closes: bool) -> str:
    """Right after it has sent: between processes the others are told on another connection."""
    net.barrier().wait()
    if net.rank == 1:
        for _ in range(4):
            net.send(torch.full((BIG,), 7.0), 0)
        for _ in range(2 * closes):
            net.close()
        pause(net, 0.2 * closes)
        return ""
    for _ in range(4):
        same(net.recv(EMPTY, 1).wait(), torch.full((BIG,), 7.0))
    text = "rank 1 has left.*; noticed in: a message with tag 3 from rank 1$"
    with pytest.raises(PeerLost, match=text) as info:
        net.recv(EMPTY, 1, tag=3).wait()
    return info.value.reason


@pytest.mark.parametrize("closes", [False, True])
def test_what_a_rank_sent_before_it_left_arrives_and_then_it_is_named(world, closes):
    assert world.run(2, a_rank_leaves, closes)[0].startswith("has left")
