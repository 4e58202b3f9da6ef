"""An epoch of `balanced`: its steps, their units, and who would compute each with DDP.

Each rank draws its batches as its own sampler has them, so units are what DDP's ranks would have
computed.  Ranks tell each other which samples these are, once an epoch.

    slot     one batch of each rank, as Lightning's loop counts batches
    step     the slots that one optimizer step is made of
    unit     a part of one rank's batch in one slot

A unit's gradient counts in the step's sum as it does with DDP: a batch is the mean over its
samples, and a slot the mean over the ranks that have a batch in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dsgd.transport import Transport

Batches = tuple[Tensor, Sequence[int]]
"""The indices of all samples, and how many each batch has."""


class Unit(NamedTuple):
    """A micro-batch.

    Attributes:
        home: the rank that would compute it with DDP
        samples: their indices
        weight: by how much its loss counts, beside that of a whole batch of every rank
    """

    home: int
    samples: list[int]
    weight: float


class Plan:
    """All units of an epoch.

    Args:
        batches: of each rank: the indices of all samples, and how many each batch has
        limit: the most slots that the epoch may have
        num_slots_of_step: how many slots a step has
        num_parts: into how many units a batch is split; fewer where a unit would have one sample
            alone, unless those of the longest batch have: BatchNorm cannot train on one sample
        first_slot: where the epoch goes on, if it was begun before
    """

    def __init__(
        self,
        batches: Sequence[Batches],
        *,
        limit: int,
        num_slots_of_step: int,
        num_parts: int,
        first_slot: int = 0,
    ) -> None:
        self._batches = [(samples, [0, *accumulate(lengths)]) for samples, lengths in batches]
        self._per_step, self.num_parts = num_slots_of_step, num_parts
        self._least = 2 if longest_of(batches) >= 2 * num_parts else 1
        self.first_slot = first_slot
        self.num_slots = min(limit, max(len(lengths) for _, lengths in batches))

    @property
    def num_steps(self) -> int:
        """How many steps there are from the first slot on."""
        return -(-self.num_slots // self._per_step) - self.first_slot // self._per_step

    def step_of(self, slot: int) -> int:
        """Returns the number of a slot's step, counted from that of the first slot."""
        return slot // self._per_step - self.first_slot // self._per_step

    def begins_step(self, slot: int) -> bool:
        """Returns whether a slot is the first of its step that is made."""
        return slot == self.first_slot or slot % self._per_step == 0

    def units(self, step: int) -> list[Unit]:
        """Returns the units of a step, in the order of slots, ranks and parts."""
        return [unit for slot in self._slots_of(step) for unit in self._of_slot(slot)]

    def homes(self) -> list[list[int]]:
        """Returns the homes of the units of each step; looks at no sample."""
        return [
            [
                rank
                for slot in self._slots_of(step)
                for rank in self._ranks_in(slot)
                for _ in range(num_parts_of(self._length(rank, slot), self.num_parts, self._least))
            ]
            for step in range(self.num_steps)
        ]

    def _slots_of(self, step: int) -> range:
        begin = (step + self.first_slot // self._per_step) * self._per_step
        end = min(begin + self._per_step, self.num_slots)
        return range(max(begin, self.first_slot), end)

    def _ranks_in(self, slot: int) -> list[int]:
        """Returns the ranks that have a batch in a slot."""
        return [rank for rank, (_, ends) in enumerate(self._batches) if slot + 1 < len(ends)]

    def _length(self, rank: int, slot: int) -> int:
        _, ends = self._batches[rank]
        return ends[slot + 1] - ends[slot]

    def _of_slot(self, slot: int) -> list[Unit]:
        here = self._ranks_in(slot)
        units = []
        for rank in here:
            samples, ends = self._batches[rank]
            batch = samples[ends[slot] : ends[slot + 1]].tolist()
            share = len(self._batches) / len(here)
            for part in split(batch, self.num_parts, self._least):
                units.append(Unit(rank, part, share * len(part) / max(1, len(batch))))
        return units


def longest_of(batches: Sequence[Batches]) -> int:
    """Returns how many samples the longest batch of any rank has."""
    return max((length for _, lengths in batches for length in lengths), default=0)


def num_parts_of(num_samples: int, most: int, least: int) -> int:
    """Returns into how many parts a batch is split.

    Args:
        num_samples: how many samples the batch has
        most: the most parts
        least: how many samples each part has at least, where the batch has as many
    """
    return max(1, min(most, num_samples // least))


def split(batch: list[int], most: int, least: int) -> list[list[int]]:
    """Splits a batch into parts of nearly equal size: see `num_parts_of`."""
    num_parts = num_parts_of(len(batch), most, least)
    bounds = [len(batch) * part // num_parts for part in range(num_parts + 1)]
    return [batch[begin:end] for begin, end in pairwise(bounds)]


def gather(net: Transport, own: Mapping[int, Sequence[list[int]]], num_homes: int) -> list[Batches]:
    """Returns the batches of all homes, of which each rank has some; ranks call it together."""
    packed = [word for home, batches in own.items() for word in (home, *_packed(batches))]
    gathered: dict[int, Batches] = {}
    for theirs in net.all_gather(torch.tensor(packed, dtype=torch.int64)).wait():
        while len(theirs):
            home = int(theirs[0])
            gathered[home], theirs = _unpacked(theirs[1:])
    return [gathered[home] for home in range(num_homes)]


def _packed(batches: Sequence[list[int]]) -> list[int]:
    return [len(batches), *map(len, batches), *(sample for batch in batches for sample in batch)]


def _unpacked(words: Tensor) -> tuple[Batches, Tensor]:
    """Returns the batches that stand first in what ranks tell each other, and the rest."""
    num = int(words[0])
    lengths = words[1 : 1 + num].tolist()
    end = 1 + num + sum(lengths)
    return (words[1 + num : end], lengths), words[end:]


def give(net: Transport, batches: Sequence[Batches], giver: int) -> list[Batches]:
    """Returns a rank's batches on all ranks, which call it together."""
    own = [
        word for samples, lengths in batches for word in (len(lengths), *lengths, *samples.tolist())
    ]
    size = net.broadcast(torch.tensor([len(own)]), src=giver).wait()
    words = torch.tensor(own) if net.rank == giver else torch.zeros(int(size), dtype=torch.int64)
    net.broadcast(words, src=giver).wait()
    given: list[Batches] = []
    while len(words):
        first, words = _unpacked(words)
        given.append(first)
    return given
