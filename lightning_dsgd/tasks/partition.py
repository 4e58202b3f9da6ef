"""How PopSGD's paper deals out the data: every part to two ranks, several passes an epoch.

Nadiradze et al., https://arxiv.org/abs/1910.12308, section 6: "At the beginning of each epoch, we
shuffle the dataset and split it into partitions, ensuring that each partition will be assigned to
exactly two processes.  We define a fixed constant mult, which counts the number of times each
process will iterate through its partition in an epoch."  So every sample is seen 2 mult times an
epoch; the paper divides the number of epochs by mult.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler


class PopSGDSampler(DistributedSampler[int]):
    """Draws the indices of one rank.

    Lightning leaves a DistributedSampler in its place, and tells the sampler of every new epoch.

    With an odd number of ranks there are as many parts as ranks, half as large, and rank r holds
    the parts r and r + 1: so every sample is still held by two ranks.  What is left over when the
    parts are made equally large sits out one epoch.

    Args:
        dataset: the data set that is dealt out.
        world_size: number of ranks.
        rank: the rank whose indices are drawn.
        mult: passes over its part that a rank makes in an epoch.
        seed: the seed of the shuffling, the same on all ranks.
    """

    def __init__(
        self, dataset: Dataset[Any], world_size: int, rank: int, mult: int = 1, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, seed=seed)
        if mult < 1:
            raise ValueError(f"mult must be at least 1, got mult={mult}")
        size = len(dataset)  # type: ignore[arg-type]
        if size < world_size:
            raise ValueError(
                f"there must be a sample for each rank, got {size} samples with "
                f"world_size={world_size}"
            )
        self.mult = mult
        self.size = size
        half = size // world_size
        self.part_size = size if world_size == 1 else 2 * half
        self.begin = (rank if world_size % 2 else rank - rank % 2) * half

    def __len__(self) -> int:
        return self.mult * self.part_size

    def __iter__(self) -> Iterator[int]:
        def permutation(size: int, *seeds: int) -> torch.Tensor:
            seed = hash((self.seed, self.epoch, *seeds)) % 2**63
            return torch.randperm(size, generator=torch.Generator().manual_seed(seed))

        shuffled = permutation(self.size)
        places = torch.arange(self.begin, self.begin + self.part_size)
        if self.num_replicas > 1:
            places %= self.num_replicas * (self.part_size // 2)
        part = shuffled[places]
        for k in range(self.mult):
            yield from part[permutation(self.part_size, self.rank, k)].tolist()
