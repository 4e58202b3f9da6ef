"""A simulated rank's transport: what polling costs, its lanes, and what is left over."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_dsgd.simulated import POLL_S, RankFailed, SimulatedTransport, SimulatedWorld
from lightning_dsgd.transport import ANY, LaneStopped, Timeout, TransportError

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second


def test_polling_moves_the_clock():
    def fn(net):
        if net.rank == 0:
            net.compute(10 * POLL_S)
            net.send(KB[:0], 1)
            return None
        receipt, polls = net.recv(KB, 0), 1
        while not receipt.done():
            polls += 1
        receipt.wait()
        return polls, net.now()

    polls, now = SimulatedWorld(2).run(fn)[1]
    assert polls in (10, 11)
    assert now == pytest.approx(polls * POLL_S)


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


def test_the_waits_of_the_training_thread_count_and_those_of_its_lanes_do_not():
    def lane(net):
        net.recv(KB[:0], ANY).wait()

    def fn(net):
        if net.rank == 0:
            net.compute(2.0)
            net.send(KB[:0], 1, tag=1)
            return net.counters.wait_s
        started = net.spawn_lane(lane)
        net.recv(KB[:0], 0, tag=1).wait()
        net.compute(10.0)
        started.stop()
        return net.counters.wait_s

    assert SimulatedWorld(2, strict=False).run(fn) == [0.0, 2.0]


def test_a_receive_that_has_timed_out_gets_what_comes_later_and_keeps_its_place():
    def fn(net):
        if net.rank == 0:
            net.compute(2.0)
            for value in (1.0, 2.0):
                net.send(torch.tensor([value]), 1)
            return []
        first, second = (net.recv(torch.empty(0), 0) for _ in range(2))
        with pytest.raises(Timeout, match=r"rank 1 has waited 0\.5 s for a message"):
            first.wait(0.5)
        # It has given up its place, so the second one gets the first message.
        return [float(second.wait()), float(first.wait())]

    assert SimulatedWorld(2).run(fn)[1] == [1.0, 2.0]


def test_messages_that_come_to_one_rank_at_once_share_its_link():
    def fn(net):
        if net.rank:
            net.send(KB, 0)
            return []
        times = []
        for rank in (1, 2):
            net.recv(KB, rank).wait()
            times.append(net.now())
        return times

    assert SimulatedWorld(3, bandwidth_bytes_s=1000.0).run(fn)[0] == [1.0, 2.0]
    shared = SimulatedWorld(3, bandwidth_bytes_s=1000.0, shared_link=True)
    assert shared.run(fn)[0] == [1.0, 2.0]


def test_a_message_that_was_not_waited_for_long_enough_comes_first_all_the_same():
    def fn(net):
        if net.rank == 2:
            net.send(KB.repeat(10), 1, tag=9)  # keeps rank 1's link until 15 s
        elif net.rank == 0:
            net.compute(0.5)
            net.send(KB, 1)
            net.send(KB[:0], 1)
        else:
            with pytest.raises(Timeout):
                net.recv(KB, 0).wait(10.0)  # both are on their way in
            return [len(net.recv(KB, 0).wait()) for _ in range(2)]
        return []

    world = SimulatedWorld(3, latency_s=5.0, bandwidth_bytes_s=1000.0, strict=False)
    assert world.run(fn)[1] == [1000, 0]


def test_work_takes_time_from_where_the_rank_is():
    def fn(net):
        net.compute(1.0)
        net.work(2.0)
        return net.now()

    assert SimulatedWorld(1).run(fn) == [3.0]


def test_torch_has_as_many_threads_after_a_simulation_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert SimulatedWorld(1).run(lambda net: torch.get_num_threads()) == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_lanes_of_a_rank_that_fails_end_with_it():
    def lane(net):
        for _ in range(50):
            net.compute(1.0)
            times.append(net.now())

    def fn(net):
        if net.rank:
            net.compute(20.0)  # and stops nobody's lanes meanwhile
            return
        net.spawn_lane(lane)
        net.compute(2.5)
        raise ValueError("no such luck")

    times: list[float] = []
    with pytest.raises(RankFailed, match="no such luck"):
        SimulatedWorld(2).run(fn)
    assert times == [1.0, 2.0]


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


# ---- the order of simulated messages, and what is left over ----
def test_no_message_overtakes_another_on_a_shared_link():
    lengths = [random.Random(i).randrange(1, 1000) for i in range(200)]

    def fn(net):
        if net.rank == 0:
            for length in lengths:
                net.send(KB[:length], 1)
                net.send(KB[:0], 1)
            return []
        return [len(net.recv(KB, 0).wait()) for _ in range(400)]

    world = SimulatedWorld(2, 0.1, 1000.0 / 3, shared_link=True)
    assert world.run(fn)[1] == [length for pair in lengths for length in (pair, 0)]


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
    ("make", "message"),
    [
        (lambda: SimulatedWorld(0), "world_size must be at least 1, got 0"),
        (lambda: SimulatedWorld(2, latency_s=-1.0), "got latency_s=-1.0"),
        (lambda: SimulatedWorld(2, bandwidth_bytes_s=0.0), "bandwidth_bytes_s=0.0"),
        (lambda: SimulatedWorld(2).kill(2, 1.0), "rank of 0 to 1 at 0 s or later, got rank=2 and"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_world_that_does_not_go_on_says_how_to():
    def fn(net):
        with pytest.raises(TransportError, match=r"got on_loss=.continue.; use transport="):
            net.views.survive(None)

    SimulatedWorld(1).run(fn)
