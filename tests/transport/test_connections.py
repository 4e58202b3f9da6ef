"""A rank that has no descriptor left for those who connect."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from typing import Any

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
