"""Where a rank listens; and one that has no descriptor left for those who connect."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from typing import Any

import pytest

from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.connections import own_address
from lightning_dsgd.transport.handshake import NONCE_BYTES
from tests.support.worlds import ProcessWorld


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
