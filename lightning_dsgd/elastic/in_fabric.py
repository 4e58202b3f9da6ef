"""How the ranks of a loop in Fabric change: the first member logs."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_dsgd.elastic.changes import ChangingSession
from lightning_dsgd.session.session import Training
from lightning_dsgd.trainer.training import LaunchedSession
from lightning_dsgd.transport.view import View


class ChangingFabricSession(ChangingSession[Training], LaunchedSession[Training]):
    """A session that goes on where a rank is lost; its first rank logs."""

    def _begun_anew(self, view: View, lost: list[int]) -> None:
        if self.is_first:
            rank_zero_only.rank = 0  # type: ignore[attr-defined]
