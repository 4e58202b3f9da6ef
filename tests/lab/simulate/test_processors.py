"""What processors cost in a simulated world: stories as in `test_stories`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_dsgd.lab.simulate.processors import Costs, SharedProcessors
from tests.simulated.test_stories import MB_S, PAIRS, Row, check


def shared(*args: Any, **kwargs: Any) -> Any:
    return partial(SharedProcessors, Costs(*args, **kwargs))


ADDS = {**MB_S, "processors": shared(cores=1, ranks=1, add_s_per_byte=1e-6, unpack_s_per_byte=2e-6)}
STORIES: dict[str, Row] = {
    "work on a message overlaps with its way": (
        MB_S | {"processors": shared(1, 1, send_s_per_byte=4e-7, receive_s_per_byte=5e-7)},
        ["send 1 1000000; now", "recv 0"],
        [[0.4], [1.0]],
    ),
    "numbers that arrive are added": (
        *(ADDS, ["send 1 1000000 float32", "recv 0 float32"], [[], [2.0]]),
    ),
    "two cores": ({"processors": shared(2, 4)}, ["work 1"] * 4, [[1], [1], [2], [2]]),
    "two machines": ({"processors": shared(1, 2)}, ["work 1"] * 4, [[1], [2], [1], [2]]),
    "a rank that waits for a core sends later": (
        *({"latency_s": 0.25, "processors": shared(1, 4, send_s=1.0)}, PAIRS),
        [[1.0], [0.25], [2.0], [1.25]],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_takes_how_long(story: str) -> None:
    check(*STORIES[story])
