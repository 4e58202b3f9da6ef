"""What every peer has from Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_dsgd.trainer import seams


class Peer(DDPStrategy):
    """Uses Lightning's launcher and process group, and no wrapper: gradients stay local."""

    def configure_ddp(self) -> None:
        """Does not wrap the model."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        seams.ask_nobody_for_sigterm(trainer)  # Lightning's, for which all wait for rank 0
