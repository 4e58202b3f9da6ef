"""A simulated rank's transport: what is counted, what polling costs, and its lanes."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_dsgd.simulated import (
    POLL_S,
    Killed,
    RankFailed,
    SimulatedTransport,
    SimulatedWorld,
)
from lightning_dsgd.transport import ANY, LaneStopped, TransportError

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second
EMPTY = KB[:0]


def test_waiting_and_communicating_are_counted_in_virtual_time():
    def fn(net):
        if net.rank == 0:
            net.send(KB, 1)
            net.send(KB, 1)
            return net.counters
        first, second = net.recv(KB, 0), net.recv(KB, 0)
        net.compute(0.75)
        first.wait()
        net.compute(5.0)
        second.wait()
        return net.counters

    sender, receiver = SimulatedWorld(2, 0.5, 1000.0).run(fn)
    assert (sender.bytes_sent, sender.messages_sent, sender.wait_s) == (2000, 2, 0.0)
    assert receiver.wait_s == 0.75  # the first was there at 1.5 s, the second at 2.5 s
    assert receiver.comm_s == 1.5 + 2.5


def test_polling_moves_the_clock():
    def fn(net):
        if net.rank == 0:
            net.compute(10 * POLL_S)
            net.send(EMPTY, 1)
            return None
        receipt, polls = net.recv(EMPTY, 0), 1
        while not receipt.done():
            polls += 1
        receipt.wait()
        return polls, net.now()

    polls, now = SimulatedWorld(2).run(fn)[1]
    assert polls in (10, 11)
    assert now == pytest.approx(polls * POLL_S)


def test_lanes_have_clocks_of_their_own():
    def lane(net):
        begin = net.now()
        net.compute(3.0)
        seen.append((begin, net.now()))

    def fn(net):
        net.compute(1.0)
        handle = net.spawn_lane(lane)
        net.compute(1.0)
        before = net.now()
        handle.join()
        return before, net.now(), net.counters.wait_s

    seen: list[tuple[float, float]] = []
    assert SimulatedWorld(1).run(fn) == [(2.0, 4.0, 2.0)]
    assert seen == [(1.0, 4.0)]


def test_a_lane_told_to_stop_finishes_its_computation_first():
    def lane(net):
        net.compute(3.0)
        pytest.fail("the lane went on")

    def fn(net):
        handle = net.spawn_lane(lane)
        net.compute(1.0)
        handle.stop()
        return net.now()

    assert SimulatedWorld(1).run(fn) == [3.0]


def test_an_error_of_another_library_is_the_ranks_own_if_no_rank_is_lost():
    def fn(net):
        with pytest.raises(RuntimeError, match="of its own"), net.blaming("a sum"):
            raise RuntimeError("of its own")
        return net.now()

    assert SimulatedWorld(2, heartbeat_timeout_s=5.0).run(fn) == [5.0, 5.0]


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


# ---- what a rank that is lost in a simulated world leaves behind ----
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


# ---- the order of simulated messages, the bytes that they count for, and what is left over ----
def test_no_message_overtakes_another_on_a_shared_link():
    lengths = [random.Random(i).randrange(1, 1000) for i in range(200)]

    def fn(net):
        if net.rank == 0:
            for length in lengths:
                net.send(KB[:length], 1)
                net.send(EMPTY, 1)
            return []
        return [len(net.recv(KB, 0).wait()) for _ in range(400)]

    world = SimulatedWorld(2, 0.1, 1000.0 / 3, shared_link=True)
    assert world.run(fn)[1] == [length for pair in lengths for length in (pair, 0)]


def test_messages_may_count_for_other_bytes_than_they_have():
    def fn(net):
        if net.rank == 0:
            net.send(torch.zeros(5), 1)
            net.send(torch.zeros(1, dtype=torch.int64), 1)
        else:
            net.recv(torch.zeros(5), 0).wait()
            net.recv(torch.zeros(1, dtype=torch.int64), 0).wait()
        return net.now(), net.counters.bytes_sent

    def stretched(x: torch.Tensor) -> float:
        return x.nbytes * (100 if x.is_floating_point() else 1)

    for options, total in (({"message_bytes": stretched}, 2008), ({"size_scale": 100.0}, 2800)):
        world = SimulatedWorld(2, bandwidth_bytes_s=1000.0, **options)
        assert world.run(fn) == [(0.0, total), (pytest.approx(total / 1000), 0)]


def test_undelivered_messages_are_reported():
    def fn(net):
        if net.rank == 0:
            net.send(torch.zeros(3), 1, tag=5)
            net.sub("side").send(torch.zeros(4), 1)
        else:
            net.recv(KB, 0, tag=5)  # begun, never waited for

    expected = [
        "rank 1 never took a message with tag 5 from rank 0, 3 elements of torch.float32, "
        "sent at 0 s",
        "rank 1 never took a message with tag 0 from rank 0 [side], 4 elements of torch.float32, "
        "sent at 0 s",
    ]
    world = SimulatedWorld(2)
    with pytest.raises(TransportError, match=r"nobody received, 2 in all:\n.*tag 5"):
        world.run(fn)
    assert world.undelivered == expected
    world = SimulatedWorld(2, latency_s=9.0, strict=False)
    world.run(fn)
    assert world.undelivered == expected


# ---- worlds that cannot be ----
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"world_size": 2, "latency_s": -1.0}, "got latency_s=-1.0"),
        ({"world_size": 2, "bandwidth_bytes_s": 0.0}, "bandwidth_bytes_s=0.0"),
    ],
)
def test_worlds_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        SimulatedWorld(**arguments)


def test_faults_that_cannot_be():
    with pytest.raises(
        ValueError, match=r"rank of 0 to 1 at 0 s or later, got rank=2 and at_s=1.0"
    ):
        SimulatedWorld(2).kill(2, 1.0)


def test_a_world_that_does_not_go_on_says_how_to():
    def fn(net):
        with pytest.raises(TransportError, match=r"got on_loss=.continue.; use transport="):
            net.views.survive(None)

    SimulatedWorld(1).run(fn)
