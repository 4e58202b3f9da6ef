"""What only the network of real processes promises: it notices death, and leaves nothing behind.

Functions that run on every rank come before the tests that run them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.transport import ANY, PeerLost, Timeout
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.worlds import Outcome, ProcessWorld

EMPTY = torch.empty(0)
WORD = torch.empty(0, dtype=torch.int64)
BIG = 1 << 21
"""Elements of a message of 8 MB, more than a connection takes at once."""


def died(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raised(rank: int) -> None:
    raise ValueError("no such luck")


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return condition()


def open_files() -> set[str]:
    """The sockets, pipes and polls that this process holds."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{file.name} {os.readlink(file)}")
    return {text for text in found if "socket" in text or "eventpoll" in text}


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dsgd")]


# Every wait ends when a rank is lost


def wait_for_message(net: Any, lost: int) -> None:
    net.recv(EMPTY, lost).wait()


def wait_for_third_rank(net: Any, lost: int) -> None:
    third = next(rank for rank in range(net.world_size) if rank not in (lost, net.rank))
    net.recv(EMPTY, third, tag=5).wait()


def wait_for_any(net: Any, lost: int) -> None:
    net.recv(EMPTY, ANY, tag=6).wait()


def wait_in_all_reduce(net: Any, lost: int) -> None:
    net.all_reduce(torch.ones(1000)).wait()


def wait_in_group(net: Any, lost: int) -> None:
    """In a group that the lost rank is no member of, for a member that does not come."""
    third = next(rank for rank in range(net.world_size) if rank not in (lost, net.rank))
    net.all_reduce(torch.ones(1000), sorted((net.rank, third))).wait()


def wait_in_barrier(net: Any, lost: int) -> None:
    net.barrier().wait()


def wait_in_lane(net: Any, lost: int) -> None:
    net.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait() and None).join()


WAITS = (
    wait_for_message,
    wait_for_third_rank,
    wait_for_any,
    wait_in_all_reduce,
    wait_in_group,
    wait_in_barrier,
    wait_in_lane,
)


def wait_each_in_its_way(
    net: Any, lost: int, how: Callable[[int], None], folder: str
) -> tuple[int, str, float]:
    """Who was lost, why, and how many seconds it took to notice."""
    pids = [int(pid) for pid in net.all_gather(torch.tensor([os.getpid()])).wait()]
    survivors = [rank for rank in range(net.world_size) if rank != lost]
    clock = Path(folder, "clock")
    if net.rank == lost:
        for rank in survivors:
            net.recv(EMPTY, rank, tag=4).wait()
        clock.write_text(str(time.monotonic()))
        how(lost)
    net.send(EMPTY, lost, tag=4)
    try:
        WAITS[survivors.index(net.rank)](net, lost)
    except PeerLost as error:
        verdict = error.rank, error.reason, time.monotonic() - float(clock.read_text())
    if how is stopped:
        Path(folder, f"noticed-{net.rank}").touch()
        if net.rank == survivors[0]:  # once all have noticed, nobody needs it any more
            until(lambda: len(list(Path(folder).glob("noticed-*"))) == len(survivors))
            os.kill(pids[lost], signal.SIGKILL)
    return verdict


@pytest.mark.parametrize("lost", [0, 7])
@pytest.mark.parametrize(
    ("how", "reason", "within_s"),
    [
        (died, "died (its connection ended without a farewell)", 2.0),
        (raised, "failed: ValueError: no such luck", 2.0),
        (stopped, "has not answered for", 4.0),
    ],
)
def test_every_wait_ends_soon_and_names_the_rank_that_is_lost(
    lost: int, how: Callable[[int], None], reason: str, within_s: float, tmp_path: Path
) -> None:
    world = ProcessWorld(heartbeat_timeout_s=2.0 if how is stopped else 20.0)
    outcomes = world.outcomes(8, wait_each_in_its_way, lost, how, str(tmp_path))
    gone = outcomes.pop(lost)
    assert gone.exitcode == (1 if how is raised else -signal.SIGKILL)
    for wait, outcome in zip(WAITS, outcomes, strict=True):
        assert outcome.error == "", wait.__name__
        rank, why, seconds = outcome.result
        assert rank == lost, wait.__name__
        assert why.startswith(reason), wait.__name__
        assert seconds < within_s, wait.__name__


def fail_because_another_failed(net: Any) -> None:
    if net.rank == 1:
        net.recv(EMPTY, 2).wait()
        raise ValueError("the first cause")
    if net.rank == 2:
        net.send(EMPTY, 1)
        try:
            net.recv(EMPTY, 1).wait()
        except PeerLost as error:
            raise RuntimeError("the second cause") from error
    net.recv(EMPTY, 2).wait()


