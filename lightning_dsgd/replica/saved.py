"""What a checkpoint has of a replica's parts, until the same parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dsgd.replica.part import Part, some


class Saved:
    """Gives each part what was saved of it, once.

    Attributes:
        waits: whether the parts have not been given what was saved

    Args:
        states: what the parts' `state_dict` returned
        names: the names of each part's parameters
        updates: what was known of all ranks' updates; None: nothing
    """

    def __init__(
        self,
        states: Sequence[dict[str, Any]] = (),
        names: Sequence[Sequence[str]] = (),
        updates: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        given = [None] * len(states) if updates is None else updates
        self.waits = bool(states)
        self._rest = list(zip(states, names, given, strict=True))

    def fits(self, parts: Sequence[Part]) -> bool:
        """Returns whether these parts train the same parameters."""
        return [list(names) for _, names, _ in self._rest] == [p.weights.names for p in parts]

    def give(self, parts: Sequence[Part]) -> None:
        """Gives these parts what was saved; raises `ValueError` unless it fits."""
        if not self.fits(parts):
            saved = {name for _, names, _ in self._rest for name in names}
            trained = {name for part in parts for name in part.weights.names}
            if saved == trained:
                raise ValueError(
                    "parameters must be laid out as when the checkpoint was saved, got another "
                    "order; set optimizers, fragments and num_fragments as they were, or remove "
                    "its folder of replicas to go on from the consensus"
                )
            raise ValueError(
                "the parameters that are trained must be those of the checkpoint, got "
                f"{some(sorted(trained - saved))} not in it, and not "
                f"{some(sorted(saved - trained))}, which are; "
                "freeze and unfreeze before fit as when it was saved, or remove its folder of "
                "replicas to go on from the consensus"
            )
        self.waits = False
        for part, (state, _, updates) in zip(parts, self._rest, strict=True):
            part.load_state_dict(state)
            part.kept.load(updates, part.x)
