"""A loader that loads the units which its rank computes: its own ahead, those of others when asked.

    own units        in the order in which the rank would compute them, as far ahead as the loader's
                     workers do; one that another rank has computed is dropped
    another's unit   once it is granted, after what is being loaded

The loader's class, data set and workers are the user's; its batches are the units.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lightning_dsgd.data.loaders import (
    described,
    end_workers,
    has_indices,
    load_more,
    sampler_of,
    twin,
)
from lightning_dsgd.data.units.plan import Plan, Unit

Key = tuple[int, int]
"""A unit's step, counted within the epoch, and its number in it."""


class UnitLoader:
    """Loads units of one epoch after the other.

    Args:
        loader: the user's loader, whose batches DDP's rank would have
        rank: this rank
    """

    def __init__(self, loader: Any, rank: int) -> None:
        check(loader)
        self.source, self._rank = loader, rank
        self._order = _Order()
        self._twin = twin(loader, self._order)
        self._depth = loader.num_workers * (loader.prefetch_factor or 0)
        self._batches: Any = None
        self._loaded: dict[Key, Any] = {}
        self._units: list[Unit] = []
        self._step = -1

    def draws(self) -> Callable[[int], list[list[int]]]:
        """Returns what draws the batches of an epoch by home, each once."""
        chance, drawn = torch.get_rng_state(), dict[int, list[list[int]]]()

        def draw(home: int) -> list[list[int]]:
            if home == self._rank:
                drawn.setdefault(home, self._draw(sampler_of(self.source)))
            elif home not in drawn:
                with torch.random.fork_rng([]):
                    torch.set_rng_state(chance)  # from which that rank's sampler would draw
                    drawn[home] = self._draw(_sampler_on(home, self.source))
            return drawn[home]

        return draw

    def _draw(self, sampler: Any) -> list[list[int]]:
        drawn = list(sampler)
        is_of_lists = self.source.batch_sampler is not None or any(
            isinstance(d, (list, tuple)) for d in drawn
        )
        self._order.is_of_samples = not is_of_lists
        batches = [list(each) if is_of_lists else [each] for each in drawn]
        return [[_number(sample) for sample in batch] for batch in batches]

    def begin_epoch(self, plan: Plan) -> None:
        """Begins to load an epoch's units."""
        self._loaded.clear()
        self._step = -1
        self._order.begin_epoch(plan, self._rank, 2 * self._depth)
        self._batches = iter(self._twin)

    def close(self) -> None:
        """Ends the workers of this loader, and drops what they have loaded."""
        self._loaded.clear()
        self._batches = None
        end_workers(self._twin)

    def begin_step(self, step: int, units: list[Unit]) -> None:
        """Goes on to a step; what was loaded for those before is dropped."""
        self._step, self._units = step, units
        self._order.step = step
        self._loaded = {key: batch for key, batch in self._loaded.items() if key[0] >= step}

    def load(self, unit: int) -> Any:
        """Returns a unit's batch, loaded now if it is not there yet."""
        key = self._step, unit
        order = self._order
        if key not in self._loaded and key not in order.under_way:
            order.asked_for.append((key, self._units[unit].samples))
        while key not in self._loaded:
            self._fill()
            arrived = next(self._batches)
            came = order.under_way.popleft()
            if came[0] >= self._step:
                self._loaded[came] = arrived
        self._fill()
        order.num_loaded = len(self._loaded)
        return self._loaded.pop(key)

    def _fill(self) -> None:
        """Has workers load as much as they may."""
        self._order.num_loaded = len(self._loaded)
        if self._depth:
            before = -1
            while before != len(self._order.under_way) < self._depth:
                before = len(self._order.under_way)
                load_more(self._batches)


class _Order:
    """Says what the loader loads next; stands in the place of its sampler.

    Attributes:
        step: the step that the rank is in
        asked_for: what is to be loaded at once: units with their samples
        under_way: the units that are being loaded, in the order in which they come
        num_loaded: how many are loaded and not used yet
        is_of_samples: whether the data set is asked for a sample, and not for a list of samples
    """

    def __init__(self) -> None:
        self.step = 0
        self.asked_for: deque[tuple[Key, list[int]]] = deque()
        self.under_way: deque[Key] = deque()
        self.num_loaded = 0
        self.is_of_samples = False
        self._most_ahead = 0
        self._own: Iterator[tuple[Key, list[int]]] = iter(())

    def begin_epoch(self, plan: Plan, rank: int, most_ahead: int) -> None:
        """Begins with an epoch's units."""
        self.step, self.num_loaded, self._most_ahead = 0, 0, most_ahead
        self.asked_for.clear()
        self.under_way.clear()
        self._own = (
            ((step, number), unit.samples)
            for step in range(plan.num_steps)
            for number, unit in enumerate(plan.units(step))
            if unit.home == rank
        )

    def __iter__(self) -> _Order:
        return self

    def __next__(self) -> Any:
        key, samples = self._next()
        self.under_way.append(key)
        return samples[0] if self.is_of_samples else samples

    def _next(self) -> tuple[Key, list[int]]:
        if self.asked_for:
            return self.asked_for.popleft()
        if len(self.under_way) + self.num_loaded >= self._most_ahead:
            raise StopIteration
        for key, samples in self._own:
            if key[0] >= self.step:
                return key, samples
        raise StopIteration


def check(loader: Any) -> None:
    """Raises for a loader whose batches cannot be shared."""
    got = f'got {described(loader)} with strategy="balanced"'
    if not has_indices(loader):
        raise ValueError(
            "ranks share the micro-batches of a step, so each must be able to load any of them: "
            f"the loader must be a DataLoader of a dataset with indices, {got}; use "
            'strategy="allreduce" or "ddp" for a stream'
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            f'with strategy="balanced" a loader must give its batches in order, {got} and '
            "in_order=False; leave it out"
        )


def check_can_draw_for_others(loader: Any, num_homes: int) -> None:
    """Raises for a loader whose sampler cannot draw the batches of a home that has no rank.

    Args:
        loader: the loader
        num_homes: how many homes there are
    """
    inner = _inner(loader)
    if inner is None:
        sampler = sampler_of(loader)
        raise ValueError(
            'with strategy="balanced" a rank draws the batches of one that is not there, with '
            'on_loss="continue" and after a resume on another number of ranks, so the loader must '
            f"have a DistributedSampler, got {type(getattr(sampler, 'sampler', sampler)).__name__}"
            "; use one"
        )
    if inner.num_replicas != num_homes:
        raise ValueError(
            f"the sampler must divide the samples among {num_homes} ranks, as when training began, "
            f"got num_replicas={inner.num_replicas}; make it with "
            "**trainer.strategy.distributed_sampler_kwargs, or leave it to the Trainer"
        )


def _inner(loader: Any) -> Any:
    """Returns a loader's DistributedSampler; None if it has none."""
    sampler = sampler_of(loader)
    inner = getattr(sampler, "sampler", None)
    found = (each for each in (sampler, inner) if isinstance(each, DistributedSampler))
    return next(found, None)


def _sampler_on(home: int, loader: Any) -> Any:
    """Returns the sampler that a loader would have on another rank."""
    outer, inner = copy.copy(sampler_of(loader)), copy.copy(_inner(loader))
    inner.rank = home
    if isinstance(outer, DistributedSampler):
        return inner
    outer.sampler = inner
    return outer


def _number(sample: Any) -> int:
    try:
        return operator.index(sample)
    except TypeError as err:
        raise ValueError(
            'with strategy="balanced" samplers must give whole numbers, as ranks tell each other '
            f"which samples are whose, got {sample!r}; number the samples"
        ) from err
