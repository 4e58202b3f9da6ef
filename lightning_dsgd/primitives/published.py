"""What a lane averages on behalf of a training thread that goes on: a copy, and corrections.

`Published` is for averages with one other rank, `Contributed` for sums over groups.  `Published`:

    training thread   publish:   x <- x + c,  c <- 0,  y <- x
    lane              correct:   y <- y + d,  c <- c + d

Legend: x the weights, which only the training thread touches; y the published copy, what the
others are told; c the corrections that x does not have yet; d half the difference to a partner's.

At all times y is what x was when it was published, and all corrections since.  What the optimizer
adds to x in the meantime is neither lost nor torn: it is published the next time.  Two partners
take the same d, one of them with the opposite sign, so the sum of x + c over all ranks is kept.

**On a device** a training thread publishes x before the device has made it.  `PublishedAhead` and
`ContributedAhead` keep the publication before in a second buffer, which the lane uses until then:

    training thread   publish:   waits until q is made;  r, q <- q, r;   a, c <- c, 0
       its stream                x <- x + a,  q <- x,  a mark
    lane              y:         q + c once the mark has passed;  r + a + c before
                      correct:   c <- c + d

Legend: q the newest publication, r the one before, a the corrections that q has and r has not, c
those that neither has.

The lane's stream waits for no mark: what it reads has been made.  The stream that trains waits for
the lane's passes over memory alone.  The training thread waits for its own device, which is at most
one step behind it, and so for no other rank.  Both ends are bounded: a publication is used as soon
as it is made, and the one before is overwritten only after that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dsgd.buffers import copy_of
from lightning_dsgd.devices import PASSED, is_on_host, port_of
from lightning_dsgd.primitives import rounding
from lightning_dsgd.primitives.own_device import StreamLock, await_mark
from lightning_dsgd.transport import Transport


def publication_of(net: Transport, x: Tensor) -> Published | PublishedAhead:
    """Makes the published copy of these weights, while the training thread goes on."""
    return Published(x) if is_on_host(x) else PublishedAhead(net, x)


class Published:
    """Holds the published copy of one rank's weights.  Memory: 2 |x|."""

    def __init__(self, x: Tensor) -> None:
        self._y = x.clone()
        self._c = torch.zeros_like(x)
        self._is_corrected = False
        self._lock = StreamLock(x)  # held for passes over memory, never while waiting for others

    def publish(self, x: Tensor) -> None:
        """Adds the corrections to x, and publishes x."""
        with self._lock:
            if self._is_corrected:
                x += self._c
                self._c.zero_()
                self._is_corrected = False
            self._y.copy_(x)

    def snapshot(self) -> Tensor:
        """Returns a copy of what is published, corrections included."""
        with self._lock:
            return copy_of(self._y)

    def correct(self, d: Tensor) -> None:
        """Adds d to what is published, and to x the next time that x is published."""
        with self._lock:
            self._y += d
            self._c += d
            self._is_corrected = True

    def meet(self, theirs: Tensor, wire_dtype: str) -> Tensor:
        """Goes halfway to a partner's copy; returns a message with the way left to the partner.

        Both ranks go as far as the message says, so neither goes what was rounded off.
        """
        with self._lock:
            message = rounding.encode((self._y - theirs).mul_(0.5), wire_dtype)
            d = rounding.decode(message, like=self._y)
            self._y -= d
            self._c -= d
            self._is_corrected = True
        return message


