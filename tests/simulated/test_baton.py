"""The hand-over of the turn: order, standstill, and many ranks."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch

from lightning_dsgd.simulated import RankFailed, SimulatedTransport, SimulatedWorld
from lightning_dsgd.transport import ANY, Deadlock

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second


def busy(net: SimulatedTransport) -> Any:
    """Gossip to whoever comes first, beside a lane that sums, with collectives in between."""
    generator = torch.Generator().manual_seed(net.rank)
    trace: list[Any] = []

    def lane(lane_net):
        for _ in range(5):
            x = torch.randn(33, generator=torch.Generator().manual_seed(net.rank))
            trace.append((lane_net.all_reduce(x).wait().numpy().tobytes(), lane_net.now()))
            lane_net.compute(0.003 * (net.rank + 1))

    handle = net.spawn_lane(lane)
    x = torch.randn(50, generator=generator)
    for step in range(10):
        net.compute(float(torch.rand((), generator=generator)) * 0.01)
        net.send(x, (net.rank + 1 + step % (net.world_size - 1)) % net.world_size)
        receipt = net.recv(x, ANY)
        while not receipt.done():
            net.compute(1e-4)
        x = (x + receipt.wait()) / 2
        trace.append((receipt.source, net.now()))
    net.all_reduce(x).wait()
    handle.join()
    return x.numpy().tobytes(), trace, net.now(), net.counters


def test_two_runs_are_equal_to_the_bit():
    world = SimulatedWorld(6, 1e-3, 1e5)
    world.delay(2, 0.02, 0.05)
    first, second = world.run(busy), world.run(busy)
    assert first == second
    assert len({rank[0] for rank in first}) == 1


def test_a_deadlock_report_names_lanes_joins_and_collectives():
    def lane(net):
        net.recv(KB, ANY, tag=7).wait()

    def fn(net):
        if net.rank == 0:
            net.spawn_lane(lane, "server").join()
        else:
            net.all_reduce(torch.ones(8)).wait()

    with pytest.raises(
        RankFailed, match=r"rank 0 failed at 0 s .and 1 more of 2.: Deadlock"
    ) as info:
        SimulatedWorld(2).run(fn)
    assert isinstance(info.value.__cause__, Deadlock)
    for line in (
        "rank 0 waits since 0 s for the end of its lane server-1",
        "rank 0, lane server-1, waits since 0 s for a message with tag 7 from any rank [server-1]",
        "rank 1 waits since 0 s for all_reduce number 0 from rank 0",
    ):
        assert line in str(info.value)


def test_threads_end_also_when_the_run_is_interrupted():
    def fn(net):
        if net.rank == 0:
            net.compute(1.0)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            net.compute(1.0)

    with pytest.raises(KeyboardInterrupt):
        SimulatedWorld(4).run(fn)


@pytest.mark.exhaustive
def test_1024_ranks():
    def fn(net):
        x = torch.tensor([float(net.rank)])
        for _ in range(4):
            net.compute(0.1)
            net.all_reduce(x).wait()
            x /= net.world_size
        return float(x)

    begin = time.process_time()
    assert SimulatedWorld(1024, latency_s=1e-5, bandwidth_bytes_s=1e9).run(fn) == [511.5] * 1024
    assert time.process_time() - begin < 60.0