def test_the_first_cause_is_what_all_are_told() -> None:
    for _ in range(3):
        outcomes = ProcessWorld().outcomes(4, fail_because_another_failed)
        assert outcomes[1].error == "ValueError: the first cause"
        assert outcomes[2].error == "RuntimeError: the second cause"
        for rank in (0, 3):
            expected = "PeerLost: rank 1 failed: ValueError: the first cause"
            assert outcomes[rank].error.startswith(expected)


def send_to_the_dead(net: Any) -> None:
    if net.rank == 1:
        died(1)
    with pytest.raises(PeerLost, match="rank 1 died"):
        net.recv(EMPTY, 1).wait()
    for rank in (1, 2 - net.rank):
        with pytest.raises(PeerLost, match=r"rank 1 died .*; noticed in: sending to rank"):
            net.send(torch.ones(3), rank)
    with pytest.raises(PeerLost, match="rank 1 died"):
        net.barrier().wait()


def test_nothing_can_be_sent_once_a_rank_is_dead() -> None:
    outcomes = ProcessWorld().outcomes(3, send_to_the_dead)
    assert [outcomes[rank].error for rank in (0, 2)] == ["", ""]


def send_a_lot_to_the_dying(net: Any) -> float:
    """The connection to a stopped rank takes a part only, and never the rest."""
    pid = int(net.broadcast(torch.tensor([os.getpid()]), 1).wait())
    if net.rank == 1:
        stopped(1)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 has not answered"):
        net.all_gather(torch.ones(16 * BIG)).wait()
    os.kill(pid, signal.SIGKILL)
    return time.monotonic() - begin


def test_a_message_that_is_half_sent_ends_with_its_reader() -> None:
    outcomes = ProcessWorld(heartbeat_timeout_s=1.0).outcomes(2, send_a_lot_to_the_dying)
    assert outcomes[0].error == ""
    assert outcomes[0].result < 4.0


def die_with_a_child_alive(net: Any, folder: str) -> float:
    """As a rank with DataLoader workers does: they are forked, and outlive it."""
    pid_file = Path(folder, "pid")
    net.barrier().wait()
    if net.rank == 1:
        if not (child := os.fork()):
            signal.pause()
        pid_file.write_text(str(child))
        died(1)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died"):
        net.recv(EMPTY, 2 - net.rank).wait()
    seconds = time.monotonic() - begin
    if net.rank == 0:
        child = int(pid_file.read_text())
        os.kill(child, 0)  # still there
        os.kill(child, signal.SIGKILL)
    return seconds


def test_a_dead_ranks_child_does_not_keep_its_connections_open(tmp_path: Path) -> None:
    outcomes = ProcessWorld().outcomes(3, die_with_a_child_alive, str(tmp_path))
    for rank in (0, 2):
        assert outcomes[rank].error == ""
        assert outcomes[rank].result < 2.0


# Leaving


def leave_at_once(net: Any, size: int) -> tuple[list[int], str]:
    """Rank 1 leaves right after it has sent; rank 0 is told of that on another connection."""
    if net.rank == 1:
        for _ in range(4):
            net.send(torch.full((size,), 7.0), 0)
        return [], ""
    heard = [int((net.recv(EMPTY, 1).wait() == 7).sum()) for _ in range(4)]
    with pytest.raises(PeerLost) as info:
        net.recv(EMPTY, 1).wait()
    return heard, info.value.reason


@pytest.mark.parametrize("size", [1, BIG])
def test_what_a_rank_sent_before_it_left_arrives(size: int) -> None:
    for _ in range(3):
        heard, reason = ProcessWorld().run(2, leave_at_once, size)[0]
        assert heard == [size] * 4
        assert reason == "has left (its training is over)"


def open_and_close(net: Any) -> None:
    for cycle in range(20):
        files, threads = open_files(), our_threads()
        inner = ProcessGroupTransport(timeout_s=20.0)
        lane = inner.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait() and None)
        x = inner.all_reduce(torch.full((cycle,), 1.0)).wait()
        assert x.sum() == cycle * net.world_size
        assert len(our_threads()) == len(threads) + 2
        lane.stop()
        inner.barrier().wait()
        inner.close()
        inner.close()
        assert our_threads() == threads
        assert not (left := open_files() - files), left


def test_closing_leaves_no_thread_and_no_socket() -> None:
    ProcessWorld().run(2, open_and_close)


def close_on_a_queue(net: Any) -> float:
    """How long a lane takes to end whose message is stuck when its network closes."""
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
    assert stuck.wait(10)
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
    assert first.result < 5


def stop_a_lane(net: Any) -> None:
    """In a receive from one rank, from any rank, and in a collective that the other never joins."""

    def starts_waiting(lane_net: Any) -> bool:
        return lane_net.waiting is not None

    for fn in (
        lambda lane_net: lane_net.recv(EMPTY, 1 - net.rank).wait(),
        lambda lane_net: lane_net.recv(EMPTY, ANY).wait(timeout_s=float("inf")),
        lambda lane_net: net.rank or lane_net.all_reduce(torch.ones(100)).wait(),
    ):
        before = our_threads()
        lane = net.spawn_lane(fn)
        begin = time.monotonic()
        lane.stop()
        lane.check()
        lane.join()
        assert time.monotonic() - begin < 1.0
        assert our_threads() == before
    net.barrier().wait()


