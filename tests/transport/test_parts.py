"""Gathers and exchanges of parts by torch's own collectives, over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.parts import Parts
from tests.support.worlds import NativeWorld
from tests.transport.helpers import died

WORLD = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=60.0)


def sent_by_gloo(net: Any) -> int:
    return int(net.counters.sent["gloo"].bytes) if "gloo" in net.counters.sent else 0


def exchange_parts(net: Any) -> list[list[float]]:
    """Parts of 0, 1, 2, ... elements, and of none at all; gloo sends them."""
    me, size = net.rank, net.world_size
    from_each, to_each = [rank * me for rank in range(size)], [me * rank for rank in range(size)]
    found, before = [], sent_by_gloo(net)
    for is_empty in (False, True):
        lengths = [[0] * size] * 2 if is_empty else [from_each, to_each]
        x, into = torch.full((sum(lengths[1]),), float(me)), torch.empty(sum(lengths[0]))
        work = net.all_to_all(into, x, *lengths)
        gather = net.gather_into(torch.empty(size), torch.tensor([float(me)]), [1] * size)
        assert isinstance(work, Parts)
        assert isinstance(gather, Parts)
        found.append([*work.wait().tolist(), *gather.wait().tolist()])
    expected = sum(to_each) - me * me + 2 * (size - 1)
    assert sent_by_gloo(net) - before == 4 * expected
    with pytest.raises(TransportError, match=r"has \d of torch.float32 to gather"):
        net.gather_into(torch.empty(3 + me % 2), torch.ones(1), [1, 1, 1 + me % 2]).wait()
    net.sub("end").barrier().wait()
    if me == 2:
        died(2)
    with pytest.raises(PeerLost, match="rank 2 died"):
        net.all_to_all(torch.empty(3), torch.empty(3), [1] * 3, [1] * 3).wait()
    return found


def test_parts_are_gathered_and_exchanged_and_a_lost_rank_ends_the_wait() -> None:
    for rank, found in enumerate(WORLD.outcomes(3, exchange_parts)[:2]):
        gathered = [0.0, 1.0, 2.0]
        assert found.result == [[float(r) for r in range(3) for _ in range(r * rank)] + gathered,
                                gathered], found.error  # fmt: skip
