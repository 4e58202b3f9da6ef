"""Batches of different sizes on the ranks: `weigh_by="samples"`, and `BatchSizesSampler`.

    g_i <- (sum over the batches b of this step of n_b g_b) / n_i * (number of these batches)
    g   <- sum_i n_i g_i / sum_i n_i                      where gradients are averaged
    x   <- sum_i m_i x_i / sum_i m_i                      where weights are averaged

Legend: g_b the gradient that a batch of n_b samples adds, n_i the samples in this step of rank i,
m_i those since the last average.  A loss must be the mean over the samples of its batch.  Then g is
what one process makes of all ranks' batches put together, to rounding.

**It is an option.**  With `weigh_by="ranks"`, the default, every rank counts alike, as with DDP,
whatever its batch: so the last, smaller one of an epoch does.  With "samples" no other argument is
needed: sizes are read from the batches.

**How a size is known.**  It is the first dimension of the batch's tensors, as the Trainer or
`batches(loader)` gives it.  Where tensors differ in it, or there are none, the step is refused
until the user has called `count`.  `count` comes before the backward pass, in place of what the
batch says: tokens, or the nodes of a graph.  Where nobody gives batches, each call is one.

**What travels.**  One whole number, in the message that each exchange begins with anyway.  No rank
waits for anything that it did not wait for before.

**Accumulation.**  `p.grad` is kept in the unit of the newest batch: before a batch of another size
it is scaled by (size before) / (size now), and before the step to the mean of the rank's batches.
Where all batches of a rank have one size, nothing is scaled.  Several optimizers have windows of
their own.  A step that follows another without a batch between them counts the newest batch again.

**Precision.**  A rank scales what it sends by n_i P / N, which is near 1, so that sums keep their
range, also in fp16.  Where all ranks have as many samples the factor is 1, and the result the same
to the bit as without the option.  Clipping and the GradScaler's search for inf come after the sum.

**Which algorithms.**  Those in which all ranks average at one point (`Traits.weighs_samples`).
Gossip conserves the mean over the ranks, where all count alike.  To weigh it, each step would have
to be scaled by n_i P / N before it is averaged, and nobody knows N.  So gossip refuses the option.

The backward pass makes p.grad as always; `Session` calls before a batch, and around a step.

Threads: the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

_WAY_OUT: Final = (
    "call count(number of samples) of the strategy, or of decentralized(...), before each backward "
    "pass"
)


@dataclass
class _Window:
    """The batches since an optimizer's last step.

    Args:
        num_batches: how many there are
        num_samples: how many samples these have
        unit: of how many samples the gradient counts as the mean
        seen: a parameter, and its gradient when the newest batch began
    """

    num_batches: int = 0
    num_samples: int = 0
    unit: float = 0.0
    seen: tuple[Tensor, Tensor] | None = None


class Samples:
    """Knows of how many samples each optimizer's next step is made.

    Attributes:
        newest: how many samples the step of the optimizer whose turn it is has: one whole number

    Args:
        optimizers: returns all optimizers, as far as they are known
    """

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self.newest = torch.zeros(1, dtype=torch.int64)
        self._optimizers = optimizers
        self._windows: dict[int, _Window] = {}
        self._size: int | None = None  # None: unknown
        self._found = "no batch"
        self._is_from_batch = False

    def begin(self, batch: Any) -> None:
        """Begins a batch whose backward pass comes next."""
        sizes = set(_sizes(batch))
        self._size, self._is_from_batch = None, False
        self._found = f"a batch whose tensors have {sorted(sizes) or 'no'} samples"
        if len(sizes) == 1 and 0 not in sizes:
            self._add(sizes.pop())
            self._is_from_batch = True

    def count(self, num_samples: int) -> None:
        """Takes this for the number of samples of the batch; begins one where none has begun."""
        if int(num_samples) != num_samples or num_samples < 1:
            raise ValueError(
                "the number of samples must be a whole number of at least 1, got "
                f"count({num_samples!r}); leave a batch out that has none"
            )
        if self._is_from_batch:
            self._is_from_batch = False
            for _, window in self._known():
                window.num_batches -= 1
                window.num_samples -= self._size or 0
        self._add(int(num_samples))

    def before_update(self, optimizer: Optimizer) -> None:
        """Makes the gradients those of the mean over this step's samples; may be called again."""
        if self._size is None:
            raise ValueError(
                f'weigh_by="samples" must know how many samples a step has, got {self._found}; '
                f"iterate over batches(loader) where loops are your own, or {_WAY_OUT}"
            )
        window = self._windows.get(id(optimizer), _Window())
        self._forget_dropped(window)
        self.newest.fill_(window.num_samples or self._size)
        if window.num_batches:  # else the second step after a batch
            _scale(optimizer, window, window.num_samples / window.num_batches)

    def after_update(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer has stepped."""
        self._windows.pop(id(optimizer), None)

    def _known(self) -> Iterator[tuple[Optimizer, _Window]]:
        for optimizer in self._optimizers():
            yield optimizer, self._windows.setdefault(id(optimizer), _Window())

    def _add(self, size: int) -> None:
        self._size = size
        self.newest.fill_(size)  # what is sent during the backward pass is of one batch
        for optimizer, window in self._known():
            self._forget_dropped(window)
            seen = _smallest(optimizer)
            if seen is None:
                window.num_batches = window.num_samples = 0
            _scale(optimizer, window, size)
            window.num_batches += 1
            window.num_samples += size
            window.seen = seen

    def _forget_dropped(self, window: _Window) -> None:
        """Leaves the newest batch alone in a window whose gradients before were dropped.

        A backward pass adds to a gradient in its place, and makes another one where there is none.
        """
        if window.seen is not None and window.seen[0].grad is not window.seen[1]:
            window.num_batches, window.num_samples = 1, round(window.unit)
            window.seen = None


@torch.no_grad()
def _scale(optimizer: Optimizer, window: _Window, unit: float) -> None:
    """Has the gradients of a window's batches, if there are any, count in another unit."""
    before, window.unit = window.unit, unit
    if window.num_batches and before != unit and (gradients := _gradients(optimizer)):
        torch._foreach_mul_(gradients, before / unit)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in parameters if p.grad is not None]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in _trained(optimizer) if p.grad is not None]


def _smallest(optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
    """Returns the parameter with the smallest gradient, which is kept alive for a batch."""
    p = min(_trained(optimizer), key=Tensor.numel, default=None)
    return None if p is None or p.grad is None else (p, p.grad)


def _sizes(batch: Any) -> Iterator[int]:
    """Yields the first dimension of each tensor in nested containers."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield len(batch)
        return
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, each.name) for each in fields(batch)]
    elif isinstance(batch, Mapping):
        batch = list(batch.values())
    for each in batch if isinstance(batch, list | tuple) else ():
        yield from _sizes(each)


class BatchSizesSampler(DistributedSampler[int]):
    """Gives a rank its samples of each step, for a DataLoader of the same `batch_size`.

    Ranks with batches of different sizes make as many steps as each other:

        order of the epoch   | step 0: sizes[0] | sizes[1] | ... | step 1: sizes[0] | ... |
        the rest             | is dealt in the same proportion; a rank's last batch is smaller, or
                               none

    So a step of all ranks has the samples that one process would have in a batch of sum(sizes).

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
