"""One rank's way through epochs whose batches are claimed, whoever drives it.

    begin_epoch    each rank draws all batches of the epoch, in one order that all ranks know
    secure         claims until there is a portion at a place of this rank's own order
    begin          begins a batch of it, unless the portion was given back
    end_batch      the portion was trained on, as others are to know
    left           all have come to the end: how many portions a lost rank has left, if any

`claims` is the protocol, `dealing` its lane, `loaders` what loads the batches.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_dsgd.data.claims.claims import NONE, Claims, Epoch
from lightning_dsgd.data.claims.dealing import ClaimDealing
from lightning_dsgd.data.dealing import Session, step_of
from lightning_dsgd.transport import Transport


class Draws(Protocol):
    """A loader that draws its batches beforehand."""

    def draw(self, seed: int) -> Sequence[object]:
        """Returns the indices of an epoch's batches, the same on all ranks with alike samplers."""

    def close(self) -> None:
        """Ends workers that live on from epoch to epoch."""


class Saved(TypedDict):
    """What a checkpoint holds of an epoch: the words of `Epoch`, and the portions trained on."""

    epoch: list[int]
    trained: Tensor


class Claiming(ABC):
    """Leads one rank, batch by batch, through the epochs of one training.

    Attributes:
        num_ranks: the number of ranks by which nominal lengths count; it stays the same
        num_batches: how many batches the epoch has, of all ranks
        portion_size: how many batches are claimed together
        cycles: whether a shorter loader begins again, where several are read together

    Args:
        session: the session of this rank
        num_ranks: how many ranks there are at the start
        is_newcomer: whether this rank comes to others that train
    """

    def __init__(self, session: Session, num_ranks: int, *, is_newcomer: bool = False) -> None:
        self._session = session
        self._is_newcomer = is_newcomer
        self.num_ranks = num_ranks
        self.num_batches = 0
        self.portion_size = 1
        self.cycles = True
        self._epoch = Epoch()
        self._at = (NONE, NONE)  # the batch in hand: its position, and its number in the portion
        self._dealing: ClaimDealing | None = None
        self._loaders: WeakSet[Draws] = WeakSet()

    # ---- the network ----

    def open(self, net: Transport) -> None:
        """Begins to claim over a network of all ranks, or goes on in a view with other members."""
        if self._dealing is not None:
            self._dealing = self._dealing.in_view(net)
        else:
            claims = Claims(net.rank, net.world_size) if self._is_newcomer else None
            self._dealing = ClaimDealing(net, claims)

    def close(self) -> None:
        """Ends the lane, and the workers of the loaders."""
        for loader in self._loaders:
            loader.close()
        if self._dealing is not None:
            self._dealing.close()

    @property
    def dealing(self) -> ClaimDealing:
        """This rank's end of the claims."""
        assert self._dealing is not None, "claims are open while a training is"
        return self._dealing

    # ---- an epoch ----

    def begin_epoch(
        self,
        number: int,
        loaders: Sequence[Draws],
        *,
        seed: int,
        shortest: bool = False,
        cycles: bool = True,
        limit: float = float("inf"),
        portion_size: int = 1,
    ) -> None:
        """Begins an epoch, unless it is under way.

        Args:
            number: the epoch's number
            loaders: the loaders that are read together
            seed: for samplers that draw from torch's, Python's or NumPy's global generator
            shortest: whether the shortest loader ends the epoch, not the longest
            cycles: whether a shorter loader begins again
            limit: the most batches that the epoch may have
            portion_size: how many batches are claimed together
        """
        self._loaders.update(loaders)
        if self._epoch.number == number:
            return
        drawn = [loader.draw(seed + number) for loader in loaders]
        lengths = [len(batches) for batches in drawn]
        self.num_batches = int(min(min(lengths) if shortest else max(lengths), limit))
        self.portion_size, self.cycles, self._at = portion_size, cycles, (NONE, NONE)
        num_portions = -(-self.num_batches // portion_size)
        checksum = zlib.crc32(repr(drawn).encode())
        self._epoch = Epoch(number, num_portions, checksum)
        step_of(self._session.ranks, lambda: self.dealing.begin_epoch(self._epoch))

    def next_portion(self) -> int:
        """Returns the portion that this rank trains on next, for which it may wait; or NONE."""
        position = self.dealing.num_begun
        while self.secure(position, is_urgent=True):
            portion = self.dealing.portion(position)
            if portion != NONE:
                return portion
            position += 1
        return NONE

    def secure(self, position: int, *, is_urgent: bool) -> bool:
        """Claims until there is a portion at a position; see `ClaimDealing.secure`."""
        ranks = self._session.ranks
        return step_of(ranks, lambda: self.dealing.secure(position, is_urgent=is_urgent))

    def begin(self, position: int, number: int) -> bool:
        """Begins a batch of a portion, unless that was given back."""
        has_begun = step_of(self._session.ranks, lambda: self.dealing.begin(position))
        if has_begun:
            self._at = position, number
        return has_begun

    def end_batch(self) -> None:
        """Notes that the batch in hand is over."""
        if self._at[0] != NONE and self.is_portion_over:
            self.dealing.end()

    def places(self, portion: int) -> range:
        """Returns the places in the epoch of a portion's batches."""
        first = portion * self.portion_size
        return range(first, min(first + self.portion_size, self.num_batches))

    # ---- progress ----

    @property
    def portion(self) -> int:
        """The portion of the batch in hand; NONE before the first."""
        position = self._at[0]
        return NONE if position == NONE else self.dealing.portion(position)

    @property
    def is_portion_over(self) -> bool:
        """Whether the batch in hand is the last of those that were claimed together."""
        position, number = self._at
        if position == NONE:
            return True
        return number + 1 == len(self.places(self.portion))

    def nominal(self, num_batches: int) -> int:
        """Returns how many batches each rank has of so many, if all have as many."""
        return -(-num_batches // self.num_ranks)

    def nominal_before(self, portion: int) -> int:
        """Returns how many batches each rank has nominally made before a portion."""
        return portion // self.num_ranks * self.portion_size

    # ---- what all ranks do together ----

    def left(self, *, has_stopped: bool) -> tuple[int, int]:
        """Returns how many portions nobody has, and how many ranks have stopped the epoch early.

        All ranks have come to the end of the epoch, and call it.
        """

        def count() -> torch.Tensor:
            mine = torch.tensor([self.dealing.num_free(), int(has_stopped)])
            return self._session.meetings.all_reduce(mine).wait()

        num_free, num_stopped = self._session.ranks.together(count).tolist()
        return num_free, num_stopped

    def state(self) -> Saved:
        """Returns what a checkpoint holds of the epoch; all ranks call it."""

        def gather() -> torch.Tensor:
            report = self.dealing.report()
            is_here = report.epoch == self._epoch
            mine = torch.tensor(report.trained if is_here else [], dtype=torch.int64)
            everyones = torch.cat(self._session.meetings.all_gather(mine).wait())
            return torch.tensor(sorted(set(everyones.tolist())), dtype=torch.int64)

        trained: torch.Tensor = self._session.ranks.together(gather)
        return {"epoch": list(self._epoch), "trained": trained}

    @abstractmethod
    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds the claims to a checkpoint; all ranks call it."""

    def load_state(self, state: Saved) -> None:
        """Takes over what `state` has returned, on all ranks together, before training."""
        self.dealing.resume(Epoch(*state["epoch"]), state["trained"].tolist())
        self._session.ranks.together(lambda: self._session.meetings.barrier().wait())
