"""What only the simulated world has: virtual time, determinism, deadlock reports, faults."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch

from lightning_dsgd.transport import (
    ANY,
    Deadlock,
    LaneStopped,
    PeerLost,
    Timeout,
    TransportError,
)
from lightning_dsgd.transport.simulated import (
    POLL_S,
    Killed,
    RankFailed,
    SimulatedTransport,
    SimulatedWorld,
)

KB = torch.zeros(1000, dtype=torch.uint8)  # 1 s at 1,000 bytes a second
EMPTY = KB[:0]


@pytest.fixture(autouse=True)
def _no_thread_left_behind():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


# Time


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


def test_size_scale_stretches_messages_and_their_count():
    def fn(net):
        if net.rank == 0:
            net.send(torch.zeros(5), 1)
        else:
            net.recv(torch.zeros(5), 0).wait()
        return net.now(), net.counters.bytes_sent

    world = SimulatedWorld(2, bandwidth_bytes_s=1000.0, size_scale=100.0)
    assert world.run(fn) == [(0.0, 2000), (2.0, 0)]


def test_messages_may_count_for_other_bytes_than_they_have():
    def fn(net):
        if net.rank == 0:
            net.send(torch.zeros(5), 1)
            net.send(torch.zeros(1, dtype=torch.int64), 1)
        else:
            net.recv(torch.zeros(5), 0).wait()
            net.recv(torch.zeros(1, dtype=torch.int64), 0).wait()
        return net.now(), net.counters.bytes_sent

    world = SimulatedWorld(
        2,
        bandwidth_bytes_s=1000.0,
        message_bytes=lambda x: x.nbytes * (100 if x.is_floating_point() else 1),
    )
    assert world.run(fn) == [(0.0, 2008), (pytest.approx(2.008), 0)]


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


# Determinism


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


def test_ties_go_by_rank():
    def fn(net):
        for _ in range(3):
            order.append(net.rank)
            net.compute(1.0)

    order: list[int] = []
    SimulatedWorld(4).run(fn)
    assert order == [0, 1, 2, 3] * 3


# Deadlock, timeouts


def test_a_cycle_of_waits_is_reported_with_who_waits_for_what():
    def fn(net):
        net.compute(0.5 * net.rank)
        net.recv(KB, (net.rank + 1) % 3, tag=net.rank).wait()

    begin = time.monotonic()
    outcomes = SimulatedWorld(3, timeout_s=1e6).outcomes(fn)
    assert time.monotonic() - begin < 5.0
    assert [type(error) for error in outcomes] == [Deadlock] * 3
    assert (
        str(outcomes[0])
        == str(outcomes[2])
        == (
            "every rank waits for another:\n"
            "  rank 0 waits since 0 s for a message with tag 0 from rank 1\n"
            "  rank 1 waits since 0.5 s for a message with tag 1 from rank 2\n"
            "  rank 2 waits since 1 s for a message with tag 2 from rank 0"
        )
    )


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


def test_long_tables_are_cut():
    def fn(net):
        net.recv(KB, ANY).wait()

    text = str(SimulatedWorld(100).outcomes(fn)[0])
    assert len(text.splitlines()) == 1 + 40 + 1
    assert "... and 60 more" in text


def test_explicit_timeouts_happen_in_virtual_time():
    def fn(net):
        if net.rank == 1:
            net.compute(100.0)
            net.send(KB, 0)
            return None
        receipt = net.recv(KB, 1)
        with pytest.raises(Timeout, match=r"rank 0 has waited 2.5 s for a message with tag 0 from"):
            receipt.wait(timeout_s=2.5)
        early = net.now()
        receipt.wait(timeout_s=200.0)
        return early, net.now()

    assert SimulatedWorld(2).run(fn)[0] == (2.5, 100.0)


def test_a_receive_that_timed_out_swallows_no_message():
    def fn(net):
        if net.rank == 0:
            net.send(torch.tensor([1.0]), 1)
            net.send(torch.tensor([2.0]), 1)
            return None
        given_up = net.recv(torch.empty(0), 0)
        with pytest.raises(Timeout):
            given_up.wait(timeout_s=0.25)
        half_read = net.recv(torch.empty(0), 0)
        with pytest.raises(Timeout):
            half_read.wait(timeout_s=0.5)
        return [net.recv(torch.empty(0), 0).wait().item() for _ in range(2)]

    assert SimulatedWorld(2, 0.5, 4.0).run(fn)[1] == [1.0, 2.0]


def test_default_timeout_holds_while_others_go_on():
    def fn(net):
        if net.rank == 0:
            for _ in range(100):
                net.compute(1.0)
        else:
            net.recv(KB, 0).wait()

    none, error = SimulatedWorld(2, timeout_s=30.0).outcomes(fn)
    assert none is None or isinstance(none, PeerLost)
    assert str(error) == "rank 1 has waited 30 s for a message with tag 0 from rank 0"


def test_default_timeout_does_not_delay_a_deadlock():
    def fn(net):
        with pytest.raises(Deadlock):
            net.recv(KB, 1 - net.rank).wait()
        return net.now()

    assert SimulatedWorld(2, timeout_s=30.0).run(fn) == [0.0, 0.0]


# Faults


def steps(net: SimulatedTransport, num_steps: int = 10) -> float:
    x = torch.ones(4)
    for _ in range(num_steps):
        net.compute(1.0)
        net.all_reduce(x).wait()
    return net.now()


def test_a_killed_rank_is_lost_to_all():
    world = SimulatedWorld(4, detect_s=0.25)
    world.kill(2, 3.875)
    outcomes = world.outcomes(steps)
    assert isinstance(outcomes[2], Killed)
    for rank in (0, 1, 3):
        error = outcomes[rank]
        assert isinstance(error, PeerLost)
        assert (error.rank, error.reason) == (2, "was killed at 3.875 s")
        assert error.waited_for.startswith("all_reduce number 3 from rank ")
    with pytest.raises(
        RankFailed, match=r"rank 2 failed at 3.875 s .and 3 more of 4.: Killed: rank 2"
    ):
        world.run(steps)


def test_a_loss_reaches_waits_that_had_nothing_to_do_with_it_and_check_and_send():
    def fn(net):
        if net.rank == 0:
            net.compute(100.0)
        elif net.rank == 1:
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: a message"):
                net.recv(KB, 2).wait()
            noticed = net.now()
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: a check"):
                net.check()
            with pytest.raises(PeerLost, match="rank 0 was killed at 5 s; noticed in: sending to"):
                net.send(KB, 2)
            return noticed
        else:
            net.compute(4.0)
            net.check()
            net.compute(10.0)
        return None

    world = SimulatedWorld(3, detect_s=0.5)
    world.kill(0, 5.0)
    killed, noticed, _ = world.outcomes(fn)
    assert isinstance(killed, Killed)
    assert noticed == 5.5


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


def test_messages_that_had_not_left_die_with_their_sender():
    def fn(net):
        if net.rank == 0:
            for _ in range(3):
                net.send(KB, 1)
            net.compute(50.0)
            return None
        times = []
        with pytest.raises(PeerLost):  # noqa: PT012 - how far it gets is the point
            while True:
                net.recv(KB, 0).wait()
                times.append(net.now())
        return times

    world = SimulatedWorld(2, 0.5, 1000.0, detect_s=10.0)
    world.kill(0, 1.5)
    assert world.outcomes(fn)[1] == [1.5, 2.5]


def test_a_delayed_rank_is_late_and_nothing_else_changes():
    on_time = SimulatedWorld(4).run(steps)
    world = SimulatedWorld(4)
    world.delay(1, 2.5, 7.0)
    assert on_time == [10.0] * 4
    assert world.run(steps) == [17.0] * 4


def test_a_delay_strikes_a_rank_that_waits():
    def fn(net):
        if net.rank == 0:
            net.compute(2.0)
            net.send(KB, 1)
        else:
            net.recv(KB, 0).wait()
        return net.now()

    world = SimulatedWorld(2)
    world.delay(1, 1.0, 0.5)
    assert world.run(fn) == [2.0, 2.0]
    world.delay(1, 1.25, 9.0)
    assert world.run(fn) == [2.0, 10.5]


def test_a_dropped_rank_is_lost_after_the_heartbeat_timeout():
    def fn(net):
        try:
            return steps(net)
        except PeerLost as error:
            return error.rank, error.reason, net.now()

    world = SimulatedWorld(3, heartbeat_timeout_s=5.0)
    world.drop(1, 2.5)
    reason = "stopped answering: not heard of for 5 s"
    assert world.outcomes(fn) == [(1, reason, 7.5), (0, reason, 7.5), (1, reason, 7.5)]


def test_a_rank_that_fails_is_named_with_its_reason_and_is_the_root_cause():
    def fn(net):
        net.compute(1.0)
        if net.rank == 1:
            raise ValueError("no such luck")
        net.barrier().wait()

    world = SimulatedWorld(3)
    outcomes = world.outcomes(fn)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerLost)
        assert (outcomes[rank].rank, outcomes[rank].reason) == (
            1,
            "failed: ValueError: no such luck",
        )
    with pytest.raises(
        RankFailed, match=r"^rank 1 failed at 1 s .* ValueError: no such luck$"
    ) as info:
        world.run(fn)
    assert isinstance(info.value.__cause__, ValueError)


def test_a_failed_lane_fails_its_rank():
    def lane(net):
        net.compute(1.0)
        raise ValueError("in the lane")

    def unaware(net):
        if net.rank == 0:
            net.spawn_lane(lane)
            net.compute(5.0)
            return
        net.recv(KB, 0).wait()

    mine, other = SimulatedWorld(2).outcomes(unaware)
    assert repr(mine) == "ValueError('in the lane')"
    assert other.reason == "failed: ValueError: in the lane"

    def aware(net):
        handle = net.spawn_lane(lane)
        net.compute(0.5)
        handle.check()
        net.compute(1.0)
        for look in (handle.check, handle.join, handle.stop):
            with pytest.raises(ValueError, match="in the lane"):
                look()
        return net.now()

    assert SimulatedWorld(1).run(aware) == [1.5]


def test_a_rank_that_left_is_named():
    def fn(net):
        if net.rank == 1:
            net.compute(0.5)
            return
        net.recv(KB, 1, tag=3).wait()

    error = SimulatedWorld(2).outcomes(fn)[0]
    assert isinstance(error, PeerLost)
    assert str(error) == (
        "rank 1 has left (it returned at 0.5 s); noticed in: a message with tag 3 from rank 1"
    )


def test_a_message_is_received_after_its_sender_has_left():
    def fn(net):
        if net.rank == 1:
            net.send(KB, 0)
        else:
            net.compute(5.0)
            net.recv(KB, 1).wait()

    SimulatedWorld(2).run(fn)


# Order at the end


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


def test_threads_end_also_when_the_run_is_interrupted():
    def fn(net):
        if net.rank == 0:
            net.compute(1.0)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            net.compute(1.0)

    with pytest.raises(KeyboardInterrupt):
        SimulatedWorld(4).run(fn)


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


# Size


def gossip(net: SimulatedTransport, num_steps: int) -> tuple[torch.Tensor, float]:
    """On the exponential graph: to 2^k ranks on, from 2^k ranks back."""
    x = torch.full((16,), float(net.rank))
    hops = [1 << k for k in range((net.world_size - 1).bit_length())]
    for step in range(num_steps):
        hop = hops[step % len(hops)]
        net.compute(0.1)
        net.send(x, (net.rank + hop) % net.world_size)
        x += net.recv(x, (net.rank - hop) % net.world_size).wait()
        x /= 2
    return x, net.now()


def test_1024_ranks(capsys):
    begin = time.monotonic()
    results = SimulatedWorld(1024, latency_s=1e-5, bandwidth_bytes_s=1e9).run(gossip, 100)
    seconds = time.monotonic() - begin
    with capsys.disabled():
        print(f" [1,024 ranks x 100 gossip steps: {seconds:.1f} s] ", end="")
    assert seconds < 60.0
    for x, now in results:
        assert torch.equal(x, torch.full((16,), 511.5))
        assert now == pytest.approx(100 * (0.1 + 1e-5 + 64e-9))
