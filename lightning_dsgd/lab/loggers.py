"""Loggers of the recipes."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from lightning.pytorch.loggers import WandbLogger


class OfflineWandbLogger(WandbLogger):
    """Lightning's WandbLogger, which writes to `wandb/` and sends nothing unless it is told to.

    An agent of a sweep tells it to: the runs that an agent starts are online.  The environment
    variable WANDB_MODE comes first: with "online" it sends, with "disabled" it does not even write.
    (`WandbLogger(offline=True)` itself overwrites that variable.)

    Args:
        project: under which the run stands; checkpoints go to a folder of this name.
        **kwargs: options of WandbLogger, but not `offline`.
    """

    def __init__(self, project: str = "lightning-dsgd", **kwargs: Any) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(
                "OfflineWandbLogger needs the package wandb, which is not installed; install it "
                "(pip install 'lightning-dsgd[wandb]'), or use CSVLogger"
            )
        by_default = "online" if os.environ.get("WANDB_SWEEP_ID") else "offline"
        offline = os.environ.get("WANDB_MODE", by_default) in ("offline", "dryrun")
        super().__init__(project=project, offline=offline, **kwargs)
