"""Waits of a rank for its own device, so that the other ranks need not wait for it.

A step counts once the device has made it, and not when the host has queued it: a rank that is told
of a step takes no part in a sum that would have to wait for a slow kernel.

A training thread that waits for its group's answer waits for its own step first, which costs
nothing; one that does not wait tells its lane by `Lane.tell`, and goes on.  On the CPU a step is
made once it is queued.
"""

from __future__ import annotations

from torch import Tensor

from lightning_dsgd.devices import Mark, port_of, until
from lightning_dsgd.transport import Timeout, Transport


def await_mark(net: Transport, mark: Mark) -> None:
    """Waits until the device has come to a mark; the wait ends as one for a message does.

    Raises:
        PeerLost: if a rank is lost meanwhile
        Timeout: after the network's `timeout_s`
    """
    if not until(mark.has_passed, net.timeout_s, net.check):
        raise Timeout(
            f"rank {net.rank} has waited {net.timeout_s:g} s for its own device to make a step"
        )


def await_step(net: Transport, x: Tensor) -> None:
    """Waits until the device has done all that this thread has queued for x."""
    await_mark(net, port_of(x.device).mark())
