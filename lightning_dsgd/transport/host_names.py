"""The name of the machine where the ranks meet: whether it resolves here, and who has given it.

    the name resolves           nothing is said
    not within `_WARN_AFTER_S`  one warning, with the name and the variable that it comes from; the
                                name is asked for again, as a cluster may learn it later
    not within the time limit   an error with the same words

Without this, every rank would wait until the time limit, with warnings of torch's store that tell
nothing of where the name comes from.

**Threads.**  One of its own asks, as the machine's resolver may take long; the caller waits for it
as long as the limits above say, and then leaves it behind.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from lightning_dsgd.transport.contract import Timeout, TransportError

_log: Final = logging.getLogger("lightning_dsgd")

_WARN_AFTER_S: Final = 10.0
_ASK_EVERY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.1
NODE_LISTS: Final = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
"""SLURM's variables with the nodes of a job; its ranks meet on the first of them."""


def first_node(nodes: str) -> str:
    """Returns the first node of SLURM's short list: "a001" of "a[001-003,007],b5"; "" of none."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\](\S*?))?(?:,|$)", nodes)
    return "" if found is None else "".join(part or "" for part in found.groups())


def source_of(host: str, variables: Mapping[str, str] = os.environ) -> str:
    """Returns which variable the name of that machine comes from, as an error tells it."""
    if variables.get("TORCHELASTIC_RUN_ID"):
        return "MASTER_ADDR, which the launcher of the ranks has set"
    for name in NODE_LISTS:
        nodes = variables.get(name, "")
        # Lightning writes this node into MASTER_ADDR, so that variable tells nothing then.
        if nodes and first_node(nodes) == host:
            return f"{name}={nodes}, as the first node"
    if variables.get("MASTER_ADDR") == host:
        return "MASTER_ADDR"
    return "rank 0, as the name of its machine"


def await_name(
    host: str, source: str, within_s: float, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Waits until a name resolves on this machine.

    Args:
        host: the name, or an address
        source: where the name comes from: see `source_of`
        within_s: for how long to wait at most
        is_over: whether to wait no longer; asked ten times a second

    Raises:
        Timeout: if the name has not resolved in that time
        TransportError: if the caller waits no longer
    """
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        asked = _Asked(host)
    else:
        return
    begin, has_warned = time.monotonic(), False
    try:
        while not asked.answered.wait(_LOOK_EVERY_S):
            waited_s = time.monotonic() - begin
            if is_over():
                raise TransportError(f"ended by a signal, before {host} resolved")
            if waited_s > within_s:
                raise Timeout(f"{_trouble(host, source, asked)}; it has not for {within_s:g} s")
            if waited_s > _WARN_AFTER_S and not has_warned:
                has_warned = True
                _log.warning(
                    "%s; it is asked for again, for %g s in all",
                    _trouble(host, source, asked),
                    within_s,
                )
    finally:
        asked.is_left.set()


def _trouble(host: str, source: str, asked: _Asked) -> str:
    return (
        f"the name of the machine where the ranks meet must resolve on {socket.gethostname()}, got "
        f"{host!r} from {source} ({asked.why or 'no answer yet'}); give the name to the cluster's "
        "DNS or to /etc/hosts of every node, or set MASTER_ADDR to an address that all nodes reach"
    )


class _Asked:
    """Asks for a name again and again, in a thread of its own.

    That thread writes why the name does not resolve, and sets `answered` once it does; the thread
    that waits sets `is_left`.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.answered = threading.Event()
        self.is_left = threading.Event()
        self.why = ""
        threading.Thread(target=self._ask, name="dsgd-rendezvous", daemon=True).start()

    def _ask(self) -> None:
        while not self.is_left.is_set():
            try:
                socket.getaddrinfo(self._host, None)
            except OSError as err:
                self.why = str(err)
                self.is_left.wait(_ASK_EVERY_S)
            else:
                self.answered.set()
                return
