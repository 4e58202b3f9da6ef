"""Where a rank listens; messages that are half sent or read; links that are cut or held up."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.lab.jobs.network import Network
from lightning_dsgd.lab.link import Link
from lightning_dsgd.transport import ANY, PeerLost, Timeout, TransportError
from lightning_dsgd.transport.connection import Connection
from lightning_dsgd.transport.connections import own_address
from lightning_dsgd.transport.handshake import NONCE_BYTES
from lightning_dsgd.transport.mesh import Mesh
from tests.support.nodes import NodeWorld, shaped
from tests.support.worlds import ProcessWorld
from tests.transport.helpers import BIG, stopped, until

EMPTY = torch.empty(0)


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


# ---- a listener without descriptors ----
def run_out_of_descriptors(net: Any) -> int:
    """Gives how often rank 0 asks for a stranger in half a second, who waits to be let in."""
    taken: list[int] = []
    connections, asked = net.mesh.connections, []
    accept = connections._accept

    def ask() -> None:
        asked.append(time.monotonic())
        accept()

    net.barrier().wait()
    if net.rank == 0:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
    net.barrier().wait()
    num_asked = 0
    with contextlib.ExitStack() as stack:
        if net.rank == 1:
            address = connections._addresses[0]
            stranger = stack.enter_context(socket.create_connection(address, 10.0))
        net.barrier().wait()
        if net.rank == 0:
            connections._accept, begin = ask, time.monotonic()
            threading.Event().wait(0.5)
            num_asked = sum(at < begin + 0.5 for at in asked)
            for descriptor in taken:
                os.close(descriptor)
        net.barrier().wait()
        if net.rank == 1:
            assert len(stranger.recv(NONCE_BYTES)) == NONCE_BYTES  # it is let in now
    net.barrier().wait()
    return num_asked


def test_a_rank_without_descriptors_does_not_spin_and_listens_again() -> None:
    assert ProcessWorld().run(2, run_out_of_descriptors)[0] < 10


# ---- messages that are half sent or half read, and links that are cut or held up ----
@contextlib.contextmanager
def one_connection() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection that no thread serves, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield Connection(ours, 1, Mesh(0, 2, 60.0, 20.0), lambda _: None), theirs


def tensor_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def all_that_comes(connection: Connection, theirs: socket.socket) -> bytes:
    """What the other end reads until nothing is left to send."""
    come, is_all = b"", False
    while not is_all:
        is_all = connection.flush()
        with contextlib.suppress(BlockingIOError):
            while piece := theirs.recv(1 << 16):
                come += piece
    return come


def test_what_is_sent_meanwhile_leaves_behind_a_message_that_comes_by_chunks() -> None:
    with one_connection() as (connection, theirs):
        connection.begin(b"<by chunks>")
        connection.add(tensor_of(b"one, "), is_last=False)
        connection.send(b"<meanwhile>", tensor_of(b"whole"), copy=True)
        between = connection.send(b"<meanwhile>", tensor_of(b"lent"), copy=False)
        connection.add(tensor_of(b"two"), is_last=True)
        connection.send(b"<afterwards>", tensor_of(b"whole"), copy=True)
        come = all_that_comes(connection, theirs)
        assert between.done()
    assert come == b"<by chunks>one, two<meanwhile>whole<meanwhile>lent<afterwards>whole"


def test_what_the_kernel_does_not_take_at_once_leaves_whole_and_is_copied() -> None:
    with one_connection() as (connection, theirs):
        text = os.urandom(1 << 21)
        copied, lent = tensor_of(text), tensor_of(text[::-1])
        assert connection.send(b"<copied>", copied, copy=True).done()
        copied.zero_()
        sending = connection.send(b"<lent>", lent, copy=False)
        assert not sending.done()
        connection.send(b"<short>", tensor_of(b"behind"), copy=True)
        come = all_that_comes(connection, theirs)
        assert sending.done()
    assert come == b"<copied>" + text + b"<lent>" + text[::-1] + b"<short>behind"


def give_up_on_a_message_that_is_half_read(net: Any) -> None:
    x = torch.ones(32 * BIG)
    if net.rank == 0:
        receive = net.collect(EMPTY, 1, net._messages, 0, 0, x.zero_())
        net.send(EMPTY, 1)
        assert until(lambda: receive.claimed)
        with pytest.raises(Timeout, match="rank 0 has waited 1e-06 s for a message with tag 0"):
            receive.wait(timeout_s=1e-6)
        assert receive.wait().sum() == len(x)
        assert net.recv(EMPTY, 1).wait(20).tolist() == [1, 1, 1]  # it takes none but its own
    else:
        net.recv(EMPTY, 0).wait()
        net.send(x, 0)
        net.send(torch.ones(3), 0)
    net.barrier().wait()


def test_a_wait_that_ends_within_a_message_is_a_timeout_and_the_next_one_gets_it() -> None:
    ProcessWorld().run(2, give_up_on_a_message_that_is_half_read)


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
    outcomes = ProcessWorld(heartbeat_timeout_s=4.0).outcomes(2, send_a_lot_to_the_dying)
    assert outcomes[0].error == ""
    assert outcomes[0].result < 50.0


def cut_off(net: Any, nodes: Network, folder: str) -> tuple[int, str, float]:
    clock = Path(folder, "clock")
    if net.rank == 0:
        for rank in range(1, net.world_size):
            net.recv(EMPTY, rank).wait()  # it is open there
    else:
        net.send(EMPTY, 0)
    try:
        if net.rank == 0:
            nodes.cut(1, 2)
            clock.write_text(str(time.monotonic()))
            for rank in range(1, net.world_size):
                net.send(EMPTY, rank)
        else:
            net.recv(EMPTY, 0).wait()
        net.recv(EMPTY, ANY if net.rank == 0 else 3 - net.rank, tag=7).wait()
    except PeerLost as lost:
        return lost.rank, lost.reason, time.monotonic() - float(clock.read_text())
    raise AssertionError("a message has come over a link that is cut")


@shaped
def test_a_cut_between_two_ranks_is_noticed_by_all_within_the_heartbeat(tmp_path: Path) -> None:
    with Network(3, Link(1e9)) as nodes:
        world = NodeWorld(timeout_s=60.0, heartbeat_timeout_s=8.0, nodes=nodes)
        results = world.run(3, cut_off, str(tmp_path))
    for lost, reason, seconds in results:
        assert lost in (1, 2)
        assert reason.startswith("has not answered for 8 s on the link between rank ")
        assert f"rank 1 at {nodes.address(1)}:" in reason
        assert f"rank 2 at {nodes.address(2)}:" in reason
        assert seconds < 45.0


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
    assert world.run(2, stall, 5.0)[1] == 16 * BIG


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
