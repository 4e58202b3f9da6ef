"""The callback of Lightning's Trainer in a watched job: it adds a `StepTrace` under plain DDP.

Lightning asks entry points of `lightning.pytorch.callbacks_factory` for callbacks.  Ours is that
of the distribution beside this package, which is on the path of a watched job alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FOLDER = "LIGHTNING_DSGD_TRACE"
STEPS = "LIGHTNING_DSGD_TRACE_STEPS"
"""Is set where steps are to be recorded too; all ranks have it, or none."""


def callbacks() -> list[Any]:
    """Returns what Lightning adds to a Trainer's callbacks."""
    folder = os.environ.get(FOLDER)
    if not folder or not os.environ.get(STEPS):
        return []
    try:
        from lightning.pytorch import Callback

        from lightning_dsgd import StepTrace
    except ImportError:  # the job's environment has no such package
        return []

    steps = Path(folder, "steps")

    class Enters(Callback):
        """Adds a `StepTrace` when a fit begins whose steps it can see, and that has none."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            has_one = any(isinstance(each, StepTrace) for each in trainer.callbacks)
            if stage == "fit" and type(trainer.strategy).__name__ == "DDPStrategy" and not has_one:
                # The Trainer is calling `setup` of one callback after another, and so comes to it.
                trainer.callbacks.append(StepTrace(steps))

    return [Enters()]