def test_a_lane_that_is_blocked_is_stopped() -> None:
    ProcessWorld().run(2, stop_a_lane)


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


# Much at once


def exchange_much(net: Any) -> None:
    others = [rank for rank in range(net.world_size) if rank != net.rank]
    for rank in others:
        for i in range(2):
            net.send(torch.full((BIG,), float(10 * net.rank + i)), rank)
    for i in range(2):
        for rank in others:
            assert bool((net.recv(EMPTY, rank).wait() == 10 * rank + i).all())
    gathered = net.all_gather(torch.full((BIG,), float(net.rank))).wait()
    assert [float(x[-1]) for x in gathered] == list(range(net.world_size))


def test_large_messages_between_all_pairs_at_once_do_not_block_each_other() -> None:
    ProcessWorld().run(4, exchange_much)


def give_up_on_a_message_that_is_half_read(net: Any) -> None:
    x = torch.ones(32 * BIG)
    if net.rank == 0:
        work = net.broadcast(x.zero_(), 1)
        net.send(EMPTY, 1)
        assert until(lambda: work._pending.claimed)
        with pytest.raises(Timeout, match="rank 0 has waited 1e-06 s for broadcast"):
            work.wait(timeout_s=1e-6)
        assert work.wait().sum() == len(x)
    else:
        net.recv(EMPTY, 0).wait()
        net.broadcast(x, 1).wait()
    net.barrier().wait()


def test_a_wait_that_ends_within_a_message_is_a_timeout() -> None:
    ProcessWorld().run(2, give_up_on_a_message_that_is_half_read)


# Strangers


def meet_strangers(net: Any) -> None:
    """Whoever connects without the token is turned away, whatever else it says."""
    mesh = net._mesh
    if net.rank == 0:
        strangers = []
        for greeting in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<16sI", bytes(16), 1),
            struct.pack("<16sI", bytes(16), 1) + bytes(100),
            struct.pack("<16sI", bytes(16), 77),
            os.urandom(1 << 17),
        ):
            for address in mesh._addresses:
                stranger = socket.create_connection(address, 5.0)
                with contextlib.suppress(OSError):
                    stranger.sendall(greeting)
                if len(greeting) >= 20:
                    stranger.settimeout(5.0)
                    with contextlib.suppress(ConnectionResetError):
                        assert stranger.recv(1) == b""  # turned away
                strangers.append(stranger)
        for stranger in strangers:
            stranger.close()
    for _ in range(3):
        assert net.all_reduce(torch.ones(1000)).wait().sum() == 1000 * net.world_size
    net.barrier().wait()
    assert until(lambda: all(connection.rank >= 0 for connection in mesh._incoming))
    net.check()
    net.barrier().wait()


def test_strangers_do_no_harm() -> None:
    ProcessWorld().run(3, meet_strangers)


# The collectives of torch itself


def native_sums(net: Any) -> list[Tensor]:
    native = ProcessGroupTransport(timeout_s=20.0, native_devices=("cpu",))
    assert native._native is not None
    sums = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        x = torch.arange(1000).remainder(7).to(dtype) * (net.rank + 1)
        work = native.all_reduce(x)
        assert work.wait() is x
        assert work.done()
        sums.append(x)
    own = native.sub("apart").all_reduce(torch.ones(3), [0, 1, 2]).wait()
    assert own.tolist() == [3.0, 3.0, 3.0]
    assert native.counters.bytes_sent > 0
    native.barrier().wait()
    native.close()
    return sums


def test_torchs_own_collectives_sum_all_dtypes() -> None:
    results = ProcessWorld().run(3, native_sums)
    for sums in results:
        for x, dtype in zip(
            sums, (torch.float32, torch.bfloat16, torch.float64, torch.int64), strict=True
        ):
            assert x.dtype == dtype
            assert torch.equal(x, torch.arange(1000).remainder(7).to(dtype) * 6)


def die_in_a_native_sum(net: Any) -> float:
    native = ProcessGroupTransport(timeout_s=20.0, native_devices=("cpu",))
    native.all_reduce(torch.ones(10)).wait()
    if net.rank == 1:
        died(1)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 died .*all_reduce"):
        native.all_reduce(torch.ones(10)).wait()
    seconds = time.monotonic() - begin
    native.fail("has nothing left to do")
    return seconds


def test_torchs_own_collectives_name_a_dead_rank() -> None:
    outcomes: list[Outcome] = ProcessWorld().outcomes(3, die_in_a_native_sum)
    for rank in (0, 2):
        assert outcomes[rank].error == ""
        assert outcomes[rank].result < 2.0
