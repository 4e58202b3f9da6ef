"""Means of gradients that a lane makes beside the training thread, in pieces, the last one first.

    training thread   hand_over(g, begin) ...  hand_over(g, 0)  ->  take_mean(g)
    lane              asks who steps;  averages a piece once all ranks have handed it over;  ...

A round is a step's: it has all pieces.  It works in g itself; with a delay, in one of two buffers
in turn, of which the other one holds the mean that comes next.  The lane owns what it works in, and
what the average keeps of it, from a round's first piece to its answer.

A rank that stands still serves rounds with zeros, until a round in which no rank steps.  That, and
what `rounds` says, is why nobody waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dsgd.agreement import num_active
from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.primitives.rounds import Rounds
from lightning_dsgd.transport import Transport

Average = Callable[[Transport, Tensor, slice, int, int], None]
"""Puts the mean over the ranks into a piece: net, the piece, its place, own weight, all weights."""


class Pieces:
    """Averages gradients in a lane, piece by piece.

    Attributes:
        has_mean: whether a mean waits for the next step, while all ranks stand still
        num_active: the weight of all ranks in the last round that this rank has waited for

    Args:
        net: the network of the ranks that average
        x: the weights, like which gradients are laid out
        average: runs in the lane
        weight: returns how much this rank's next step counts
        num_pieces: into how many pieces of equal size a gradient is cut
        delay: 1 if the mean of a step is applied in the next one, else 0
    """

    def __init__(
        self,
        net: Transport,
        x: Tensor,
        average: Average,
        *,
        weight: Callable[[], int],
        num_pieces: int,
        delay: int = 0,
    ) -> None:
        self.has_mean = False
        self.num_active = 0
        self._average, self._weight = average, weight
        bounds = evenly(len(x), num_pieces)
        self._spans = [slice(*pair) for pair in pairwise(bounds)][::-1]
        self._buffers = [torch.zeros_like(x) for _ in range(2 * delay)]
        self._turn = self._num_told = 0
        self._works: deque[Tensor] = deque()  # what the rounds under way work in
        self._rounds = Rounds(net, self._sum, "averager")

    # ---- the training thread ----

    @property
    def mean(self) -> Tensor:
        """The mean of the round before, with a delay."""
        return self._buffers[self._turn]

    def hand_over(self, g: Tensor, begin: int) -> None:
        """Hands over all pieces of g from an element on that the lane does not have yet."""
        work = self._buffers[1 - self._turn] if self._buffers else g
        while self._num_told < len(self._spans) and self._spans[self._num_told].start >= begin:
            span = self._spans[self._num_told]
            if self._buffers:
                work[span] = g[span]
            self._tell(work)

    def take_mean(self, g: Tensor) -> None:
        """Waits for the mean that this step applies; all pieces have been handed over."""
        self._num_told = 0
        if not self._buffers:
            self._await()
            return
        if self._rounds.num_under_way > 1:
            self._await()
            self.has_mean = True
        if self.has_mean:
            g.copy_(self.mean)
        else:
            g.zero_()
        self.has_mean = False
        self._turn = 1 - self._turn

    def complete(self) -> bool:
        """Ends a round of which this rank has handed over pieces, but makes no step.

        So it is where other parameters are trained than in the step before.  Its mean is dropped.
        """
        if not self._num_told:
            return False
        for place in range(self._num_told, len(self._spans)):
            self._work[self._spans[place]].zero_()
            self._tell(self._work)
        self._num_told = 0
        if self._rounds.num_under_way > 1:
            self._await()
            self.has_mean = True
        self._await()
        return True

    def serve(self, x: Tensor) -> bool:
        """Takes part in a round with a gradient of zero; returns False once all stand still."""
        if self._rounds.num_under_way:  # with a delay: of the last step
            self._await()
            self.has_mean = True
        work = self._buffers[1 - self._turn].zero_() if self._buffers else torch.zeros_like(x)
        self._tell(work, stands_still=True)
        self._num_told = 0
        is_made = self._await() > 0
        if is_made and self._buffers:
            self._turn = 1 - self._turn
            self.has_mean = True
        return is_made

    def restore(self, mean: Tensor) -> None:
        """Takes the mean over that waits for the next step."""
        self.mean.copy_(mean)
        self.has_mean = True

    def check(self) -> None:
        """Raises the lane's failure, if it has failed."""
        self._rounds.check()

    def stop(self) -> None:
        """Ends the lane; never waits for another rank."""
        self._rounds.stop()

    def _tell(self, work: Tensor, *, stands_still: bool = False) -> None:
        words = [0 if stands_still else self._weight()]
        if self._num_told:
            self._rounds.add(words)
        else:
            self._work = work
            self._works.append(work)
            self._rounds.ask(words)
        self._num_told += 1

    def _await(self) -> int:
        [total] = self._rounds.wait()
        self.num_active = total
        return total

    # ---- the lane ----

    def _sum(self, net: Transport, words: Tensor) -> Tensor:
        """Makes a round, a piece once it has been handed over; returns the weight of all ranks."""
        [weight] = words.tolist()
        work = self._works.popleft()
        total = num_active(net, active=weight)
        for place, span in enumerate(self._spans if total else []):
            if place and weight:
                self._rounds.hear(net)
            self._average(net, work[span], span, weight, total)
        return torch.tensor([total])