class PublishedAhead:
    """`Published` on a device, which may still be computing the weights.  Memory: 4 |x|.

    Args:
        net: the network whose `timeout_s` and losses end the wait for the own device
        x: the weights
        step: the step of this first publication
    """

    def __init__(self, net: Transport, x: Tensor, step: int = -1) -> None:
        self._net = net
        self._port = port_of(x.device)
        self._lock = threading.Lock()  # held while work is queued, never while it is waited for
        self.restart(x, step)

    def restart(self, x: Tensor, step: int) -> None:
        """Begins with x as it is; earlier publications and corrections no longer count."""
        self._q, self._r = x.clone(), x.clone()
        self._a, self._c = torch.empty_like(x), torch.empty_like(x)
        self._has_a = self._has_c = False
        self._steps = step, step  # of r and q
        self._made = self._port.mark()
        self._used = PASSED  # behind the lane's last pass over memory

    def publish(self, x: Tensor, step: int = -1) -> None:
        """Adds the corrections to x, and publishes x."""
        await_mark(self._net, self._made)
        with self._lock:
            self._used.hold()
            self._q, self._r = self._r, self._q
            self._a, self._c = self._c, self._a
            self._has_a, self._has_c = self._has_c, False
            self._steps = self._steps[1], step
            if self._has_a:
                x += self._a
            self._q.copy_(x)
            self._made = self._port.mark()

    def snapshot(self) -> Tensor:
        """Returns a copy of what is published and computed, corrections included."""
        return self._snapshot()[0]

    def correct(self, d: Tensor) -> None:
        """Adds d to what is published, and to x the next time that x is published."""
        with self._using():
            self._add(d)

    def meet(self, theirs: Tensor, wire_dtype: str) -> Tensor:
        """Goes halfway to a partner's copy; returns a message with the way left to the partner."""
        y = self.snapshot()
        message = rounding.encode((y - theirs).mul_(0.5), wire_dtype)
        self.correct(rounding.decode(message, like=y).neg())
        return message

    def _snapshot(self) -> tuple[Tensor, int]:
        """Returns a copy, and the step at which the copy was published."""
        with self._using():
            if self._made.has_passed():
                y, step = self._q.clone(), self._steps[1]
            else:
                y, step = self._r.clone(), self._steps[0]
                if self._has_a:
                    y += self._a
            if self._has_c:
                y += self._c
        return y, step

    def _add(self, d: Tensor) -> None:
        if self._has_c:
            self._c += d
        else:
            self._c.copy_(d)
        self._has_c = True

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Holds the lock while the lane passes over memory, and marks the end on the device."""
        with self._lock:
            yield
            self._used = self._port.mark()


class Contributed:
    """Contributes one rank's weights to sums over groups; each sum moves it to its group's mean.

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
        """Adds the corrections to x, and publishes x."""
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

    def restart(self, x: Tensor, step: int) -> None:
        """Begins with x as it is; earlier publications and corrections no longer count."""
        self._is_corrected = False
        self.publish(x, step)

    def contribution(self) -> Tensor:
        """Returns the tensor to sum up in place."""
        with self._lock:
            self._is_summing, self._is_replaced = True, False
            self.contributed_at = self._published_at
            if self._b is not None:
                self._b.copy_(self._y)
        return self._y

    def reduced(self, group_size: int) -> None:
        """Turns the contribution, which holds the sum over so many ranks, into the mean."""
        with self._lock:
            self._y /= group_size
            if self._is_replaced:
                assert self._b is not None
                self._y.sub_(self._b).add_(self._p)
            self._is_corrected, self._is_summing = True, False

    def take(self, x: Tensor) -> None:
        """Puts the mean of what was contributed into x."""
        x.copy_(self._y)
        self._p.copy_(self._y)
        self._is_corrected = False


class ContributedAhead(PublishedAhead):
    """`Contributed` on a device, by ranks that do not wait for the sum.

    The corrections are the same: y / S - b.  Memory: 4 |x|; 6 |x| while a sum is under way.
    """

    contributed_at = -1

    def contribution(self) -> Tensor:
        """Returns the tensor to sum up in place."""
        self._b, self.contributed_at = self._snapshot()
        self._y = self._b.clone()
        return self._y

    def reduced(self, group_size: int) -> None:
        """Turns the contribution, which holds the sum over so many ranks, into the mean."""
        self.correct(self._y.div_(group_size).sub_(self._b))
        del self._b, self._y

    def take(self, x: Tensor) -> None:
        """Does nothing: no rank has waited for the mean."""


class InPlace:
    """Sums x itself, in place of `Contributed`, where each sum waits for all of its ranks.

    The training thread waits for the sum too.
    """

    contributed_at = -1

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._arrived_at = -1

    def publish(self, x: Tensor, step: int) -> None:
        self._arrived_at = step

    restart = publish

    def contribution(self) -> Tensor:
        self.contributed_at = self._arrived_at
        return self._x

    def reduced(self, group_size: int) -> None:
        self._x /= group_size

    def take(self, x: Tensor) -> None:
        """Does nothing: the mean is in x."""
