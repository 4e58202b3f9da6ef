"""Simulated worlds that cannot be."""

from __future__ import annotations

import pytest

from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.simulated import SimulatedWorld


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"world_size": 2, "latency_s": -1.0}, "got latency_s=-1.0"),
        ({"world_size": 2, "bandwidth_bytes_s": 0.0}, "bandwidth_bytes_s=0.0"),
    ],
)
def test_worlds_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        SimulatedWorld(**arguments)


def test_faults_that_cannot_be():
    with pytest.raises(
        ValueError, match=r"rank of 0 to 1 at 0 s or later, got rank=2 and at_s=1.0"
    ):
        SimulatedWorld(2).kill(2, 1.0)


def test_a_world_that_does_not_go_on_says_how_to():
    def fn(net):
        with pytest.raises(TransportError, match=r"got on_loss=.continue.; use transport="):
            net.views.survive(None)

    SimulatedWorld(1).run(fn)
