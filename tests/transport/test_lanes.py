"""Lanes of real ranks end when they are told to, and with their network."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import ANY, PeerLost, Timeout
from lightning_dsgd.transport.watch import exchanging
from tests.support.fake_device import FakeDevice
from tests.support.worlds import FakeWorld, ProcessWorld
from tests.transport.helpers import our_threads, until

EMPTY = torch.empty(0)


def close_on_a_queue(net: Any) -> float:
    other = int(net.broadcast(torch.tensor([os.getpid()]), src=1).wait())
    if net.rank == 1:
        net.barrier().wait()
        os.kill(os.getpid(), signal.SIGSTOP)  # takes nothing any more
        return 0.0
    stuck = threading.Event()

    def send(lane_net: Any) -> None:
        sending = lane_net.send(torch.zeros(50_000_000), 1, copy=False)
        stuck.set()
        sending.wait()

    net.barrier().wait()
    lane = net.spawn_lane(send)
    assert stuck.wait(60)
    net.fail("failed: as told to")
    begin = time.monotonic()
    with contextlib.suppress(Exception):
        lane.stop()
    took = time.monotonic() - begin
    os.kill(other, signal.SIGKILL)
    return took


def test_a_closed_network_keeps_no_lane_waiting_for_a_message_to_leave() -> None:
    world = ProcessWorld(timeout_s=60.0, heartbeat_timeout_s=60.0)
    first, _ = world.outcomes(2, close_on_a_queue)
    assert first.result < 20


def fail_with_lanes_running(net: Any) -> list[str]:
    lanes = [net.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait()) for _ in range(3)]
    net.barrier().wait()
    if net.rank == 1:
        net.fail("is out of order")
    errors = []
    for lane in lanes:
        with pytest.raises(PeerLost, match="rank 1 is out of order") as info:
            lane.join()
        errors.append(info.value.waited_for)
    net.close()
    assert until(lambda: not our_threads())
    return errors


def test_failing_ends_the_lanes_of_every_rank() -> None:
    for errors in ProcessWorld().run(2, fail_with_lanes_running):
        assert errors == [f"a message with tag 0 from any rank [lane-{i}]" for i in (1, 2, 3)]


def tell_of_slow_kernels(net: Any, fake: FakeDevice) -> None:
    heard: list[int] = []
    words, done = torch.empty(0, dtype=torch.int64), threading.Event()

    def listen(lane_net: Any) -> None:
        while True:
            heard.append(int(lane_net.recv(words, ANY).wait()))

    before = our_threads()
    lane = net.spawn_lane(listen)
    lane.tell(torch.tensor([0]))
    assert until(lambda: heard == [0])
    fake.spin_until(done)
    lane.tell(torch.tensor([2]))
    lane.tell(torch.tensor([3]))
    lane.net.send(torch.tensor([1]), net.rank)
    assert until(lambda: heard == [0, 1])  # the lane serves others meanwhile
    done.set()
    assert until(lambda: heard == [0, 1, 2, 3])
    fake.spin_until(threading.Event())
    lane.tell(torch.tensor([4]))
    lane.stop()
    assert heard == [0, 1, 2, 3]
    assert our_threads() == before


def test_a_lane_is_told_once_the_device_has_done_what_was_queued_before() -> None:
    FakeWorld().run(1, tell_of_slow_kernels)


class Stuck:
    rank = 0

    def __init__(self) -> None:
        self.is_sending, self.may_leave = threading.Event(), threading.Event()

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        self.is_sending.set()
        assert self.may_leave.wait(60.0)


def join_a_lane_whose_courier_is_stuck(net: Any, fake: FakeDevice) -> None:
    lane, stuck, done = net.spawn_lane(lambda lane_net: None), Stuck(), threading.Event()
    fake.spin_until(done)
    lane.tell(torch.tensor([0]), over=stuck)
    done.set()
    assert stuck.is_sending.wait(60.0)
    with pytest.raises(Timeout, match=r"rank 0 has waited 0.2 s for its dsgd.*-courier to end"):
        lane.join(0.2)
    stuck.may_leave.set()
    lane.join()


def test_who_joins_a_lane_waits_for_its_courier_and_says_so_in_vain() -> None:
    FakeWorld().run(1, join_a_lane_whose_courier_is_stuck)


# ---- who watches a rank is told of its waits, of its lanes' too, and of its exchanges ----
class Notes:
    def __init__(self) -> None:
        self.waits: list[tuple[int, bool]] = []
        self.exchanges: list[float] = []

    def waited(self, begin_s: float, end_s: float, src: int, *, in_lane: bool) -> None:
        assert end_s > begin_s
        self.waits.append((src, in_lane))

    def exchanged(self, begin_s: float, end_s: float) -> None:
        self.exchanges.append(end_s - begin_s)


def be_watched(net: Any) -> tuple[list[tuple[int, bool]], int]:
    """Rank 0 waits for a message of rank 1, and so does its lane."""
    x = torch.zeros(1)
    net.counters.watch = notes = Notes()

    if net.rank == 0:
        lane = net.spawn_lane(lambda lane: lane.recv(x, 1).wait(), "unused")
        net.send(x, 1, tag=1)
        with exchanging(notes, net.now):
            net.recv(x, 1, tag=2).wait()
        lane.join()
    else:
        lane = net.spawn_lane(lambda lane: None, "unused")
        net.recv(x, 0, tag=1).wait()
        net.send(x, 0, tag=2)
        lane.net.send(x, 0)
        lane.join()
    return sorted(notes.waits), len(notes.exchanges)


@pytest.mark.parametrize("world", [SimulatedWorld(2, latency_s=1e-3), ProcessWorld()])
def test_waits_are_told_with_the_rank_they_were_for(world: Any) -> None:
    is_simulated = isinstance(world, SimulatedWorld)
    first, second = world.run(be_watched) if is_simulated else world.run(2, be_watched)
    if is_simulated:  # between processes a message may be there before it is waited for
        assert first == ([(1, False), (1, True)], 1)
        assert second == ([(0, False)], 0)
    assert first[1] == 1
    assert set(first[0]) <= {(1, False), (1, True)}
    assert set(second[0]) <= {(0, False)}
