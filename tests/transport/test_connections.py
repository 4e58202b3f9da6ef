"""Where a rank listens; and one that has no descriptor left for those who connect."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.lab.bench.network import Link, Network
from lightning_dsgd.transport import ANY, PeerLost, Timeout, TransportError
from lightning_dsgd.transport.connections import own_address
from lightning_dsgd.transport.handshake import NONCE_BYTES
from tests.support.nodes import NodeWorld, shaped
from tests.support.worlds import ProcessWorld
from tests.transport.helpers import BIG, stopped, until


def run_out_of_descriptors(net: Any) -> float:
    taken = []
    net.barrier().wait()
    if net.rank == 0:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
    net.barrier().wait()
    share = 0.0
    with contextlib.ExitStack() as stack:
        if net.rank == 1:
            address = net.mesh.connections._addresses[0]
            stranger = stack.enter_context(socket.create_connection(address, 10.0))
        net.barrier().wait()
        if net.rank == 0:
            begin, begin_cpu = time.monotonic(), time.process_time()
            threading.Event().wait(0.5)
            share = (time.process_time() - begin_cpu) / (time.monotonic() - begin)
            for descriptor in taken:
                os.close(descriptor)
        net.barrier().wait()
        if net.rank == 1:
            assert len(stranger.recv(NONCE_BYTES)) == NONCE_BYTES  # it is let in, now
    net.barrier().wait()
    return share


def test_a_rank_without_descriptors_does_not_spin() -> None:
    assert ProcessWorld().run(2, run_out_of_descriptors)[0] < 0.3


@pytest.mark.parametrize(
    "place", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"]
)
def test_ranks_of_a_node_take_interfaces_in_turn(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo, none-such")
    for rank in ("0", "2"):
        monkeypatch.setenv(place, rank)
        assert own_address() == "127.0.0.1"
    monkeypatch.setenv(place, "1")
    with pytest.raises(TransportError, match="an IPv4 address, got 'none-such'; this machine has"):
        own_address()


# ---- messages of any size, also half sent and half read, and links that are cut or held up ----
EMPTY = torch.empty(0)


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
    outcomes = ProcessWorld(heartbeat_timeout_s=6.0).outcomes(2, send_a_lot_to_the_dying)
    assert outcomes[0].error == ""
    assert outcomes[0].result < 50.0


def cut_off(
    net: Any, nodes: Network, pair: tuple[int, int], is_idle: bool, folder: str
) -> tuple[int, str, float]:
    clock = Path(folder, "clock")
    other = sum(pair) - net.rank if net.rank in pair else ANY
    if net.rank == 0:
        for rank in range(1, net.world_size):
            net.recv(EMPTY, rank).wait()  # it is open there
    else:
        net.send(EMPTY, 0)
    try:
        if net.rank == 0:
            nodes.cut(*pair)
            clock.write_text(str(time.monotonic()))
            for rank in range(1, net.world_size):
                net.send(EMPTY, rank)
        else:
            net.recv(EMPTY, 0).wait()
        if other != ANY and not is_idle:
            net.send(torch.ones(BIG), other)
        net.recv(EMPTY, other, tag=7).wait()
    except PeerLost as lost:
        return lost.rank, lost.reason, time.monotonic() - float(clock.read_text())
    raise AssertionError("a message has come over a link that is cut")


@shaped
def test_a_cut_between_two_ranks_is_noticed_by_all_within_the_heartbeat(tmp_path: Path) -> None:
    with Network(3, Link(1e9)) as nodes:
        world = NodeWorld(timeout_s=60.0, heartbeat_timeout_s=8.0, nodes=nodes)
        results = world.run(3, cut_off, (1, 2), True, str(tmp_path))
    for lost, reason, seconds in results:
        assert lost in (1, 2)
        assert reason.startswith("has not answered for 8 s on the link between rank ")
        assert f"rank 1 at {nodes.address(1)}:" in reason
        assert f"rank 2 at {nodes.address(2)}:" in reason
        assert seconds < 45.0


@shaped
@pytest.mark.exhaustive
def test_a_rank_that_cannot_be_reached_is_noticed_within_the_heartbeat(tmp_path: Path) -> None:
    """Ranks 1 and 4 of six have not been connected yet: no message of the barrier goes there."""
    with Network(6, Link(1e9)) as nodes:
        world = NodeWorld(timeout_s=60.0, heartbeat_timeout_s=12.0, nodes=nodes)
        results = world.run(6, cut_off, (1, 4), False, str(tmp_path))
    for lost, reason, seconds in results:
        assert lost in (1, 4)
        assert reason.startswith(f"cannot be reached at {nodes.address(lost)}:")
        assert f"from rank {5 - lost} at {nodes.address(5 - lost)}" in reason
        assert seconds < 45.0


def bear_a_short_cut(net: Any, nodes: Network, seconds: float) -> int:
    if net.rank == 0:
        nodes.cut(1, 2)
        threading.Event().wait(seconds)
        nodes.mend(1, 2)
        for rank in (1, 2):
            net.send(EMPTY, rank)
        return 0
    mended, is_over, num_sums = net.recv(EMPTY, 0), False, 0
    while not is_over:
        is_over = bool(net.all_reduce(torch.tensor([int(mended.done())]), (1, 2)).wait())
        num_sums += 1
    return num_sums


@shaped
@pytest.mark.exhaustive
def test_a_cut_of_three_seconds_is_borne() -> None:
    with Network(3, Link(1e9)) as nodes:
        world = NodeWorld(timeout_s=60.0, heartbeat_timeout_s=20.0, nodes=nodes)
        assert min(world.run(3, bear_a_short_cut, 3.0)[1:]) >= 1


def hold_up(net: Any, how: str, seconds: float) -> float:
    """Rank 1 takes nothing for a while that is sent to it; rank 2 has more for it than fits."""
    net.barrier().wait()
    if net.rank == 1:
        if how == "SIGSTOP":
            if os.fork() == 0:
                threading.Event().wait(seconds)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.wait()
        else:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # which holds the interpreter
    if net.rank == 2:
        net.send(torch.ones(16 * BIG), 1, copy=False).wait()
    total = float(net.recv(EMPTY, 2).wait().sum()) if net.rank == 1 else 0.0
    net.barrier().wait()
    return total


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["SIGSTOP", "holds the interpreter"])
def test_a_rank_that_is_held_up_for_less_than_the_heartbeat_is_not_lost(how: str) -> None:
    assert ProcessWorld(heartbeat_timeout_s=20.0).run(3, hold_up, how, 4.0)[1] == 16 * BIG


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


def stall(net: Any, seconds: float) -> float:
    """Nothing comes through for a while on the connection with which rank 0 sends a message."""
    net.barrier().wait()
    if net.rank == 0:
        net.recv(EMPTY, 1).wait()
        for connection in net.mesh.connections.all():  # else the kernel gives it up
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
        net.send(torch.ones(16 * BIG), 1, copy=False).wait()
        return 0.0
    (stalled,) = (c for c in net.mesh.connections.all() if c is not net.mesh.connections.made_to(0))
    read, end = stalled.read, time.monotonic() + seconds

    def read_late() -> bool:
        time.sleep(0.01)  # the selector asks again at once
        return bool(time.monotonic() < end or read())

    stalled.read = read_late
    net.send(EMPTY, 0)
    return float(net.recv(EMPTY, 0).wait().sum())


def test_heartbeats_wait_behind_no_message() -> None:
    world = ProcessWorld(timeout_s=60.0, heartbeat_timeout_s=2.0)
    assert world.run(2, stall, 7.0)[1] == 16 * BIG
