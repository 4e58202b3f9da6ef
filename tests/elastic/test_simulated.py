"""Simulated worlds that go on after a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_dsgd.elastic.simulated import SurvivingWorld
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


def go_on(net: Any) -> tuple[int, ...]:
    members = tuple(range(net.world_size))
    while net.now() < 60.0:
        net.compute(0.5)
        try:
            net.check()
        except PeerLost as lost:
            _, members = net.views.next_view(lost)
    return members


PAIRS = [(0, 1), (2, 3), (4, 5)]
KILL_0 = 5.0, "kill", 0
CUT, HALVES = (1.0, "cut", {0}, 1000.0), (1.0, "cut", {0, 2}, 1000.0)


@pytest.mark.parametrize(
    ("size", "options", "events", "left", "ended"),
    [
        (2, {}, [KILL_0], [], {1: "must go on with more than half"}),
        (2, {"min_ranks": 1}, [KILL_0], [1], {}),
        (2, {"min_ranks": 1}, [CUT], [], {}),
        (4, {"min_ranks": 1}, [HALVES], [], {1: "must go on with more than half"}),
        (
            *(4, {"min_ranks": 1, "groups": PAIRS[:2]}, [(1.0, "kill", 3), KILL_0], []),
            {1: "replicas that have lost none of their ranks, got none"},
        ),
        (
            *(6, {"min_ranks": 4, "groups": PAIRS}, [(1.0, "kill", 5), KILL_0], []),
            {2: "min_ranks=4, in replicas that have lost none"},
        ),
        (
            *(4, {"groups": PAIRS[:2]}, [(1.0, "doubt", 1, 3)], [0, 1]),
            {2: "cannot go on without rank 3, which held shards", 3: "rank 3 is not in view 1"},
        ),
    ],
)
def test_who_goes_on_and_why_others_have_ended(size, options, events, left, ended):
    """The stories tell of more."""
    world = SurvivingWorld(size, **options, latency_s=0.01, heartbeat_timeout_s=2.0, strict=False)
    for at_s, what, *args in events:
        world.script(at_s, partial(lambda w, a, faults: getattr(faults, w)(*a), what, args))
    outcomes = world.outcomes(go_on)
    assert [rank for rank, end in enumerate(outcomes) if end == tuple(left)] == left
    assert not any(isinstance(outcomes[rank], tuple) for rank in {*range(size)} - {*left})
    for rank, why in ended.items():
        assert why in str(outcomes[rank]), outcomes[rank]


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


class Blown(Diverged):
    """A divergence that a user's own code finds."""


def test_all_end_with_a_rank_whose_training_is_not_finite_whoever_was_lost_before():
    def fn(net):
        net.compute(1.0 + 0.1 * net.rank)  # rank 0 is killed meanwhile
        if net.rank == 2:
            raise Blown("at step 7")
        while True:  # in one view after the other
            with pytest.raises(PeerLost) as caught:
                net.recv(torch.zeros(1), 2).wait()
            net.views.next_view(caught.value)

    world = SurvivingWorld(5, latency_s=0.01, detect_s=0.5)
    world.kill(0, 0.9)
    outcomes = world.outcomes(fn)
    assert isinstance(outcomes[2], FloatingPointError)  # as users may catch it
    for rank in (1, 3, 4):
        assert "rank 2 ends all ranks: Blown: at step 7" in str(outcomes[rank])
        assert outcomes[rank].ends_all
        assert PeerLost(rank, failed(outcomes[rank])).ends_all  # it tells the others in its turn


def test_the_others_go_on_whatever_else_a_rank_raises():
    def fn(net, error):
        if net.rank == 2:
            raise error
        with pytest.raises(PeerLost, match="rank 2 failed: ") as caught:
            net.recv(torch.zeros(1), 2).wait()
        return net.views.next_view(caught.value)[1]

    for error in (
        type("Diverged", (FloatingPointError,), {})("of another library"),
        ValueError("ends all ranks: Diverged: failed: FloatingPointError"),
        PeerLost(3, "failed: Diverged: "),
    ):
        outcomes = SurvivingWorld(3, latency_s=0.01).outcomes(fn, error)
        assert outcomes == [(0, 1), (0, 1), error]
