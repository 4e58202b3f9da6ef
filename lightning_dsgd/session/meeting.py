"""What ranks tell each other at a meeting (`Session.meet`): what each comes for, and who is late.

**What a rank comes for**, and for which purposes ranks may meet:

    STOP, END, SAVE, MEET      it has done the batch after which all do something (`stopping`)
    VALIDATE, END_EPOCH        it validates; it has done all batches that it has in an epoch
    GO_ON, FINISHED            it has another epoch to train; it has no more to train
    END_TRAINING               it has trained
    REDUCE                     a sum or a mean over ranks
    OTHER                      a barrier, a broadcast, a checkpoint, an evaluation

A rank that comes for one of the first line goes on with its batches, and the others wait on.  Ranks
that come for purposes of one of the other lines go on together.  All others have come apart, and
would wait for each other in different places: each raises an error that names who is where.

**Which rank the others wait for**, from one meeting of all ranks to the next:

    elapsed_i   from the end of a meeting until rank i has come to the next one, and its device has
                made all that is queued by then
    held_up_i   how long rank i's training thread waited for other ranks meanwhile, in its steps
    idle_i  =   max_j elapsed_j - elapsed_i + held_up_i

All ranks leave a meeting at the same time, so no clock is compared.  The late rank is the one that
is least idle.  What all ranks wait alike, for the network, makes nobody late.

The purposes are votes, and the figures of lateness travel with them: nobody sends a message for the
figures, or waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.agreement import by_rank, everyones
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.session.stopping import END, MEET, SAVE, STOP
from lightning_dsgd.transport import Transport

OTHER: Final = 0
VALIDATE: Final = 5
END_EPOCH: Final = 6
GO_ON: Final = 7
FINISHED: Final = 8
END_TRAINING: Final = 9
REDUCE: Final = 10
NUM_PURPOSES: Final = 11

AFTER_BATCH: Final = (STOP, END, SAVE, MEET)
"""The purposes of ranks that go on with their batches."""
_TOGETHER: Final = ({VALIDATE, END_EPOCH}, {GO_ON, FINISHED})
_WORDS: Final = {
    OTHER: "a barrier, a broadcast, a checkpoint or an evaluation",
    VALIDATE: "a validation",
    END_EPOCH: "the end of its batches of an epoch",
    GO_ON: "the beginning of another epoch",
    FINISHED: "the end of its last epoch",
    END_TRAINING: "the end of its training",
    REDUCE: "a value over all ranks (sync_dist=True, or a decision of all)",
}

IDLE_SHARE: Final = 0.2
"""The share of the time beyond which others must be idle for a user to be told."""
LEAST_S = 5.0
"""The time that is judged together; in less, a rank may be late by chance."""
NUM_FIGURES: Final = 3
"""The number of figures that a rank brings along."""


def check_together(meetings: Transport, mine: int, votes: Tensor) -> None:
    """Raises `ValueError`, on every rank, where the votes are for what cannot be done together."""
    given = {purpose for purpose, count in enumerate(votes.tolist()) if count}
    if len(given) > 1 and given not in _TOGETHER:
        texts = everyones(meetings, f"{_WORDS[mine]}")
        raise ValueError(
            "all ranks must come to the same points of a training in the same order, got "
            f"{by_rank(texts)}; log the same values on all ranks, and save, evaluate and stop on "
            "all or on none"
        )


class Lateness:
    """Measures how late each rank is; the training thread alone uses it.

    Attributes:
        num_steps: the number of steps of this rank's optimizers since the last meeting
    """

    def __init__(self, net: Transport) -> None:
        self._net = net
        self._seconds = 0.0
        self._sums = torch.zeros(net.world_size, 2)  # of each rank: seconds idle, and steps
        self._named: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Begins to count, where all ranks leave a meeting."""
        self.num_steps = 0
        self._began_s, self._held_up_s = self._net.now(), self._net.counters.wait_s

    def figures(self) -> Tensor:
        """Returns this rank's figures where it comes to a meeting: microseconds, and steps."""
        elapsed_s = self._net.now() - self._began_s
        held_up_s = self._net.counters.wait_s - self._held_up_s
        return torch.tensor([int(1e6 * elapsed_s), int(1e6 * held_up_s), self.num_steps])

    def end(
        self,
        figures: Tensor,
        members: Sequence[int],
        algorithm: Algorithm,
        *,
        claims: bool,
        may_claim: bool = True,
    ) -> str:
        """Ends counting, where all ranks have met; returns a text that names new late ranks.

        Args:
            figures: what `figures` has returned on each rank, in the order of the ranks
            members: the ranks' numbers
            algorithm: how the ranks learn from one another
            claims: whether ranks claim their batches
            may_claim: whether ranks could claim their batches
        """
        elapsed_us, held_up_us, num_steps = figures.view(-1, NUM_FIGURES).unbind(1)
        self.begin()
        if not num_steps.any():  # between a standstill and a save, for one
            return ""
        idle_us = elapsed_us.max() - elapsed_us + held_up_us
        self._seconds += 1e-6 * int(elapsed_us.max())
        self._sums += torch.stack([1e-6 * idle_us, num_steps], 1)
        if self._seconds < LEAST_S or len(members) == 1:
            return ""
        seconds, sums = self._seconds, self._sums
        self._seconds, self._sums = 0.0, torch.zeros_like(sums)
        late = int(sums[:, 0].argmin())
        others = torch.cat([sums[:late], sums[late + 1 :]]).mean(0)
        idle_s, steps_of_others = others.tolist()
        idle_of_late_s, steps = sums[late].tolist()
        if idle_s - idle_of_late_s < IDLE_SHARE * seconds or members[late] in self._named:
            return ""
        self._named.add(members[late])
        name = f"rank {members[late]}"
        if claims:
            way_out = "the others wait for its last batch: have longer epochs, or smaller batches"
        elif algorithm.traits.lockstep:
            claimed = ', with data="claimed"' if may_claim else ""
            way_out = f'use a strategy that waits less, such as "popsgd"{claimed}'
        elif not may_claim:
            way_out = f"relieve {name}, or give it smaller batches"
        else:
            way_out = f'use data="claimed", which deals {name} fewer batches'
        return (
            f"{name} is late: of the last {seconds:.1f} s the other ranks were idle for "
            f"{idle_s:.1f} s ({idle_s / seconds:.0%}); its {steps:.0f} steps took "
            f"{seconds - idle_of_late_s:.1f} s, their {steps_of_others:.0f} took "
            f'{seconds - idle_s:.1f} s; {way_out} (page "Coming from DDP", "A slow rank"); '
            "StepTrace shows what it does"
        )
