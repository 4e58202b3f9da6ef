"""One rank's way through the steps of `balanced`, whoever drives it.

    begin_epoch    all ranks tell each other whose samples are which
    begin_slot     the next unit of this rank, if the dealer has one for it
    finish         the unit's gradient enters the step's sum, unless another rank's has
    next_unit      more units, once this rank has nothing else to do in the step
    take_sums      the step's sum

`data.units` says who computes which unit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from lightning_dsgd.data.dealing import Dealing
from lightning_dsgd.data.loaders import UnitLoader
from lightning_dsgd.data.plan import Plan, Unit, gather
from lightning_dsgd.data.units import NONE
from lightning_dsgd.transport import Transport


class Sums(Protocol):
    """Where units' gradients are added up: a replica."""

    def follow(self) -> None:
        """Begins anew with the others where they train other parameters."""

    def add_unit(self, step: int, scale: float = 1.0) -> None:
        """Adds the gradients in hand, multiplied by a scale, to this rank's sum of a step."""

    def drop_gradients(self) -> None:
        """Drops the gradients in hand."""

    def close_step(self, step: int) -> None:
        """Has lanes sum a step over all ranks."""

    def take_sums(self, step: int) -> None:
        """Puts a step's means into the gradients, once they are there."""


class Balancing:
    """What one rank has in hand.

    Attributes:
        unit: the unit in hand; NONE if there is none
        plan: the epoch that is under way

    Args:
        net: the network, with channels of its own
        sums: this rank's replica
        backups: whether a unit that is begun may be computed a second time
    """

    plan: Plan

    def __init__(self, net: Transport, sums: Sums, *, backups: bool) -> None:
        self._net, self._sums = net, sums
        self._dealing = Dealing(net.sub("units"), backups=backups, on_closed=sums.close_step)
        self._first_step = 0
        self._num_steps = 0
        self._units: list[Unit] = []
        self._step = NONE
        self.unit = NONE

    def close(self) -> None:
        """Ends the lane."""
        self._dealing.close()

    # ---- an epoch ----

    def begin_epoch(
        self,
        loader: UnitLoader,
        *,
        limit: int,
        num_slots_of_step: int,
        num_parts: int,
        first_slot: int = 0,
    ) -> None:
        """Begins an epoch, with all ranks.

        Args:
            loader: loads this rank's units
            limit: the most slots that the epoch may have
            num_slots_of_step: how many slots a step has
            num_parts: into how many units a batch is split
            first_slot: where the epoch goes on, if it was begun before
        """
        self._loader = loader
        self._first_step += self._num_steps
        self.plan = Plan(
            gather(self._net, loader.draw()),
            limit=limit,
            num_slots_of_step=num_slots_of_step,
            num_parts=num_parts,
            first_slot=first_slot,
        )
        self._num_steps = self.plan.num_steps
        self._dealing.know(self._first_step, self.plan.homes())
        loader.begin_epoch(self.plan)

    # ---- a step ----

    def begin_step(self, within: int) -> None:
        """Goes on to a step of the epoch, of which this rank has no unit in hand."""
        self._sums.follow()
        self._step = self._first_step + within
        self.unit = NONE  # of a step that was left in its midst
        self._units = self.plan.units(within)
        self._loader.begin_step(within, self._units)
        self._dealing.begin_step(self._step)

    def begin_slot(self, slot: int) -> int:
        """Goes on to a slot, and begins a unit if there is one for this rank; returns it."""
        if self.plan.begins_step(slot):
            self.begin_step(self.plan.step_of(slot))
        self.finish_without_gradient()
        self.unit = self._dealing.take(waits=False)
        return self.unit

    def next_unit(self) -> int:
        """Begins one more unit and returns it; NONE once all of the step are finished."""
        self.finish_without_gradient()
        self.unit = self._dealing.take(waits=True)
        return self.unit

    def batch(self) -> Any:
        """Returns the batch of the unit in hand."""
        return self._loader.load(self.unit)

    def own_batch(self) -> Any:
        """Returns the first batch that is this rank's own in this step, to show where it has none.

        Where it has no batch of its own it is the first of any.
        """
        homes = [unit.home for unit in self._units]
        rank = self._net.rank
        return self._loader.load(homes.index(rank) if rank in homes else 0)

    @property
    def weight(self) -> float:
        """By how much the loss of the unit in hand counts."""
        return self._units[self.unit].weight

    def finish(self, scale: float = 1.0) -> bool:
        """Has the unit in hand enter the sum, unless another rank's has; returns whether it has.

        Args:
            scale: what its gradient is multiplied by
        """
        has_entered = self._dealing.finish(partial(self._sums.add_unit, self._step, scale))
        self.unit = NONE
        return has_entered

    def finish_without_gradient(self) -> None:
        """Has a unit in hand, if there is one, enter the sum with no gradient.

        Such a unit has had no backward pass: its loss is None.
        """
        if self.unit != NONE:
            self._sums.drop_gradients()
            self.finish()

    def take_sums(self) -> None:
        """Waits for the sums of the step, and puts them into the gradients."""
        self._sums.take_sums(self._step)


def parts_of(micro_batches: int | None, num_slots_of_step: int) -> int:
    """Returns into how many units a batch is split: see `Balanced.micro_batches`."""
    if micro_batches is not None:
        return micro_batches
    return 4 if num_slots_of_step == 1 else 1


def longest(net: Transport, own: int) -> int:
    """Returns the most batches that any rank has; all ranks call it."""
    return max(int(theirs) for theirs in net.all_gather(torch.tensor([own])).wait())
