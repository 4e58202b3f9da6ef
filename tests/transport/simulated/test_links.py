"""The order of simulated messages, the bytes that they count for, and what is left over."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.simulated import SimulatedWorld

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second
EMPTY = KB[:0]


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
