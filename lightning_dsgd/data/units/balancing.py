"""One rank's way through the steps of `balanced`, whoever drives it.

    begin_epoch    all ranks tell each other whose samples are which
    begin_slot     the next unit of this rank, if the dealer has one for it
    finish         the unit's gradient enters the step's sum, unless another rank's has
    next_unit      more units, once this rank has nothing else to do in the step
                   NONE once all of the step are finished, and its sum is in the gradients

`protocol` says who computes which unit, `losses` what becomes of a step where a rank is lost.
A wait that a loss ends is made again among the ranks that are left, as `Ranks` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch

from lightning_dsgd.data.dealing import Ranks, step_of
from lightning_dsgd.data.units import losses
from lightning_dsgd.data.units.dealing import UnitDealing
from lightning_dsgd.data.units.loaders import UnitLoader
from lightning_dsgd.data.units.plan import Batches, Plan, Unit, gather, give, longest_of
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.transport import Transport

USUAL_PARTS: Final = 4
"""Into how many units a batch is split where it is a rank's part of a step and nobody chose."""


class Sums(Protocol):
    """Where units' gradients are added up: a replica."""

    def follow(self) -> None:
        """Begins anew with the others where they train other parameters."""

    def add_unit(self, step: int, unit: int, scale: float = 1.0) -> None:
        """Adds a unit's gradients, in hand, multiplied by a scale, to this rank's sum of a step."""

    def drop_gradients(self) -> None:
        """Drops the gradients in hand."""

    def close_step(self, step: int) -> None:
        """Has lanes sum a step over all ranks."""

    def take_sums(self, step: int) -> None:
        """Puts a step's means into the gradients, once they are there."""


class SurvivingSums(Sums, Protocol):
    """The same where the others go on without a lost rank."""

    @property
    def made(self) -> int:
        """The last step whose sum this rank has, or has had."""

    def holds(self, step: int) -> bool:
        """Returns whether this rank's sum of a step, of its own units, is there."""

    def share_sums(self, summed: int, has: Sequence[bool], num_homes: int, kept: int) -> None:
        """Gives all ranks the sums that any of them has; goes on among them.

        Args:
            summed: the last step that is summed
            has: which ranks have that sum
            num_homes: how many ranks' batches make a step
            kept: the step of which this rank keeps the sum of its own units
        """


