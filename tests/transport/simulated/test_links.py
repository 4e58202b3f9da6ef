"""What messages cost on simulated links, and which receive takes which."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_dsgd.transport import ANY, TransportError
from lightning_dsgd.transport.simulated import SimulatedWorld

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second
EMPTY = KB[:0]


def test_a_message_takes_latency_plus_bytes_over_bandwidth():
    def fn(net):
        if net.rank == 0:
            net.compute(2.0)
            net.send(KB, 1)
            sent_at = net.now()
            net.recv(KB, 1).wait()
            return sent_at, net.now()
        net.recv(KB, 0).wait()
        begin = net.now()
        net.compute(0.25)
        net.send(KB[:500], 0)
        return begin

    sender, receiver = SimulatedWorld(2, latency_s=0.125, bandwidth_bytes_s=1000.0).run(fn)
    assert receiver == 2.0 + 1.0 + 0.125
    assert sender == (2.0, 3.125 + 0.25 + 0.5 + 0.125)


def test_links_send_and_receive_one_message_at_a_time():
    def fan_out(net):
        if net.rank == 0:
            for dst in (1, 2, 3):
                net.send(KB, dst)
            return net.now()
        net.recv(KB, 0).wait()
        return net.now()

    def fan_in(net):
        if net.rank:
            net.compute(0.25 * net.rank)
            net.send(KB, 0)
            return None
        return [(net.recv(KB, ANY).wait(), net.now())[1] for _ in range(3)]

    def both_ways(net):
        net.send(KB, 1 - net.rank)
        net.recv(KB, 1 - net.rank).wait()
        return net.now()

    world = SimulatedWorld(4, 0.5, 1000.0)
    assert world.run(fan_out) == [0.0, 1.5, 2.5, 3.5]
    assert world.run(fan_in)[0] == [1.75, 2.75, 3.75]
    assert SimulatedWorld(2, 0.5, 1000.0).run(both_ways) == [1.5, 1.5]


def test_a_queue_at_one_link_does_not_hold_up_another():
    # Rank 0's third message leaves at 2 s; rank 2's to the same receiver comes long before it.
    def fn(net):
        if net.rank == 0:
            for dst in (1, 1, 3):
                net.send(KB, dst)
        elif net.rank == 2:
            net.compute(0.5)
            net.send(KB, 3)
        elif net.rank == 1:
            net.recv(KB, 0).wait()
            net.recv(KB, 0).wait()
        else:
            return [(r.wait(), r.source, net.now())[1:] for r in (net.recv(KB, ANY) for _ in "12")]
        return None

    assert SimulatedWorld(4, 0.0, 1000.0).run(fn)[3] == [(2, 1.5), (0, 3.0)]


def test_shared_link_carries_one_message_at_a_time():
    def fn(net):
        net.send(KB, net.rank ^ 1)
        net.recv(KB, net.rank ^ 1).wait()
        return net.now()

    world = SimulatedWorld(4, 0.5, 1000.0, shared_link=True)
    assert world.run(fn) == [2.5, 1.5, 4.5, 3.5]


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


def test_any_takes_what_arrives_first_and_not_what_was_sent_first():
    def fn(net):
        if net.rank == 1:
            net.send(torch.zeros(4000, dtype=torch.uint8), 0)
        elif net.rank == 2:
            net.compute(0.5)
            net.send(KB, 0)
        else:
            return [(r.wait(), r.source)[1] for r in (net.recv(KB, ANY), net.recv(KB, ANY))]
        return None

    world = SimulatedWorld(3, 0.0, 1000.0, shared_link=False)
    assert world.run(fn)[0] == [1, 2]  # the receiver's link was taken by the long one first
    later = SimulatedWorld(3, 1.0, 1000.0)
    later.delay(1, 0.0, 2.0)
    assert later.run(fn)[0] == [2, 1]


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
