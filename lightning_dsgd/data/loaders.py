"""Loaders whose batches are dealt: what claims and units need of torch's, private names included.

    source     the user's loader
    twin       a loader of the same class, data set and workers, with a sampler of ours
    stand-in   what a loop reads in the place of the source: our epochs, and our length

A sampler of ours says what the twin loads next.  A worker that asked for a batch when there was
none is told of one later: `load_more`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def has_indices(loader: object) -> bool:
    """Returns whether a loader's batches are known before they are read: a stream's are not."""
    source = loader.source if isinstance(loader, StandIn) else loader
    return isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset)


def described(loader: Any) -> str:
    """Returns what errors and notices call a loader: its class, and the class of its data set."""
    name = type(loader).__name__
    dataset = getattr(loader, "dataset", None)
    return name if dataset is None else f"{name} of {type(dataset).__name__}"


def sampler_of(loader: Any) -> Any:
    """Returns what a loader takes the indices of its batches from, one batch after the other."""
    return loader._index_sampler


def twin(loader: Any, sampler: Iterable[object]) -> Any:
    """Returns a loader like this one, with workers of its own, that takes its batches from another.

    Args:
        loader: a loader of which `has_indices` is true
        sampler: what its batches' indices are taken from
    """
    other = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(other)[name] = sampler  # which a loader refuses to have set
    other._iterator = None  # workers that live on are those of the loader
    return other


def end_workers(other: Any) -> None:
    """Ends the workers of a twin that live on from epoch to epoch.

    Else they would end where the interpreter finds that nobody needs them, in any thread, which
    then waits some seconds for each.
    """
    other._iterator = None


def load_more(batches: Any) -> None:
    """Has workers load one more batch; what a loader's `iter` has returned knows them."""
    if not hasattr(batches, "_try_put_index"):
        raise ValueError(
            "where ranks deal its batches a loader with workers must iterate as torch's DataLoader "
            f"does, got one whose __iter__ returns a {type(batches).__name__}; leave __iter__ out "
            "or use num_workers=0"
        )
    batches._try_put_index()


class StandIn(ABC):
    """Is read in the place of a user's loader; what is not asked of it is asked of that one.

    Attributes:
        source: the user's loader
    """

    source: Any

    def __init__(self, source: Any) -> None:
        # Of a training before: Lightning keeps the loaders that it has prepared.
        self.source = source.source if isinstance(source, StandIn) else source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def worker_init_fn(self) -> Any:
        """How a worker begins; Lightning gives loaders one, by which workers are seeded."""
        return self.source.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, init: Any) -> None:
        self.source.worker_init_fn = init

    @abstractmethod
    def __len__(self) -> int:
        """Returns how many batches of an epoch a loop counts."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch."""
