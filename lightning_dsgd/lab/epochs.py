"""How simulated ranks are dealt the batches of a training.

    endless    each rank makes all its steps; nobody stands still before the end
    equal      the same, but all ranks stand still after each epoch, as Lightning does
    claimed    a rank takes the epoch's next batch while there is one, so a slow rank takes fewer

A claim takes no time, and none is made ahead of its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

EQUAL: Final = "equal"
CLAIMED: Final = "claimed"


def check(epoch_steps: int | None, data: str, *, lockstep: bool = False) -> None:
    """Raises `ValueError` for epochs that cannot be."""
    if epoch_steps is not None and epoch_steps < 1:
        raise ValueError(
            f"--epoch-steps must be at least 1, got --epoch-steps {epoch_steps}; try 30"
        )
    if data == CLAIMED and epoch_steps is None:
        raise ValueError(
            f"--data {CLAIMED} shares the batches of an epoch, got it with one endless epoch; try "
            "--epoch-steps 30"
        )
    if data == CLAIMED and lockstep:
        raise ValueError(
            f"data={CLAIMED} needs ranks that may make different numbers of steps, got it with a "
            f"strategy whose ranks step together; use data={EQUAL}"
        )


class Epochs:
    """Deals the batches of one training to all its ranks.

    Attributes:
        is_claimed: whether ranks claim them

    Args:
        num_steps: the steps of the job: all ranks together train on as many times P batches
        num_ranks: P
        epoch_steps: the steps of an epoch; None: one endless epoch
        data: "equal" or "claimed"
    """

    def __init__(
        self, num_steps: int, num_ranks: int, epoch_steps: int | None = None, data: str = EQUAL
    ) -> None:
        self.num_steps, self.num_ranks = num_steps, num_ranks
        self.epoch_steps = epoch_steps
        self.is_claimed = data == CLAIMED
        self._num_claimed = 0

    def batches(self, rank: int) -> Iterator[int | None]:
        """Returns the numbers of the batches for a rank; None: all ranks stand still."""
        every = self.epoch_steps or self.num_steps
        for begin in range(0, self.num_steps, every):
            end = min(self.num_steps, begin + every)
            if self.is_claimed:
                while self._num_claimed < end * self.num_ranks:
                    self._num_claimed += 1
                    yield self._num_claimed - 1
            else:
                yield from (step * self.num_ranks + rank for step in range(begin, end))
            if self.epoch_steps is not None:
                yield None

    def step_of(self, batch: int) -> int:
        """Returns the step that the job is at where a rank trains on this batch.

        With claims it follows all batches that were claimed by now.
        """
        return (self._num_claimed - 1 if self.is_claimed else batch) // self.num_ranks
