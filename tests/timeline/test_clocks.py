"""Ranks under several kernels find the difference of their clocks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dsgd.timeline.clocks import boot_id, offset_to_rank_0
from lightning_dsgd.transport.simulated import SimulatedWorld

AHEAD_S = (0.0, 0.0, 5.0, -7.0)


def offset(net: Any) -> float:
    kernel = "one" if net.rank < 2 else f"that of {net.rank}"
    return offset_to_rank_0(net, kernel, lambda: net.now() + AHEAD_S[net.rank])


def test_clocks_are_compared_through_the_network() -> None:
    offsets = SimulatedWorld(4, latency_s=1e-3).run(offset)
    assert offsets == pytest.approx([-ahead_s for ahead_s in AHEAD_S])
    assert offsets[1] == 0.0


def test_ranks_of_one_kernel_share_a_clock() -> None:
    assert boot_id() == boot_id() != ""
    assert SimulatedWorld(3, latency_s=1e-3).run(offset_to_rank_0) == [0.0] * 3