class Balancing:
    """What one rank has in hand.

    Attributes:
        unit: the unit in hand; NONE if there is none
        plan: the epoch that is under way
        num_homes: how many ranks' batches make a step
        has_told_of_parts: whether it was told that BatchNorm sees parts of batches

    Args:
        net: the network, with channels of its own
        sums: this rank's replica
        ranks: the ranks that train
        backups: whether a unit that is begun may be computed a second time
        num_homes: of a training that began with another number of ranks; else None
    """

    plan: Plan

    def __init__(
        self,
        net: Transport,
        sums: Sums,
        ranks: Ranks,
        *,
        backups: bool,
        num_homes: int | None = None,
    ) -> None:
        self._net, self._sums, self._ranks = net, sums, ranks
        self.num_homes = net.world_size if num_homes is None else num_homes
        self._members: tuple[int, ...] = tuple(range(net.world_size))
        self._num_epochs = 0
        self.has_told_of_parts = False
        self._drawn = 0, list[Batches]()  # for the epoch of that number, by home
        self._first_slot = NONE  # of an epoch that others have begun, on a newcomer; else NONE
        self._dealing = UnitDealing(net.sub("units"), backups=backups, on_closed=sums.close_step)
        self._first_step = self._num_steps = 0
        self._taken = NONE  # the last step whose sum is in the gradients, or has been
        self._loaders: set[UnitLoader] = set()
        self._units: list[Unit] = []
        self._step = self._within = NONE
        self.unit = NONE

    def close(self) -> None:
        """Ends the lane, and the workers of the loaders."""
        for loader in self._loaders:
            loader.close()
        self._dealing.close()

    # ---- an epoch ----

    def begin_epoch(
        self,
        loader: UnitLoader,
        *,
        limit: int,
        num_slots_of_step: int,
        micro_batches: int | None,
        first_slot: int = 0,
    ) -> None:
        """Begins an epoch, with all ranks.

        Args:
            loader: loads this rank's units
            limit: the most slots that the epoch may have
            num_slots_of_step: how many slots a step has
            micro_batches: see `Balanced`
            first_slot: where the epoch goes on, if it was begun before
        """
        if self._first_slot == NONE:
            self._num_epochs += 1
            self._ranks.together(partial(self._draw, loader.draws()), _adopt_nothing)
            self._first_step += self._num_steps
        else:
            first_slot, self._first_slot = self._first_slot, NONE
        _, batches = self._drawn
        self._loader, self._within = loader, NONE
        self._loaders.add(loader)
        self.plan = Plan(
            batches,
            limit=limit,
            num_slots_of_step=num_slots_of_step,
            num_parts=parts_of(micro_batches, num_slots_of_step, longest_of(batches)),
            first_slot=first_slot,
        )
        self._num_steps = self.plan.num_steps
        self._know()
        loader.begin_epoch(self.plan)

    def _draw(self, draw: Callable[[int], list[list[int]]]) -> None:
        """Has all ranks tell each other the batches of the homes that they are, or stand for."""
        own = {home: draw(home) for home, rank in enumerate(self._places) if rank == self._net.rank}
        self._drawn = self._num_epochs, gather(self._net, own, self.num_homes)

    @property
    def _places(self) -> list[int]:
        """Which rank is each home, or stands for it."""
        return losses.members_of(self.num_homes, self._members)

    def _know(self) -> None:
        places = self._places
        homes = [[places[home] for home in of_step] for of_step in self.plan.homes()]
        self._dealing.know(self._first_step, homes)

    # ---- where a rank is lost ----

    def stand_still(self) -> None:
        """Deals no more; the ranks that are left go on in `change_view`."""
        self._dealing.stand_still()

    def change_view(self, net: Transport, members: Sequence[int], sums: SurvivingSums) -> None:
        """Goes on among the ranks that are left, as `losses` tells; all of them call it.

        Args:
            net: their network, with channels of its own
            members: their numbers
            sums: this rank's replica
        """
        self._net, self._members = net, tuple(members)
        hand = self._dealing.stand_still()
        made = max(self._taken, sums.made)
        mine = losses.report_of(hand, made, holds=sums.holds(hand.step))
        reports = losses.exchange(net.sub("reports"), mine)
        self._take_over_epoch(net.sub("epoch"))
        after = losses.conclude(reports)
        has = [report.made >= after.summed or report.is_newcomers for report in reports]
        if mine.is_newcomers:
            self._taken = after.summed
        sums.share_sums(after.summed, has, self.num_homes, after.step)
        self._dealing.go_on(net.sub("units"), after)
        if self._num_steps:
            self._know()

    def _take_over_epoch(self, net: Transport) -> None:
        """Gives all ranks the batches of an epoch that some have been told before the loss."""
        number, batches = self._drawn
        first_slot = self.plan.first_slot if self._num_steps else NONE
        mine = torch.tensor([number, self._first_step, first_slot])
        told = [theirs.tolist() for theirs in net.all_gather(mine).wait()]
        known = [each[0] for each in told]
        if min(known) == max(known):
            return
        giver = known.index(max(known))
        self._drawn = max(known), give(net, batches, giver)
        if number == 0 and told[giver][2] != NONE:  # the others are in the midst of it
            self._num_epochs, self._first_step, self._first_slot = told[giver]
            self.num_homes = len(self._drawn[1])

    # ---- a step ----

    def begin_step(self, within: int) -> None:
        """Goes on to a step of the epoch, of which this rank has no unit in hand."""
        self._ranks.step(self._sums.follow, again=True)
        self._step, self._within = self._first_step + within, within
        self.unit = NONE  # of a step that was left in its midst
        self._units = self.plan.units(within)
        self._loader.begin_step(within, self._units)
        self._dealing.begin_step(self._step)

    def begin_slot(self, slot: int) -> int:
        """Goes on to a slot, and begins a unit if there is one for this rank; returns it."""
        if self.plan.step_of(slot) != self._within:
            self.begin_step(self.plan.step_of(slot))
        self.finish_without_gradient()
        self.unit = self._taken_up(waits=False)
        return self.unit

    def next_unit(self) -> int:
        """Begins one more unit and returns it; NONE once the step's sum is in the gradients."""
        self.finish_without_gradient()
        while (unit := self._taken_up(waits=True)) == NONE and not self._take_sums():
            pass  # a rank was lost: units of the step may be free again
        self.unit = unit
        return unit

    def _taken_up(self, *, waits: bool) -> int:
        """Begins a unit and returns it; NONE if there is none: see `UnitDealing.take`."""
        return step_of(self._ranks, lambda: self._dealing.take(waits=waits))

    def batch(self) -> Any:
        """Returns the batch of the unit in hand."""
        return self._loader.load(self.unit)

    def own_batch(self) -> Any:
        """Returns the first batch that is this rank's own in this step, to show where it has none.

        Where it has no batch of its own it is the first of any.
        """
        homes = [unit.home for unit in self._units]
        rank = self._members[self._net.rank]
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
        enter = partial(self._sums.add_unit, self._step, self.unit, scale)
        has_entered = step_of(self._ranks, lambda: self._dealing.finish(enter))
        self.unit = NONE
        return has_entered

    def finish_without_gradient(self) -> bool:
        """Has a unit in hand, if there is one, enter the sum with no gradient; see `finish`.

        Such a unit has had no backward pass: its loss is None.
        """
        if self.unit == NONE:
            return False
        self._sums.drop_gradients()
        return self.finish()

    def _take_sums(self) -> bool:
        """Waits for the sums of the step, and puts them into the gradients.

        Returns:
            Whether they are there; if not, a rank was lost before.
        """

        def take() -> None:
            self._sums.take_sums(self._step)
            self._taken = self._step

        self._ranks.step(take, again=False)
        return self._taken == self._step


def _adopt_nothing() -> None:
    """Does nothing: `change_view` has taken over what the others have told each other."""


def parts_of(micro_batches: int | None, num_slots_of_step: int, longest_batch: int) -> int:
    """Returns into how many units a batch is split: see `Balanced.micro_batches`."""
    if micro_batches is not None:
        return micro_batches
    return max(1, min(USUAL_PARTS, longest_batch // 2)) if num_slots_of_step == 1 else 1


def longest(net: Transport, loader: Any) -> int:
    """Returns the most batches that any rank's loader has; all ranks call it.

    Raises if the ranks cannot have the same data set.
    """
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else NONE
    gathered = net.all_gather(torch.tensor([len(loader), size])).wait()
    told = [theirs.tolist() for theirs in gathered]
    sizes = [size for _, size in told]
    if min(sizes) != max(sizes):
        raise ValueError(
            "ranks share the micro-batches of a step, so each must be able to load any of them: "
            f"all must have the same data set, got sets of {sizes} samples, by rank; give all "
            'ranks the whole set and a DistributedSampler, or use strategy="allreduce" or "ddp"'
        )
    return int(max(length for length, _ in told))
