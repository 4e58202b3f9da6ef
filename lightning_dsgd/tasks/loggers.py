"""Loggers of the recipes."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.loggers import WandbLogger


class OfflineWandbLogger(WandbLogger):
    """Lightning's WandbLogger, which writes to `wandb/` and sends nothing unless it is told to.

    The environment variable WANDB_MODE says otherwise: with "online" it sends, with "disabled" it
    does not even write.  (`WandbLogger(offline=True)` itself overwrites that variable.)

    Args:
        project: under which the run stands; checkpoints go to a folder of this name.
        **kwargs: options of WandbLogger, but not `offline`.
    """

    def __init__(self, project: str = "lightning-dsgd", **kwargs: Any) -> None:
        offline = os.environ.get("WANDB_MODE", "offline") in ("offline", "dryrun")
        super().__init__(project=project, offline=offline, **kwargs)
