"""A rank's wait for its own device ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dsgd.primitives.own_device import await_mark
from lightning_dsgd.transport import PeerLost, Timeout


def test_a_wait_for_the_own_device_ends_as_one_for_a_message_does() -> None:
    never: Any = SimpleNamespace(has_passed=lambda: False)
    net: Any = SimpleNamespace(rank=3, timeout_s=0.05, check=lambda: None)
    with pytest.raises(Timeout, match=r"rank 3 has waited 0.05 s for its own device"):
        await_mark(net, never)

    def lose() -> None:
        raise PeerLost(1, "it died")

    net.check, net.timeout_s = lose, 60.0
    with pytest.raises(PeerLost):
        await_mark(net, never)
