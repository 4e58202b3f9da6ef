"""What a lane averages on behalf of a training thread that goes on: a copy, and corrections.

`Published` is for averages with one other rank, `Contributed` for sums over groups.  `Published`:

    training thread   publish:   x <- x + c,  c <- 0,  y <- x
    lane              correct:   y <- y + d,  c <- c + d

Legend: x the weights, which only the training thread touches; y the published copy, what the
others are told; c the corrections that x does not have yet; d half the difference to a partner's.

At all times y is what x was when it was published, and all corrections since.  What the optimizer
adds to x in the meantime is neither lost nor torn: it is published the next time.  Two partners
take the same d, one of them with the opposite sign, so the sum of x + c over all ranks is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dsgd.devices import StreamLock
from lightning_dsgd.primitives import rounding


class Published:
    """The published copy of one rank's weights.  Memory: 2 |x|."""

    def __init__(self, x: Tensor) -> None:
        self._y = x.clone()
        self._c = torch.zeros_like(x)
        self._is_corrected = False
        self._lock = StreamLock(x)  # held for passes over memory, never while waiting for others

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

    def meet(self, theirs: Tensor, wire_dtype: str) -> Tensor:
        """Goes halfway to a partner's copy; gives a message with the way left to the partner.

        Both go as far as the message says: what is rounded off neither of them goes.
        """
        with self._lock:
            message = rounding.encode((self._y - theirs).mul_(0.5), wire_dtype)
            d = rounding.decode(message, like=self._y)
            self._y -= d
            self._c -= d
            self._is_corrected = True
        return message


class Contributed:
    """What one rank contributes to sums over groups; each sum moves it to the mean of its group.

        training thread   publish:      x <- x + (y - p),   p <- x,   y <- x
        lane              contribution: b <- y,             y <- sum over the group
                          reduced:      y <- y / S          or, where p was replaced meanwhile,
                                        y <- p + (y / S - b)

    Legend: x the weights; p what x was when it was published last; y what is contributed, p and all
    corrections since; b what was contributed to the sum under way; S ranks in the group.

    The corrections of a group, y / S - b, add up to zero, and each rank works its own into x once:
    the sum of x + (y - p) over all ranks changes by the optimizers' updates, and by nothing else.
    While a sum is under way y is the lane's, so a training thread that comes meanwhile takes what
    it still lacks from b.

    Memory: 2 |x|; with b, which only those need who publish while a sum is under way, 3 |x|.
    """

    contributed_at = -1
    """The step at which the newest contribution was published."""

    def __init__(self, x: Tensor, *, while_summing: bool) -> None:
        self._p, self._y = x.clone(), x.clone()
        self._b = torch.empty_like(x) if while_summing else None
        self._published_at = -1
        self._is_corrected = self._is_summing = self._is_replaced = False
        self._lock = StreamLock(x)  # held for passes over memory, never while waiting for others

    def publish(self, x: Tensor, step: int) -> None:
        """Works the corrections into x, and publishes it."""
        with self._lock:
            y = self._y
            if self._is_summing:
                assert self._b is not None, "x is held until the sum is there"
                y, self._is_replaced = self._b, True
            if self._is_corrected:
                x += torch.sub(y, self._p, out=self._p)
                self._is_corrected = False
            self._p.copy_(x)
            if not self._is_summing:
                y.copy_(x)
            self._published_at = step

    def settle(self, x: Tensor, step: int) -> None:
        """All ranks stand still: works the last corrections in."""
        self.publish(x, step)

    def restart(self, x: Tensor, step: int) -> None:
        """Begins with x as it is: nothing that came before matters any more."""
        self._is_corrected = False
        self.publish(x, step)

    def contribution(self) -> Tensor:
        """What to sum up, in place."""
        with self._lock:
            self._is_summing, self._is_replaced = True, False
            self.contributed_at = self._published_at
            if self._b is not None:
                self._b.copy_(self._y)
        return self._y

    def reduced(self, group_size: int) -> None:
        """The contribution now holds the sum over so many ranks."""
        with self._lock:
            self._y /= group_size
            if self._is_replaced:
                assert self._b is not None
                self._y.sub_(self._b).add_(self._p)
            self._is_corrected, self._is_summing = True, False

    def take(self, x: Tensor) -> None:
        """Puts the mean into x, which is what was contributed."""
        x.copy_(self._y)
        self._p.copy_(self._y)
        self._is_corrected = False
