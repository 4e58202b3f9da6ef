"""Who watches a rank is told of its waits, of its lanes' too, and of its exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.transport.simulated import SimulatedWorld
from lightning_dsgd.transport.watch import exchanging
from tests.support.worlds import ProcessWorld


class Notes:
    def __init__(self) -> None:
        self.waits: list[tuple[int, bool]] = []
        self.exchanges: list[float] = []

    def waited(self, begin_s: float, end_s: float, src: int, *, in_lane: bool) -> None:
        assert end_s > begin_s
        self.waits.append((src, in_lane))

    def exchanged(self, begin_s: float, end_s: float) -> None:
        self.exchanges.append(end_s - begin_s)


def be_watched(net: Any) -> tuple[list[tuple[int, bool]], int]:
    """Rank 0 waits for a message of rank 1, and so does its lane."""
    x = torch.zeros(1)
    net.counters.watch = notes = Notes()

    if net.rank == 0:
        lane = net.spawn_lane(lambda lane: lane.recv(x, 1).wait(), "unused")
        net.send(x, 1, tag=1)
        with exchanging(notes, net.now):
            net.recv(x, 1, tag=2).wait()
        lane.join()
    else:
        lane = net.spawn_lane(lambda lane: None, "unused")
        net.recv(x, 0, tag=1).wait()
        net.send(x, 0, tag=2)
        lane.net.send(x, 0)
        lane.join()
    return sorted(notes.waits), len(notes.exchanges)


@pytest.mark.parametrize("world", [SimulatedWorld(2, latency_s=1e-3), ProcessWorld()])
def test_waits_are_told_with_the_rank_they_were_for(world: Any) -> None:
    is_simulated = isinstance(world, SimulatedWorld)
    first, second = world.run(be_watched) if is_simulated else world.run(2, be_watched)
    if is_simulated:  # between processes a message may be there before it is waited for
        assert first == ([(1, False), (1, True)], 1)
        assert second == ([(0, False)], 0)
    assert first[1] == 1
    assert set(first[0]) <= {(1, False), (1, True)}
    assert set(second[0]) <= {(0, False)}
