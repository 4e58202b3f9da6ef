"""Deals an epoch so that ranks with batches of different sizes make as many steps as each other.

    order of the epoch   | step 0: sizes[0] | sizes[1] | ... | step 1: sizes[0] | sizes[1] | ... |
    the rest             | is dealt in the same proportion; a rank's last batch is smaller, or none

So a step of all ranks has the samples that one process would have in a batch of sum(sizes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DistributedSampler


class BatchSizesSampler(DistributedSampler[int]):
    """Gives a rank its samples of each step, for a DataLoader of the same `batch_size`.

    Attributes:
        batch_size: this rank's

    Args:
        dataset: what is dealt; the same on all ranks
        sizes: the batch sizes of all ranks
        rank: whose samples these are
        shuffle: whether each epoch has another order
        seed: of that order, the same on all ranks
        drop_last: whether the rest of an epoch that is less than one step is left out
    """

    def __init__(
        self,
        dataset: Sized,
        sizes: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < len(sizes) or min(sizes) < 1:
            raise ValueError(
                "there must be a batch size of at least 1 for each rank, got "
                f"sizes={list(sizes)!r} and rank={rank}; list the sizes of all ranks"
            )
        self.batch_size = sizes[rank]
        whole: Any = dataset
        super().__init__(whole, len(sizes), rank, shuffle, seed, drop_last)
        self._num_samples, self._step = len(dataset), sum(sizes)
        ends = [sum(sizes[:rank]), sum(sizes[: rank + 1])]
        rest = 0 if drop_last else self._num_samples % self._step
        self._mine, self._rest = slice(*ends), slice(*(rest * end // self._step for end in ends))

    @classmethod
    def of_step(
        cls, dataset: Sized, batch_size: int, num_ranks: int, rank: int, **options: Any
    ) -> BatchSizesSampler:
        """Makes a sampler for a batch of all ranks that stays the same, however many there are.

        Args:
            dataset: what is dealt; the same on all ranks
            batch_size: how many samples all ranks have in a step
            num_ranks: how many ranks there are now
            rank: whose samples these are, of so many ranks
            **options: `shuffle`, `seed` and `drop_last`
        """
        ends = [batch_size * number // num_ranks for number in range(num_ranks + 1)]
        return cls(dataset, [end - begin for begin, end in pairwise(ends)], rank, **options)

    def __len__(self) -> int:
        num_steps = self._num_samples // self._step
        return sum(
            count * (each.stop - each.start)
            for count, each in ((num_steps, self._mine), (1, self._rest))
        )

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self._num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        for piece in torch.split(order, self._step):
            mine = self._mine if len(piece) == self._step else self._rest
            yield from piece[mine].tolist()
