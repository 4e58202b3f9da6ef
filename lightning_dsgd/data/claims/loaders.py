"""Loaders whose batches are claimed: torch's own loaders, with a sampler that claims.

Each rank draws all batches of an epoch in one order, from the loader's own sampler.  `ClaimSampler`
stands in that sampler's place, in a twin of the loader: when the twin wants a batch to load, it
claims one.  So a loader with workers has claimed as many batches ahead as these load ahead, and one
without workers one.  `ClaimedLoader` is what a loop reads: it begins a batch where the loop takes
it, and skips a batch that was given back after workers had loaded it.

The loaders of one `CombinedLoader` go together: what is claimed is the place in the epoch, from
which each loader has its batch.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_dsgd.data.claims.claiming import Claiming
from lightning_dsgd.data.claims.claims import NONE
from lightning_dsgd.data.loaders import (
    StandIn,
    described,
    end_workers,
    load_more,
    sampler_of,
    twin,
)


class Handed(NamedTuple):
    """A batch that was handed to the loader.

    Attributes:
        position: of its portion, among all that this rank has claimed
        number: its number in the portion
        indices: what the loader loads; None: of several loaders, this one has no batch there
    """

    position: int
    number: int
    indices: object


class ClaimSampler:
    """Yields the indices of the batches that this rank claims, as far ahead as a loader asks.

    Attributes:
        handed: the batches that the loop has not come to, in the order in which the loader has them

    Args:
        claiming: this rank's claims
    """

    def __init__(self, claiming: Claiming) -> None:
        self._claiming = claiming
        self._drawn: Sequence[object] = ()
        self._given = NONE  # the position that the loop has come to
        self._cursor = 0  # the position that is claimed next
        self._rest: deque[Handed] = deque()  # of a portion that is claimed
        self.handed: deque[Handed] = deque()

    def begin_epoch(self, drawn: Sequence[object]) -> None:
        """Begins with all batches of an epoch."""
        self._drawn, self._given = drawn, NONE

    def go_on(self) -> None:
        """Goes on behind the batch that the loop has come to, with a loader that has no batch."""
        self._cursor = self._given + 1
        self._rest.clear()
        self.handed.clear()

    def has_next(self) -> bool:
        """Returns whether there is a batch for the loop; waits for one."""
        claiming = self._claiming
        while not (self.handed or self._rest):
            if not claiming.secure(self._cursor, is_urgent=True):
                return False
            if claiming.dealing.portion(self._cursor) != NONE:
                break
            self._cursor += 1
        return True

    def take(self) -> Handed:
        """Returns the batch that the loop comes to."""
        handed = self.handed.popleft()
        self._given = handed.position
        return handed

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        while True:
            while self._rest:
                self.handed.append(self._rest.popleft())
                if self.handed[-1].indices is not None:
                    return self.handed[-1].indices
            if not self._claiming.secure(self._cursor, is_urgent=False):
                raise StopIteration
            self._rest.extend(self._batches_at(self._cursor))
            self._cursor += 1

    def _batches_at(self, position: int) -> Iterator[Handed]:
        claiming, drawn = self._claiming, self._drawn
        portion = claiming.dealing.portion(position)
        for number, place in enumerate(claiming.places(portion) if portion != NONE else ()):
            has_one = place < len(drawn) or claiming.cycles
            yield Handed(position, number, drawn[place % len(drawn)] if has_one else None)


class ClaimedLoader(StandIn):
    """Yields the batches that this rank claims; a stand-in for a user's loader.

    Args:
        source: a loader of which `data.loaders.has_indices` is true
        claiming: this rank's claims
        begin: has these begin the epoch, or go on with it; called before the first batch
    """

    def __init__(self, source: Any, claiming: Claiming, begin: Callable[[ClaimedLoader], None]):
        check(source)
        super().__init__(source)
        self._claiming, self._begin = claiming, begin
        self._sampler = ClaimSampler(claiming)
        self._twin: Any = None

    def __len__(self) -> int:
        return self._claiming.nominal(len(sampler_of(self.source)))

    def close(self) -> None:
        """Ends workers that live on from epoch to epoch."""
        if self._twin is not None:
            end_workers(self._twin)

    def draw(self, seed: int) -> Sequence[object]:
        """Returns the indices of an epoch's batches, the same on all ranks with alike samplers.

        Args:
            seed: of torch's, Python's and NumPy's global generators, for samplers that draw from
                these; afterwards they are as before
        """
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            drawn = list(sampler_of(self.source))
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
        self._sampler.begin_epoch(drawn)
        return drawn

    def __iter__(self) -> Iterator[Any]:
        self._begin(self)
        sampler = self._sampler
        sampler.go_on()
        batches: Iterator[Any] | None = None
        loaded: deque[Any] = deque()
        while sampler.has_next():
            if batches is None:
                batches = iter(self._twin_of_source())  # workers begin to load ahead
            if not sampler.handed:
                if self.source.num_workers:
                    load_more(batches)
                else:
                    with contextlib.suppress(StopIteration):  # a portion was given back just now
                        loaded.append(next(batches))
                if not sampler.handed:
                    continue
            handed = sampler.take()
            batch = None
            if handed.indices is not None:
                batch = loaded.popleft() if loaded else next(batches)
            if self._claiming.begin(handed.position, handed.number):
                yield batch

    def _twin_of_source(self) -> Any:
        """Returns the loader whose sampler claims; with workers that live on, always the same."""
        if self._twin is None:
            self._twin = twin(self.source, self._sampler)
        return self._twin


def notice_of_stream(loader: Any) -> str:
    """Returns what a user is told of a loader whose batches nobody can claim."""
    return (
        f'data="claimed" leaves {described(loader)} as it is: only the batches of a DataLoader of '
        "a dataset with indices can be claimed; each rank reads what its own loader gives"
    )


def check(loader: Any) -> None:
    """Raises for a loader whose batches cannot be claimed as it is."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            'with data="claimed" a loader must have all batches of an epoch, got one with a '
            f"DistributedSampler for {sampler.num_replicas} ranks; leave the sampler out (in "
            "Fabric: fabric.setup_dataloaders(loader, use_distributed_sampler=False))"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            'with data="claimed" a loader must give its batches in order, got in_order=False; '
            "leave it out"
        )
    if hasattr(loader, "state_dict"):
        raise ValueError(
            'with data="claimed" a loader must not save its place itself, as the claims are saved, '
            f"got {type(loader).__name__} with state_dict; use torch.utils.data.DataLoader"
        )
