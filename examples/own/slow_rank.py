"""Makes the last rank slow, to see what a strategy makes of it; not for a training of your own."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class SlowRank(L.Callback):
    """Sleeps before each batch of the last rank.

    Args:
        seconds: how long
    """

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(self.seconds)
