"""What a lane averages on behalf of a training thread that goes on: a copy, and corrections.

    training thread   publish:   x <- x + c,  c <- 0,  y <- x
    lane              correct:   y <- y + d,  c <- c + d

Legend: x the weights, which only the training thread touches; y the published copy, what the
others are told; c the corrections that x does not have yet; d half the difference to a partner's.

At all times y is what x was when it was published, and all corrections since.  What the optimizer
adds to x in the meantime is neither lost nor torn: it is published the next time.  Two partners
take the same d, one of them with the opposite sign, so the sum of x + c over all ranks is kept.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Published:
    """The published copy of one rank's weights.  Memory: 2 |x|."""

    def __init__(self, x: Tensor) -> None:
        self._y = x.clone()
        self._c = torch.zeros_like(x)
        self._is_corrected = False
        self._lock = threading.Lock()  # held for passes over memory, never while waiting for others

    def publish(self, x: Tensor) -> None:
        """Works the corrections into x, and publishes it."""
        with self._lock:
            if self._is_corrected:
                x += self._c
                self._c.zero_()
                self._is_corrected = False
            self._y.copy_(x)

    def snapshot(self) -> Tensor:
        """A copy of what is published, corrections included."""
        with self._lock:
            return self._y.clone()

    def correct(self, d: Tensor) -> None:
        """Adds d to what is published, and, the next time, to x."""
        with self._lock:
            self._y += d
            self._c += d
            self._is_corrected = True

    def meet(self, theirs: Tensor) -> Tensor:
        """Goes halfway to a partner's copy; gives the way that is left to the partner."""
        with self._lock:
            d = (self._y - theirs).mul_(0.5)
            self._y -= d
            self._c -= d
            self._is_corrected = True
        return d
