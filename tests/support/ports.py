"""Ports for what must be told one beforehand."""

from __future__ import annotations

import itertools
import os
import socket

_PER_WORKER = 500
_numbers = itertools.count()


def free_port() -> int:
    """One that nobody has, and that nobody else will be given.

    Below those that the kernel gives to whoever asks for any; each of pytest's workers has its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + worker * _PER_WORKER + next(_numbers) % _PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
