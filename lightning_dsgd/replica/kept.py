"""How much of all ranks' updates the consensus contains: the metric `updates_kept`.

    kept = <x - begin, u> / <u, u>

Legend: x the consensus, begin what it was in the beginning, u the sum of all updates, each the mean
over all ranks.  It is measured on one to two thousand entries of x, which a step reads twice.

Where ranks step together, with the mean of their gradients, one that has run out of data makes no
updates, but takes over what the others have come to.  So of each such team only those count that
have made the most updates since the last consensus.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.agreement import average
from lightning_dsgd.transport import Transport

NUM_MEASURED: Final = 1024


class UpdatesKept:
    """Measures which share of all updates to one flat tensor of weights is kept.

    Attributes:
        share: the share at the last consensus; None before the first consensus or update
    """

    share: float | None

    def __init__(self, x: Tensor) -> None:
        self._len = len(x)
        self._every = max(1, len(x) // NUM_MEASURED)
        self.begin(x)

    def begin(self, x: Tensor) -> None:
        """Begins anew from these weights."""
        self.share = None
        self._begin = self._some_of(x)
        self._updates = torch.zeros_like(self._begin)  # all ranks', until the last consensus
        self._start_counting()

    def update_begins(self, x: Tensor) -> None:
        """Notes the weights; the optimizer is about to step."""
        self._before = self._some_of(x)

    def update_ends(self, x: Tensor) -> None:
        """Adds up the step that the optimizer has made."""
        self._mine += self._some_of(x) - self._before
        self._num_mine += 1

    def measure(self, net: Transport, consensus: Tensor, team_size: int) -> None:
        """Measures the share, on all ranks together; teams are of consecutive ranks."""
        nums = [int(num) for num in net.all_gather(torch.tensor([self._num_mine])).wait()]
        first = net.rank // team_size * team_size
        team = nums[first : first + team_size]
        share_of_team = (self._num_mine == max(team)) / team.count(max(team))
        means = torch.stack([self._begin, self._mine * (share_of_team * len(team))])
        average(net, means.view(-1))
        self._begin, updates = means
        self._updates += updates
        self._start_counting()
        squares = float(self._updates @ self._updates)
        if squares != 0:
            way = self._some_of(consensus) - self._begin
            self.share = float(way @ self._updates) / squares

    def state(self) -> dict[str, Any]:
        """Returns what a resume needs, at a consensus."""
        return {"len": self._len, "begin": self._begin, "updates": self._updates}

    def load(self, state: dict[str, Any] | None, x: Tensor) -> None:
        """Takes a state over; begins anew without one, or with one of another layout of x."""
        self.begin(x)
        if state is not None and state["len"] == self._len:
            self._begin, self._updates = (state[k].to(self._begin) for k in ("begin", "updates"))

    def _start_counting(self) -> None:
        self._mine = torch.zeros_like(self._begin)
        self._num_mine = 0

    def _some_of(self, x: Tensor) -> Tensor:
        wide = torch.float64 if devices.has_doubles(x.device) else torch.float32
        return x[:: self._every].to(wide, copy=True)
