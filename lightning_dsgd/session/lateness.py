"""Which rank the others wait for, from one meeting of all ranks to the next.

    elapsed_i   from the end of a meeting until rank i has come to the next one, and its device has
                made all that is queued by then
    held_up_i   how long rank i's training thread waited for other ranks meanwhile, in its steps
    idle_i  =   max_j elapsed_j - elapsed_i + held_up_i

All ranks leave a meeting at the same time, so no clock is compared.  The late rank is the one that
is least idle.  What all ranks wait alike, for the network, makes nobody late.

The figures travel with the votes of the meeting (`Session.meet`): nobody sends a message for them,
or waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.transport import Transport

IDLE_SHARE: Final = 0.2
"""The share of the time beyond which others must be idle for a user to be told."""
LEAST_S = 5.0
"""The time that is judged together; in less, a rank may be late by chance."""
NUM_FIGURES: Final = 3
"""The number of figures that a rank brings along."""


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
