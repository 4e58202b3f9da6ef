"""A simulated rank's transport: what is counted, what polling costs, and its lanes."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY, LaneStopped
from lightning_dsgd.transport.simulated import POLL_S, RankFailed, SimulatedWorld

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


def test_waits_of_lanes_count_as_communication_only():
    def lane(net):
        net.recv(KB, 0).wait()

    def fn(net):
        if net.rank == 0:
            net.compute(2.0)
        (net.spawn_lane(lane) if net.rank else net.spawn_lane(lambda n: n.send(KB, 1) and None))
        net.compute(10.0)
        return net.counters.wait_s, net.counters.comm_s

    assert SimulatedWorld(2, 0.5, 1000.0).run(fn) == [(0.0, 0.0), (0.0, 3.5)]


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
