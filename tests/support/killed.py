"""One of four ranks is killed at a random time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.thorough import times
from tests.support.worlds import FitWorld, Outcome

NUM_RANKS = 4


def kill_after(seconds: float) -> None:
    """Has this process killed so long after now, whatever it does then."""

    def kill() -> None:
        time.sleep(seconds)  # when it is killed is what is tried
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def kill_at_random(
    world: FitWorld, train: Callable[..., Any], name: str, folder: Path, latest_s: float
) -> Iterator[tuple[list[Outcome], list[int], Path]]:
    """Trains with a strategy, once by default; `times` can make it more.

    Args:
        world: of the ranks
        train: `train(name, folder, lost, after_s)`, on each rank
        name: of the strategy
        folder: where each training gets one of its own
        latest_s: how long after its beginning a rank is killed at most

    Yields:
        The ranks' outcomes, who was lost (nobody, if that one was through before) and the folder.
    """
    chance = random.Random(name)
    for number in times(1):
        own = folder / str(number)
        own.mkdir()
        lost, after_s = chance.randrange(NUM_RANKS), chance.uniform(0.0, latest_s)
        outcomes = world.outcomes(NUM_RANKS, train, name, str(own), lost, after_s)
        yield outcomes, [lost] if outcomes[lost].error else [], own
