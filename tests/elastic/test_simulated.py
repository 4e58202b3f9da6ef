"""Simulated worlds that go on after a loss."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.simulated import RankFailed
from lightning_dsgd.transport import Diverged, PeerLost, failed
from lightning_dsgd.transport.view import View


def test_ranks_join_a_world_that_goes_on():
    world = SurvivingWorld(2, min_ranks=1)
    assert [world.join(5.0), world.join(1.0)] == [2, 3]

    def fn(net):
        if net.rank < 2:
            with pytest.raises(ValueError, match=r"min_ranks=2 with SurvivingWorld.min_ranks=1"):
                net.views.survive(2)
        return net.rank, net.is_newcomer, net.now()

    assert world.run(fn) == [(0, False, 0.0), (1, False, 0.0), (2, True, 5.0), (3, True, 1.0)]


def test_a_newcomer_finds_nobody_where_all_have_ended():
    world = SurvivingWorld(2)
    world.join(1.0)

    def fn(net):
        if net.is_newcomer:
            net.join(within_s=10.0)

    with pytest.raises(RankFailed, match="a newcomer must reach a rank that trains, but none"):
        world.run(fn)


def test_groups_are_those_of_the_world():
    def fn(net):
        net.views.survive(None, [[0, 1], [2, 3]])
        with pytest.raises(ValueError, match=r"groups must be those of the world"):
            net.views.survive(None, [[0, 2], [1, 3]])

    SurvivingWorld(4, groups=[(0, 1), (2, 3)]).run(fn)


def test_one_rank_has_all_begin_another_view():
    def fn(net):
        lost = PeerLost(net.rank, "wants another view")
        if net.rank == 1:
            net.views.renew()
        else:
            with pytest.raises(PeerLost, match="the members change"):
                net.recv(torch.zeros(1), 1).wait()
        first = net.views.next_view(lost)
        View(net, first[1], first[0]).barrier().wait()
        return first

    assert SurvivingWorld(3, latency_s=0.01).run(fn) == [(1, (0, 1, 2))] * 3


def test_a_rank_that_doubts_another_has_the_others_leave_it_or_its_group_out():
    def fn(net):
        net.compute(1.025)  # all have heard of it, and nothing is agreed on
        with pytest.raises(PeerLost, match="rank 3 "):
            net.check()
        is_outside = net.views.is_outside
        _, members = net.views.next_view(PeerLost(3, "is lost"))
        return is_outside, members

    world = SurvivingWorld(4, latency_s=0.01, groups=[(0, 1), (2, 3)])
    world.doubt(1, 3, 1.0)
    outcomes = world.outcomes(fn)
    assert outcomes[:2] == [(False, (0, 1))] * 2
    assert "cannot go on without rank 3" in str(outcomes[2])
    assert "rank 3 is not in view 1" in str(outcomes[3])


class Blown(Diverged):
    """A divergence that a user's own code finds."""


@pytest.mark.parametrize("detect_s", [0.0, 0.5])
def test_all_end_with_a_rank_whose_training_is_not_finite_whoever_was_lost_before(detect_s):
    def fn(net):
        net.compute(1.0 + 0.1 * net.rank)  # rank 0 is killed meanwhile
        if net.rank == 2:
            raise Blown("at step 7")
        while True:  # in one view after the other
            with pytest.raises(PeerLost) as caught:
                net.recv(torch.zeros(1), 2).wait()
            net.views.next_view(caught.value)

    world = SurvivingWorld(5, latency_s=0.01, detect_s=detect_s)
    world.kill(0, 0.9)
    outcomes = world.outcomes(fn)
    assert isinstance(outcomes[2], FloatingPointError)  # as users may catch it
    for rank in (1, 3, 4):
        assert "rank 2 ends all ranks: Blown: at step 7" in str(outcomes[rank])
        assert outcomes[rank].ends_all
        assert PeerLost(rank, failed(outcomes[rank])).ends_all  # it tells the others in its turn


@pytest.mark.parametrize(
    "error",
    [
        FloatingPointError("divide by zero encountered"),
        type("Diverged", (FloatingPointError,), {})("of another library"),
        ValueError("ends all ranks: Diverged: failed: FloatingPointError"),
        PeerLost(3, "failed: Diverged: "),
    ],
    ids=repr,
)
def test_the_others_go_on_whatever_else_a_rank_raises(error):
    def fn(net):
        if net.rank == 2:
            raise error
        with pytest.raises(PeerLost, match="rank 2 failed: ") as caught:
            net.recv(torch.zeros(1), 2).wait()
        return net.views.next_view(caught.value)[1]

    outcomes = SurvivingWorld(3, latency_s=0.01).outcomes(fn)
    assert outcomes == [(0, 1), (0, 1), error]
