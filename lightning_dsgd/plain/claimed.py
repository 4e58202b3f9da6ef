"""Claimed batches in loops that their users write: an epoch is one `for` over `batches(loader)`.

All ranks come to the end of the `for`, and the epoch is over once all are there.  If a rank is lost
until then, the others go on with what it has left.  A loop may leave its `for` early, but then all
ranks' must: the next `for` is the next epoch, and an error says which ranks are in which.  No rank
begins that epoch before all have left the last one, as the dealer deals one epoch at a time.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from lightning_dsgd.data.claims.claiming import Claiming, Saved
from lightning_dsgd.data.claims.loaders import ClaimedLoader, notice_of_stream
from lightning_dsgd.data.loaders import has_indices, sampler_of, twin
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.under_way import Training

_log: Final = logging.getLogger("lightning_dsgd")

T = TypeVar("T")


class LoopSaved(Saved):
    """What a checkpoint holds, and how far the loop is: see `LoopClaiming.save`."""

    counts: list[int]


class LoopClaiming(Claiming):
    """Leads one rank through its epochs.

    Args:
        session: the session of this rank
    """

    _session: Session[Training]

    def __init__(self, session: Session[Training]) -> None:
        super().__init__(session, session.world_size)
        self._number, self._is_over = -1, True
        self._goes_on = False
        """Whether a checkpoint was saved within the epoch of this number."""
        self._batches_before = 0
        self._seed: int | None = None
        self._stand_ins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """By the user's loader, which alone keeps its stand-in, and workers, alive."""
        self._num_begun = 0
        """How many times a loop has begun to read, or to go on with, an epoch."""

    def of(self, loader: Iterable[T], meet: Callable[[str], None]) -> Iterable[T]:
        """Returns what is to be read in place of a loader; a stream keeps its own split.

        Args:
            loader: a DataLoader, or Fabric's, which wraps one
            meet: waits until all ranks are there, for a purpose that is the same on all
        """
        inner = getattr(loader, "_dataloader", loader)
        if not has_indices(inner):
            if self._session.ranks.is_first:
                _log.warning(notice_of_stream(inner))
            return loader
        if loader not in self._stand_ins:
            # Of a twin: a stand-in of the loader itself would keep its own key alive.
            stand_in: Any = ClaimedLoader(twin(inner, sampler_of(inner)), self, self._begin)
            if inner is not loader:
                outer: Any = copy.copy(loader)
                outer._dataloader = stand_in
                stand_in = outer
            self._stand_ins[loader] = stand_in
        return _Epoch(self, self._stand_ins[loader], meet)

    @property
    def nominal_batches(self) -> int:
        """How many batches each rank had made before this one, if all made as many."""
        now = self.nominal_before(self.portion) if self.portion >= 0 else 0
        return self._batches_before + (self.nominal(self.num_batches) if self._is_over else now)

    def begin_next(self, meet: Callable[[str], None]) -> int:
        """Begins the next epoch, or goes on with the one that a checkpoint was saved in.

        Returns:
            The number of this call, for `check_newest`.
        """
        session = self._session
        session.begin_training()
        if not self._is_over and not self._goes_on:
            meet("the next epoch, as the last one was left early")
        if self._seed is None:
            mine = os.environ.get("PL_GLOBAL_SEED") or str(torch.initial_seed() % (1 << 32))
            self._seed = int(session.text_of_rank_0(mine))
        if not self._goes_on:
            self._batches_before += self.nominal(self.num_batches)
            self._number += 1
        self._goes_on = self._is_over = False
        self._num_begun += 1
        return self._num_begun

    def check_newest(self, number: int) -> None:
        """Raises where a loop asks for more of an epoch, and has begun another one meanwhile."""
        if number != self._num_begun:
            raise ValueError(
                'with data="claimed" one loader must be read at a time, got a second one that was '
                "begun meanwhile, as by zip(replica.batches(a), replica.batches(b)); read one "
                "DataLoader of a torch.utils.data.StackDataset of both datasets, or use "
                'data="equal"'
            )

    def _begin(self, loader: ClaimedLoader) -> None:
        assert self._seed is not None
        self.begin_epoch(self._number, [loader], seed=self._seed)

    def has_left(self) -> bool:
        """Returns whether a lost rank has left something, where all have come to the end."""
        num_left, _ = self.left(has_stopped=False)
        self._is_over = not num_left
        return bool(num_left)

    # ---- checkpoints ----

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds the claims to a checkpoint; all ranks call it."""
        if self._number >= 0:
            before = self._batches_before + self._is_over * self.nominal(self.num_batches)
            counts = [self._number, int(self._is_over), before, self._seed or 0]
            saved: LoopSaved = {**self.state(), "counts": counts}
            checkpoint[record.CLAIMS] = saved

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with the claims in a checkpoint, and removes them from it."""
        state: LoopSaved | None = checkpoint.pop(record.CLAIMS, None)
        if state is not None:
            self._number, is_over, self._batches_before, self._seed = state["counts"]
            self._is_over, self._goes_on = bool(is_over), not is_over
            self.load_state(state)


class _Epoch(Generic[T]):
    """What a loop reads in one epoch.

    Args:
        claiming: this rank's claims
        loader: the claimed loader
        meet: waits until all ranks are there
    """

    def __init__(
        self, claiming: LoopClaiming, loader: Iterable[T], meet: Callable[[str], None]
    ) -> None:
        self._claiming, self._loader, self._meet = claiming, loader, meet

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        claiming = self._claiming
        number = claiming.begin_next(self._meet)
        while True:
            for batch in self._loader:
                yield batch
                claiming.check_newest(number)
            self._meet("the end of an epoch")
            if not claiming.has_left():
                return
