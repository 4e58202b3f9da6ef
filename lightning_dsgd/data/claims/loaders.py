"""Loaders whose batches are claimed: torch's own loaders, with other batches in them.

    loader = claimed(loader, data)        a twin of a DataLoader; its class, dataset, workers stay

Each rank draws all batches of an epoch in one order, from the loader's own sampler, and the loader
is given those that this rank claims.  `_Batches` stands around the loader's own iterator: it begins
a batch where the loop takes it, and skips a batch that was given back after workers had loaded it.
A loader without workers has one batch claimed ahead; one with workers as many as these load ahead.

The loaders of one `CombinedLoader` go together: what is claimed is the place in the epoch, from
which each loader has its batch.

Two private names of torch's stand here: `_index_sampler`, what a loader takes its batches from, and
`_try_put_index`, which gives workers another batch to load where they had run out of them.
"""

from __future__ import annotations

import contextlib
import copy
import random
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_dsgd.data.claims.claims import NONE, Claims, Epoch
from lightning_dsgd.data.claims.dealing import Dealing
from lightning_dsgd.session.session import Session
from lightning_dsgd.transport import Transport

_ENDED: Final = Epoch()

T = TypeVar("T")


class ClaimedData:
    """What one rank trains on, batch by batch, in one training.

    Attributes:
        num_ranks: the number of ranks by which nominal lengths count; it stays the same
        num_batches: how many batches the epoch has, of all ranks
        unit_size: how many batches are claimed together

    Args:
        session: the session of this rank
        num_ranks: how many ranks there are at the start
        is_newcomer: whether this rank comes to others that train
    """

    def __init__(self, session: Session[Any], num_ranks: int, *, is_newcomer: bool = False) -> None:
        self._session = session
        self._is_newcomer = is_newcomer
        self.num_ranks = num_ranks
        self.num_batches = 0
        self.unit_size = 1
        self._epoch = _ENDED
        self._lists: dict[int, Sequence[Any]] = {}
        self._given: dict[int, int] = {}  # by loader: the position of its last batch
        self._cycles = True
        self._at = (NONE, NONE)  # the batch in hand: its position, and its number in the unit
        self._dealing: Dealing | None = None

    # ---- the network ----

    def open(self, net: Transport) -> None:
        """Begins to claim over a network of all ranks, or goes on in a view with other members."""
        if self._dealing is not None:
            self._dealing = self._dealing.in_view(net)
        else:
            claims = Claims(net.rank, net.world_size) if self._is_newcomer else None
            self._dealing = Dealing(net, claims)

    def close(self) -> None:
        """Ends the lane."""
        if self._dealing is not None:
            self._dealing.close()

    @property
    def dealing(self) -> Dealing:
        """This rank's end of the claims."""
        assert self._dealing is not None, "claims are open while a training is"
        return self._dealing

    def _step(self, call: Callable[[], T]) -> T:
        """Returns what a step of this rank returns, made again where the view changes."""
        made: list[T] = []
        self._session.ranks.step(lambda: made.append(call()), again=True)
        return made[-1]

    # ---- an epoch ----

    def begin_epoch(
        self,
        number: int,
        loaders: Sequence[Any],
        *,
        seed: int,
        shortest: bool = False,
        cycles: bool = True,
        limit: float = float("inf"),
        unit_size: int = 1,
    ) -> None:
        """Begins an epoch, unless it is under way.

        Args:
            number: the epoch's number
            loaders: the loaders that are read together
            seed: for samplers that draw from torch's, Python's or NumPy's global generator
            shortest: whether the shortest loader ends the epoch, not the longest
            cycles: whether a shorter loader begins again
            limit: the most batches that the epoch may have
            unit_size: how many batches are claimed together
        """
        if self._epoch.number == number:
            return
        self._lists = {id(loader): _drawn(loader, seed + number) for loader in loaders}
        lengths = [len(batches) for batches in self._lists.values()]
        self.num_batches = int(min(min(lengths) if shortest else max(lengths), limit))
        self.unit_size, self._cycles, self._at = unit_size, cycles, (NONE, NONE)
        self._given = dict.fromkeys(self._lists, NONE)
        num_units = -(-self.num_batches // unit_size)
        checksum = zlib.crc32(repr(list(self._lists.values())).encode())
        self._epoch = Epoch(number, num_units, checksum)
        self._step(lambda: self.dealing.begin_epoch(self._epoch))

    def next_unit(self) -> int:
        """Returns the unit that this rank trains on next, for which it may wait; or NONE."""
        position = self.dealing.num_begun
        while self.secure(position, is_urgent=True):
            unit = self.dealing.unit(position)
            if unit != NONE:
                return unit
            position += 1
        return NONE

    def secure(self, position: int, *, is_urgent: bool) -> bool:
        """Claims until there is a unit at a position; see `Dealing.secure`."""
        return self._step(lambda: self.dealing.secure(position, is_urgent=is_urgent))

    def begin(self, position: int, number: int) -> bool:
        """Begins a batch of a unit, unless that was given back."""
        has_begun = self._step(lambda: self.dealing.begin(position))
        if has_begun:
            self._at = position, number
        return has_begun

    def end_batch(self) -> None:
        """Notes that the batch in hand is over."""
        if self._at[0] != NONE and self.is_unit_over:
            self.dealing.end()

    def batches(self, loader: Any, unit: int) -> Iterator[Any]:
        """Yields a loader's batches of a unit; None where a shorter loader has none."""
        mine = self._lists[id(loader)]
        first = unit * self.unit_size
        for place in range(first, min(first + self.unit_size, self.num_batches)):
            has_one = place < len(mine) or self._cycles
            yield mine[place % len(mine)] if has_one else None

    def first_of(self, loader: Any) -> int:
        """Returns the position from which a loader goes on, or begins."""
        return self._given[id(loader)] + 1

    def note_given(self, loader: Any, position: int) -> None:
        """Notes that a loader has come to a position."""
        self._given[id(loader)] = position

    # ---- progress ----

    @property
    def unit(self) -> int:
        """The unit of the batch in hand; NONE before the first."""
        position = self._at[0]
        return NONE if position == NONE else self.dealing.unit(position)

    @property
    def is_unit_over(self) -> bool:
        """Whether the batch in hand is the last of those that were claimed together."""
        position, number = self._at
        if position == NONE:
            return True
        left = self.num_batches - self.unit * self.unit_size
        return number + 1 == min(self.unit_size, left)

    def nominal(self, num_batches: int) -> int:
        """Returns how many batches each rank has of so many, if all have as many."""
        return -(-num_batches // self.num_ranks)

    def nominal_before(self, unit: int) -> int:
        """Returns how many batches each rank has nominally made before a unit."""
        return unit // self.num_ranks * self.unit_size

    # ---- what all ranks do together ----

    def left(self, *, has_stopped: bool) -> tuple[int, int]:
        """Returns how many units nobody has, and how many ranks have stopped the epoch early.

        All ranks have come to the end of the epoch, and call it.
        """

        def count() -> torch.Tensor:
            mine = torch.tensor([self.dealing.num_free(), int(has_stopped)])
            return self._session.meetings.all_reduce(mine).wait()

        num_free, num_stopped = self._session.ranks.together(count).tolist()
        return num_free, num_stopped

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the epoch; all ranks call it."""

        def gather() -> torch.Tensor:
            report = self.dealing.report()
            is_here = report.epoch == self._epoch
            mine = torch.tensor(report.trained if is_here else [], dtype=torch.int64)
            everyones = torch.cat(self._session.meetings.all_gather(mine).wait())
            return torch.tensor(sorted(set(everyones.tolist())), dtype=torch.int64)

        trained: torch.Tensor = self._session.ranks.together(gather)
        return {"epoch": list(self._epoch), "trained": trained}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` has returned, on all ranks together, before training."""
        self.dealing.resume(Epoch(*state["epoch"]), state["trained"].tolist())
        self._session.ranks.together(lambda: self._session.meetings.barrier().wait())


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


def claimed(loader: Any, data: ClaimedData, begin: Callable[[Any], None]) -> Any:
    """Returns a twin of a loader, with the batches that this rank claims.

    Args:
        loader: a loader of which `data.units.loaders.has_indices` is true
        data: the claims
        begin: has `data` begin the epoch, or go on with it; called with the twin before the first
            batch
    """
    check(loader)
    twin = copy.copy(loader)
    kind: Any = type(loader)
    twin.__class__ = _class_like(kind)
    twin._iterator = None  # workers that live on are those of the loader
    twin.claimed = data, begin
    return twin


@cache
def _class_like(base: Any) -> Any:
    class Claimed(base):  # type: ignore[misc]
        """A loader whose batches are claimed."""

        def __len__(self) -> int:
            return int(self.claimed[0].nominal(len(super()._index_sampler)))

        def __iter__(self) -> Iterator[Any]:
            return _Batches(self, *self.claimed)

        claimed_sampler: _Handed | None = None

        @property
        def _index_sampler(self) -> Any:
            return self.claimed_sampler or super()._index_sampler

        def all_batches(self) -> list[Any]:
            """Draws the batches of an epoch, of all ranks."""
            return list(super()._index_sampler)

        def load(self, batches: _Batches) -> Any:
            """Begins to load what `batches` hands over."""
            self.claimed_sampler = self.claimed_sampler or _Handed()
            self.claimed_sampler.batches = weakref.ref(batches)
            return super().__iter__()

    Claimed.__name__, Claimed.__qualname__ = base.__name__, base.__qualname__
    return Claimed


class _Handed:
    """Stands in the place of a loader's sampler, also where its workers live for several epochs.

    Who reads an epoch keeps its batches alive, and no loader: else workers would outlive a `for`.
    """

    batches: weakref.ref[_Batches]

    def __iter__(self) -> _Handed:
        return self

    def __next__(self) -> Any:
        batches = self.batches()
        assert batches is not None, "a loader loads while an epoch is read"
        return batches.next_to_load()


class _Batches:
    """Yields what this rank claims in an epoch; goes on after the end where something is left.

    Args:
        loader: the claimed loader
        data: the claims
        begin: begins the epoch
    """

    def __init__(self, loader: Any, data: ClaimedData, begin: Callable[[Any], None]) -> None:
        self._loader, self._data, self._begin = loader, data, begin
        self._inner: Any = None
        self._cursor = NONE
        self._rest: deque[tuple[int, int, Any]] = deque()  # of a unit: position, number, batch
        self._handed: deque[tuple[int, int, bool]] = deque()  # the last: whether it is loaded
        self._loaded: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._cursor == NONE:
            self._begin(self._loader)
            self._cursor = self._data.first_of(self._loader)
        while self._handed or self._has_more():
            if not self._handed:
                with contextlib.suppress(StopIteration):  # as a unit was given back just now
                    self._loaded.append(next(self._inner))  # it asks `next_to_load` what to load
                continue
            position, number, is_loaded = self._handed.popleft()
            self._data.note_given(self._loader, position)
            batch = None
            if is_loaded:
                batch = self._loaded.popleft() if self._loaded else next(self._inner)
            if self._data.begin(position, number):
                if is_loaded:
                    return batch
                break  # of several loaders, others have a batch here
        raise StopIteration

    def _has_more(self) -> bool:
        """Returns whether there is more to load; has it loaded where workers load."""
        data, loader = self._data, self._loader
        while not self._handed:
            if not self._rest:
                if not data.secure(self._cursor, is_urgent=True):
                    return False
                if data.dealing.unit(self._cursor) == NONE:
                    self._cursor += 1
                    continue
            is_new = self._inner is None
            if is_new:
                self._inner = loader.load(self)
            if not loader.num_workers:
                return True
            if not (is_new or self._handed):
                self._inner._try_put_index()
        return True

    def next_to_load(self) -> Any:
        """Returns the next batch for the loader to load; raises StopIteration if there is none."""
        data = self._data
        while True:
            while self._rest:
                position, number, batch = self._rest.popleft()
                self._handed.append((position, number, batch is not None))
                if batch is not None:
                    return batch
            if not data.secure(self._cursor, is_urgent=False):
                raise StopIteration
            position, self._cursor = self._cursor, self._cursor + 1
            unit = data.dealing.unit(position)
            if unit != NONE:
                batches = enumerate(data.batches(self._loader, unit))
                self._rest.extend((position, number, batch) for number, batch in batches)


def _drawn(loader: Any, seed: int) -> list[Any]:
    """Draws the batches of an epoch, the same on all ranks whose samplers are the same."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        drawn: list[Any] = loader.all_batches()
        return drawn
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
