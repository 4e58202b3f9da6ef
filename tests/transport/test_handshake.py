"""Strangers do no harm, and an impostor is found out."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from typing import Any

import pytest
import torch

from lightning_dsgd.transport import PeerLost, handshake
from lightning_dsgd.transport.handshake import (
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    Secret,
    Stranger,
)
from lightning_dsgd.transport.messages import DTYPES, HEADER, KINDS, why_no_message
from tests.support.worlds import ProcessWorld
from tests.transport.helpers import until

EMPTY = torch.empty(0)


def replayed(secret: Any, rank: int) -> bytes:
    """What another connection's peer, which knew the secret, has proved who it is with."""
    nonce = bytes(NONCE_BYTES)
    return HELLO.pack(0, nonce, secret.proof(nonce, 0, rank))


def meet_strangers(net: Any) -> None:
    connections = net.mesh.connections
    if net.rank == 0:
        strangers = []
        for rank, address in connections._addresses.items():
            for greeting in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                HELLO.pack(1, bytes(16), bytes(32)),
                HELLO.pack(1, bytes(16), bytes(32)) + bytes(100),
                HELLO.pack(77, bytes(16), connections._secret.proof(bytes(16), 77, rank)),
                replayed(connections._secret, rank),
                os.urandom(1 << 17),
            ):
                stranger = socket.create_connection(address, 60.0)
                with contextlib.suppress(OSError):
                    stranger.sendall(greeting)
                if len(greeting) >= HELLO.size:
                    assert all_of(stranger) in (0, NONCE_BYTES)  # turned away
                strangers.append(stranger)
        for stranger in strangers:
            stranger.close()
    for _ in range(3):
        assert net.all_reduce(torch.ones(1000)).wait().sum() == 1000 * net.world_size
    net.barrier().wait()
    assert until(lambda: not connections._strangers)
    net.check()
    net.barrier().wait()


def all_of(stranger: socket.socket) -> int:
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := stranger.recv(100):
            count += len(piece)
    return count


def test_strangers_do_no_harm() -> None:
    ProcessWorld().run(3, meet_strangers)


def flood(net: Any) -> int:
    """Rank 1 opens many connections to rank 0, which has few descriptors, and says nothing.

    Gives how many descriptors of rank 0 they took at most.
    """
    assert (handshake.HELLO_WITHIN_S, handshake.MOST_STRANGERS) == (5.0, 64)  # docs/cluster.md
    handshake.HELLO_WITHIN_S = 1.0  # type: ignore[misc]
    connections, opened, most = net.mesh.connections, [], 0
    before, hard = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if net.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 150, hard))
    net.barrier().wait()
    for part in range(10):
        for _ in range(30 * net.rank):
            opened.append(socket.socket())
            opened[-1].setblocking(False)
            opened[-1].connect_ex(connections._addresses[0])
        if net.rank == 1 and part == 5:
            connections.kept_until_the_end = connections._connect(0)  # a rank comes through
        assert net.all_reduce(torch.ones(1000)).wait().sum() == 1000 * net.world_size
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert until(lambda: not connections._strangers)
    net.barrier().wait()
    return most


def test_silent_strangers_take_few_descriptors_and_not_for_long() -> None:
    assert 60 < ProcessWorld().run(2, flood)[0] < 80


def meet_an_impostor(net: Any) -> str:
    """Somebody else listens where rank 2 should, and connects rank 1 to whoever it likes."""
    net.barrier().wait()
    if net.rank != 1:
        net.send(EMPTY, 1)
        with pytest.raises(PeerLost) as info:
            net.recv(EMPTY, 1).wait()
        return info.value.reason
    for rank in (0, 2):
        net.recv(EMPTY, rank).wait()  # it has left the barrier
    connections = net.mesh.connections
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        connections._addresses[2] = impostor.getsockname()

        def listen() -> None:
            peer, _ = impostor.accept()
            with peer:
                peer.sendall(bytes(NONCE_BYTES + 32))
                all_of(peer)

        listener = threading.Thread(target=listen)
        listener.start()
        connections._outgoing.pop(2).sock.detach()  # as if it had not been connected yet
        with pytest.raises(PeerLost, match=r"rank 2 cannot be reached at 127\.0\.0\.1:") as info:
            net.send(EMPTY, 2)
        listener.join()
    return info.value.reason


