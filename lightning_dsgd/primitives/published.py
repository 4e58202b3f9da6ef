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
`ContributedAhead` keep what was made before, which the lane uses until then:

    training thread   publish:   waits until q is made;  takes q up
       its stream                c <- x - c,  x <- c,  c becomes q      (if there is no c: q <- x)
    both              take up:   if q is made:  q <- q - c,  q becomes r
    lane              lend:      takes q up;  r is b too
                      correct:   gives b back;  r <- r + d,  c <- c - d   (if there is no c: -d)

Legend: q the newest publication; r the one before, with all corrections since; -c the corrections
that neither q nor x has; b what is lent, and must not change; d a correction.

**Memory.**  A letter that becomes another one keeps its memory.  Three pieces are enough for r, q,
c and b: if b is not r, there is no c.  For r leaves b only in `publish`, which leaves no c, and a
new c comes only when b is given back.  And what `publish` takes up leaves its letter q free.

**Who waits.**  The lane's stream waits for no kernel of the training: r, c and b have been made.
The training thread takes q up on a stream beside the one that trains, on which a slow kernel may be
queued.  The stream that trains waits for passes over memory of these two alone.  The training
thread waits for its own device, which is at most one step behind it, and so for no other rank.

**No half-written memory is read.**  q is written by the stream that trains, and read by the others
once the host has seen the mark behind it.  All else is written and read under the lock, by streams
that wait for the last pass before.  b is read without the lock, and nothing writes to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

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
    """`Published` on a device, which may still be computing the weights.  Memory: 3 |x|.

    Args:
        net: the network whose `timeout_s` and losses end the wait for the own device
        x: the weights
        step: the step of this first publication
    """

    _NUM_BUFFERS = 3

    def __init__(self, net: Transport, x: Tensor, step: int = -1) -> None:
        self._net = net
        self._port = port_of(x.device)
        self._beside = self._port.new()
        self._lock = threading.Lock()  # held while work is queued, never while it is waited for
        self._buffers = [torch.empty_like(x) for _ in range(self._NUM_BUFFERS)]
        self.restart(x, step)

    def restart(self, x: Tensor, step: int) -> None:
        """Begins with x as it is; earlier publications and corrections no longer count."""
        self._r = self._buffers[0].copy_(x)
        self._r_step = self._q_step = step
        self._q: Tensor | None = None
        self._c: Tensor | None = None
        self._b: Tensor | None = None
        self._made = PASSED  # behind what makes q
        self._used = self._port.mark()  # behind the last pass over memory that makes no q

    def publish(self, x: Tensor, step: int = -1) -> None:
        """Adds the corrections to x, and publishes x."""
        await_mark(self._net, self._made)
        with self._lock:
            with self._port.using(self._beside), self._passing():
                self._take_up()
            self._used.hold()
            if self._c is None:
                self._q = self._unused().copy_(x)
            else:
                self._q, self._c = torch.sub(x, self._c, out=self._c), None
                x.copy_(self._q)
            self._q_step, self._made = step, self._port.mark()

    def snapshot(self) -> Tensor:
        """Lends what is published and made, corrections included, until it is corrected."""
        with self._lock, self._passing():
            self._take_up()
            self._b = self._r
        return self._b

    def correct(self, d: Tensor) -> None:
        """Adds d to what is published, and to x the next time that x is published."""
        self._correct(d, 1)

    def meet(self, theirs: Tensor, wire_dtype: str) -> Tensor:
        """Goes halfway to a partner's copy, and overwrites it; returns the way left to the partner.

        The result is a message.
        """
        mine = self.snapshot()
        message = rounding.encode(torch.sub(mine, theirs, out=theirs).mul_(0.5), wire_dtype)
        self._correct(rounding.decode(message, like=mine), -1)
        return message

    def _correct(self, d: Tensor, sign: int) -> None:
        with self._lock, self._passing():
            self._b = None
            self._r.add_(d, alpha=sign)
            if self._c is None:
                self._c = torch.mul(d, -sign, out=self._unused())
            else:
                self._c.sub_(d, alpha=sign)

    def _take_up(self) -> None:
        """Has r be the newest publication, once that is made."""
        if self._q is not None and self._made.has_passed():
            if self._c is not None:
                self._q -= self._c
            self._r, self._q = self._q, None
            self._r_step = self._q_step

    def _unused(self) -> Tensor:
        """Returns a buffer that has no letter."""
        used = self._letters()
        return next(b for b in self._buffers if all(b is not other for other in used))

    def _letters(self) -> Sequence[Tensor | None]:
        return self._r, self._q, self._c, self._b

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        """Orders passes over memory, of streams that do not train, behind those before."""
        self._used.hold()
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
    """`Contributed` on a device, by ranks that do not wait for the sum.  Memory: 4 |x|.

        lane   contribution: lends b,  y <- b;  then y is summed over the group
               reduced:      b <- b - y / S
                             y / S becomes r             where r was not b:  r <- r - b
                             b becomes c                 where there is a c:  c <- c + b

    The corrections are those of `Contributed`: y / S - b.  As r, y is divided only if it is lent:
    mostly q is made before that.
    """

    _NUM_BUFFERS = 4

    contributed_at = -1

    def restart(self, x: Tensor, step: int) -> None:
        """Begins with x as it is; earlier publications and corrections no longer count."""
        super().restart(x, step)
        self._y: Tensor | None = None
        self._num_summed = 1  # of how many ranks r is the sum

    def contribution(self) -> Tensor:
        """Returns the tensor to sum up in place."""
        with self._lock, self._passing():
            self._take_up()
            if self._num_summed > 1:
                self._r /= self._num_summed
                self._num_summed = 1
            self._b, self.contributed_at = self._r, self._r_step
            self._y = self._unused().copy_(self._b)
        return self._y

    def reduced(self, group_size: int) -> None:
        """Turns the contribution, which holds the sum over so many ranks, into corrections."""
        with self._lock, self._passing():
            y, b = self._y, self._b
            assert y is not None, "a contribution was given"
            assert b is not None, "a contribution was given"
            is_newest = self._r is b
            b.addcdiv_(y, torch.full_like(y[:1], group_size), value=-1)
            if is_newest:
                self._r, self._num_summed = y, group_size
            else:
                self._r -= b
            self._c = b if self._c is None else self._c.add_(b)
            self._b = self._y = None

    def _take_up(self) -> None:
        before = self._r
        super()._take_up()
        if self._r is not before:
            self._num_summed = 1

    def take(self, x: Tensor) -> None:
        """Does nothing: no rank has waited for the mean."""

    def _letters(self) -> Sequence[Tensor | None]:
        return *super()._letters(), self._y


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
