"""The callback of Lightning's Trainer in a watched job: it adds a `StepTrace` under DDP and FSDP.

Lightning asks entry points of `lightning.pytorch.callbacks_factory` for callbacks.  Ours is that
of the distribution beside this package, which is on the path of a watched job alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_dsgd_rank import entering
from lightning_dsgd_rank.loops import are_wanted
from lightning_dsgd_rank.recorder import FOLDER

_IN_SHARDS = ("ModelParallelStrategy", "FSDPStrategy")


def callbacks() -> list[Any]:
    """Returns what Lightning adds to a Trainer's callbacks."""
    if not are_wanted():
        return []
    try:
        from lightning.pytorch import Callback

        from lightning_dsgd import StepTrace
        from lightning_dsgd.lab.timeline.shards import ON_DEVICES
    except ImportError:  # the job's environment has no such package
        return []

    steps = Path(os.environ[FOLDER], "steps")

    class Watched(StepTrace):
        """Records no step, and tells why, where a `StepTrace` of the user's own would refuse."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            try:
                super().on_train_start(trainer, pl_module)
            except ValueError as error:
                entering.tell_of_steps(str(error))
                self.teardown(trainer, pl_module, "fit")
                # The Trainer is going through its list of callbacks, and gets another one.
                trainer.callbacks = [each for each in trainer.callbacks if each is not self]

    class Enters(Callback):
        """Adds a `StepTrace` when a fit begins whose steps it can see, and that has none."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            has_one = any(isinstance(each, StepTrace) for each in trainer.callbacks)
            strategy, device = type(trainer.strategy).__name__, trainer.strategy.root_device
            if strategy in _IN_SHARDS and device.type != "cpu":
                entering.tell_of_steps(f"{ON_DEVICES}, got {strategy} on {device}")
            elif stage == "fit" and strategy in ("DDPStrategy", *_IN_SHARDS) and not has_one:
                # The Trainer is calling `setup` of one callback after another, and so comes to it.
                trainer.callbacks.append(Watched(steps))

    return [Enters()]
