"""Collectives that a face is asked for, once this rank has met the others.

Torch's process group carries what this package's network does not.  With `on_loss="continue"` it
would wait for a lost rank: there `elastic.collectives` takes the place of this class.

Threads: the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Collectives:
    """Makes the collectives of a session, none of whose ranks may be lost.

    Args:
        session: the session of this rank
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def broadcast(self, value: Any, src: int, theirs: Callable[[], Any]) -> Any:
        """Returns one rank's value on all ranks.

        Args:
            value: this rank's value
            src: the rank whose value it is to be
            theirs: makes the broadcast by torch's process group
        """
        with self._session.blaming("a broadcast"):
            return theirs()

    def all_gather(
        self, tensor: Tensor, theirs: Callable[[], Tensor], *, group: Any, sync_grads: bool
    ) -> Tensor:
        """Returns every rank's tensor, stacked."""
        with self._session.blaming("an all_gather"):
            return theirs()

    def reduce(self, tensor: Tensor, op: str, theirs: Callable[[], Any], *, group: Any) -> Any:
        """Returns the tensor reduced over all ranks; meets the others by itself."""
        if op in ("mean", "avg", "sum") and group is None:
            return self._session.reduce(tensor, is_mean=op != "sum")
        self._session.meet()
        with self._session.blaming("a reduction"):
            return theirs()

    def decide(self, decision: bool, *, is_of_all: bool) -> bool:
        """Returns whether all ranks vote yes, or any of them; meets the others by itself."""
        votes = int(self._session.reduce(torch.tensor(int(decision)), is_mean=False))
        return votes == self._session.world_size if is_of_all else votes > 0

    def check_in_step(self) -> None:
        """Raises `ValueError` unless all ranks may be asked for a value in the midst of a step."""

    def check_all_there(self, what: str) -> None:
        """Raises where a collective of torch's would wait for lost ranks, once training is over."""
