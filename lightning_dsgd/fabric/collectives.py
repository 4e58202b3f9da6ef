"""Fabric's collectives: this rank first serves those that still train, and then waits for all.

Barriers, sums and means travel on our network.  With `on_loss="end"` torch's process group carries
the others; with `on_loss="continue"` that would wait for lost ranks, so our network does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from lightning_dsgd.plain.loop import Loop
from lightning_dsgd.plain.steps import failing
from lightning_dsgd.session.under_way import Training
from lightning_dsgd.trainer.launched import LaunchedMixin
from lightning_dsgd.trainer.sessions import LaunchedSession

_EACH_STEP: Final = 3
"""The number of reductions, after one step each, after which a user is told what they cost."""


class FabricSession(LaunchedSession[Training]):
    """A session whose first rank logs."""

    def become_first(self) -> None:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]


class CollectivesMixin(LaunchedMixin):
    """Makes the collectives of a strategy; the head of the file tells how."""

    session: FabricSession
    _loop: Loop
    _num_reduced_steps = _num_in_a_row = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train; with `on_loss="continue"`, the ranks that are left."""
        return self.session.ranks.members

    def _meet_all(self, what: str) -> None:
        self.session.check_process()
        self._loop.meet_all(what)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.session.ranks.check_stays()
        if self.session.is_open:
            self._meet_all("barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self.session.is_open:
            self.session.ranks.collectives.check_all_there("broadcast")
            return super().broadcast(obj, src)
        self._meet_all("broadcast")
        theirs = partial(super().broadcast, obj, src)
        with failing(self.session):
            return self.session.ranks.collectives.broadcast(obj, src, theirs)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        if not self.session.is_open:
            self.session.ranks.collectives.check_all_there("all_gather")
            return super().all_gather(tensor, group, sync_grads)
        self._meet_all("all_gather")
        theirs = partial(super().all_gather, tensor, group, sync_grads)
        with failing(self.session):
            return self.session.ranks.collectives.all_gather(
                tensor, theirs, group=group, sync_grads=sync_grads
            )

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not self.session.is_open:
            self.session.ranks.collectives.check_all_there("all_reduce")
            return super().all_reduce(tensor, group, reduce_op)
        self._warn_of_reductions()
        self._meet_all("all_reduce")
        op = getattr(reduce_op, "name", str(reduce_op)).lower()
        theirs = partial(super().all_reduce, tensor, group, reduce_op)
        with failing(self.session):
            return self.session.ranks.collectives.reduce(tensor, op, theirs, group=group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.session.is_open:
            self._meet_all("all_reduce")
            with failing(self.session):
                return self.session.ranks.collectives.decide(decision, is_of_all=all)
        votes = int(self.all_reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0

    def _warn_of_reductions(self) -> None:
        """Warns once where all ranks wait for each other after every step."""
        has_stepped_once = self._loop.num_steps == self._num_reduced_steps + 1
        if has_stepped_once:
            self._num_in_a_row += 1
        elif self._loop.num_steps != self._num_reduced_steps:
            self._num_in_a_row = 0
        self._num_reduced_steps = self._loop.num_steps
        if (
            self._num_in_a_row == _EACH_STEP
            and not self.algorithm.traits.lockstep
            and has_stepped_once
        ):
            rank_zero_warn(
                f'strategy="{self.algorithm.name}" does not wait for all ranks in every step, but '
                "fabric.all_reduce does, and it was called after each; call it once an epoch, or "
                "log each rank's own value"
            )