def test_who_listens_must_prove_who_it_is() -> None:
    for reason in ProcessWorld(heartbeat_timeout_s=60.0).run(3, meet_an_impostor):
        assert "whoever listens there is not rank 2 of this job" in reason


SECRET = b"what the ranks of this job share"


def stranger_at(rank: int) -> tuple[Stranger, socket.socket, bytes]:
    """One who has connected to a rank, its socket, and the number that it is to answer."""
    ours, theirs = socket.socketpair()
    stranger = Stranger(ours, Secret(SECRET, rank, 3))
    return stranger, theirs, theirs.recv(NONCE_BYTES)


@pytest.mark.parametrize(("meant_for", "is_let_in"), [(2, True), (0, False)])
def test_a_proof_that_is_meant_for_another_rank_lets_nobody_in(
    meant_for: int, is_let_in: bool
) -> None:
    """An impostor of `meant_for` hands on rank 2's number to rank 1, and its answer to rank 2."""
    stranger, impostor, number = stranger_at(2)
    with stranger.sock, impostor:
        proof = Secret(SECRET, 1, 3).proof(number, 1, meant_for)
        impostor.sendall(HELLO.pack(1, bytes(NONCE_BYTES), proof))
        assert stranger.read() == is_let_in
        assert stranger.rank == (1 if is_let_in else None)


@pytest.mark.parametrize("listener", [2, 0])
def test_who_connects_takes_no_proof_of_another_listener(listener: int) -> None:
    """Rank 1 calls rank 2, and one who listens there hands the call on to `listener`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        caller = Secret(SECRET, 1, 3)
        theirs.sendall(bytes(NONCE_BYTES))
        # The proof that `listener` gives to rank 1 for rank 1's number, which is known here.
        number = b"n" * NONCE_BYTES
        theirs.sendall(Secret(SECRET, listener, 3).proof(number, listener, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake.secrets, "token_bytes", lambda _: number)
            if listener == 2:
                caller.introduce(ours, 2)
            else:
                with pytest.raises(PermissionError, match="not rank 2 of this job"):
                    caller.introduce(ours, 2)
        assert len(theirs.recv(HELLO.size)) == HELLO.size
    assert len(caller.proof(number, 1, 2)) == PROOF_BYTES


# ---- what is no message is noticed ----
LARGE = 1 << 62
EXPECTED = 3 << 30
NO_MESSAGES = {
    "more than is expected": HEADER.pack(1, 2, EXPECTED + 4, 0, 0),
    "news in an unknown form": HEADER.pack(0, 0, 2, 255, 0) + b"{}",
    "the loss of no rank": HEADER.pack(0, 0, 8, 255, 0) + b'[77, ""]',
}


def send_no_message(net: Any, name: str) -> str:
    net.expect_at_most(EXPECTED)
    net.expect_at_most(0)  # which does not lower it
    if net.rank == 1:
        for other in (0, 2):  # has opened its network
            net.recv(EMPTY, other).wait()
        net.mesh.connections.to(0).sock.sendall(NO_MESSAGES[name])
    else:
        net.send(EMPTY, 1)
    with pytest.raises(PeerLost, match="rank 1 ") as info:
        net.recv(EMPTY, 2 - net.rank).wait()
    return info.value.reason


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_is_no_message_is_noticed_before_memory_is_taken_for_it(name: str) -> None:
    for reason in ProcessWorld().run(3, send_no_message, name):
        print(reason)
        if name == "more than is expected":
            assert reason.startswith("sent what is no message here: kind ")
            assert f" {EXPECTED + 4} bytes (" in reason
            assert f" {EXPECTED} bytes at most)" in reason
            assert "all ranks must run the same version of lightning_dsgd" in reason
        else:
            assert reason == "told of the loss of a rank in an unknown form"


@pytest.mark.parametrize(
    ("nbytes", "kind", "code"),
    [
        (0, 99, 0),
        (0, len(KINDS), 0),
        (0, 0, len(DTYPES)),
        (6, 0, 0),
        (LARGE, 0, 0),
        (LARGE, 255, 0),
    ],
)
def test_kinds_dtypes_halves_of_elements_and_what_no_memory_holds_are_no_messages(
    nbytes: int, kind: int, code: int
) -> None:
    assert why_no_message(nbytes, kind, code, EXPECTED).startswith("sent what is no message here")
