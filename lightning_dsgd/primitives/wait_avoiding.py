"""The first-come collective: a sum over a group of ranks that nobody has to wait for.

A *version* v = 0, 1, 2, ... is one round of sums, one sum in each group of ranks.  Each rank has a
lane that executes all versions, each once, in order.  The training thread *arrives* at versions, in
order too.

1. **Activation.**  The first rank to arrive at v tells the ranks at distance 1, 2, 4, ... after it;
   whoever hears of v for the first time, or arrives before it has, does the same, at once.  The
   paths on which the news first travel are the binomial tree rooted at the first rank.  Several
   first ranks do no harm.  An activation of v is one of all versions before v.
2. **Execution.**  A lane executes v once v is activated: it asks the member for its contribution
   and takes part in the all-reduce of its group.  The training thread need not have arrived: the
   member then contributes what it has, *passively*.  A lane that is behind catches up in order, so
   messages of v + 1 wait for v.
3. **Where arrival is needed.**  Global versions, and those in which a rank is alone in its group,
   are executed only once the own training thread has arrived.  `Grace` is how long a lane waits for
   that in all other versions; infinite, it makes the collective a synchronous one.
4. **Arrival.**  `arrive(v)` blocks the training thread until v is executed here.  The lane tells
   the member beforehand (`arrived`), or, when v was executed without it, asks it to make do with
   the newest sum (`late`).  All calls of the member happen in the lane, between all-reduces: while
   `arrive` blocks the training thread, what both use needs no lock.
5. **A single activator.**  Where the member names the only rank that activates v (`activator`), the
   others tell that rank that they have arrived, and it acknowledges.  It activates when it arrives
   itself, or, once it has run out, as soon as somebody tells it so.
6. **Running out.**  A rank that stops to arrive calls `settle`.  Its lane goes on as if it had
   arrived at whatever others activate.  When all ranks have called it, they agree on the last
   version V that anyone arrived at, and execute all up to V.  From there on a lane passes nothing
   on, and says so to those that it used to tell (`_LAST`).  It is through when it has heard this
   from all who tell it, and an acknowledgement for whatever it has told an activator: messages
   between two ranks arrive in order, so none is left.  Every rank goes on with V + 1.  A rank sends
   about 3 log2 P messages for this.

7. **On a device** a rank has arrived once its device has made the step, and not when the host has
   queued it.  A training thread that waits for the sum waits for its device before it arrives.  One
   that does not wait tells its lane (`Lane.tell`), which hears of the arrival once the mark behind
   the step has passed.  What is contributed has always been made (`ContributedAhead`), so no sum
   waits for a kernel.  `Grace` goes from the end of one step on the device to that of the next.

Why nobody waits for ever: a lane that knows of v has passed it on before it can block in the sum of
v, and blocks in no later one; so once v is activated, all come to know of v, or are in sums of
earlier versions, of which the same holds.  A single activator comes to know that it is waited for:
it arrives, or runs out, and whoever arrived before has told it.  `_LAST` and acknowledgements wait
for nothing but a lane's earlier sums.  An arrival that is under way ends with its kernel; until
then its rank is one that has not arrived.

Versions behind: at a group version, the contribution of a rank may be as old as its last arrival.
It cannot be older than the last global version, which needed its arrival.

Legend: v version, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from lightning_dsgd.agreement import largest
from lightning_dsgd.devices import PASSED, Mark
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import ANY, Timeout, Transport

GRACE_SHARE: Final = 0.125
"""How long a round waits for a rank by default, as a share of the time of a local step."""

_ARRIVED, _ACTIVATE, _ACTIVATE_IF_SETTLED, _ACKNOWLEDGE, _SETTLE, _FINISH, _LAST = range(7)


class Member(Protocol):
    """Brings one rank's contribution to the collective; called by its lane."""

    def group(self, version: int) -> Sequence[int]:
        """Returns the ranks that sum up with this one, itself among them; the same on each."""
        ...

    def is_global(self, version: int) -> bool:
        """Returns whether every rank must have arrived by itself."""
        ...

    def activator(self, version: int) -> int | None:
        """Returns the only rank whose arrival activates the version; None: any rank's does."""
        ...

    def arrived(self, version: int) -> None:
        """Notes that the training thread is in time: its newest state may be contributed."""
        ...

    def contribute(self, version: int) -> Tensor:
        """Returns the tensor to sum up, which the sum overwrites."""
        ...

    def reduced(self, version: int, group_size: int) -> None:
        """Uses the tensor that was contributed, which now holds the sum over the group."""
        ...

    def late(self, version: int) -> None:
        """Notes that the training thread has arrived at a version that was executed before."""
        ...

    def settled(self, version: int) -> None:
        """Settles after this version: all ranks stand still, no training thread goes on yet."""
        ...


class Grace:
    """Knows how long an activated version waits for the own training thread.

    The training thread says when it begins and ends to compute a step; the lane asks how long.
    A step ends when the device has made it.  One that the device has not made yet is measured
    together with those that follow, of which it takes the mean.

    Args:
        net: the network whose clock it reads
        seconds: how long; None means `GRACE_SHARE` of the last step, and before one was measured,
            of what the first has taken so far
    """

    def __init__(self, net: Transport, seconds: float | None) -> None:
        self._net = net
        self._given_s = seconds
        self._last_s: float | None = None  # what the last step took that was measured
        self._began_at: float | None = net.now()
        self._num_steps = 0  # that have not been measured

    def step_ends(self, made: Mark = PASSED) -> None:
        """Notes that the training thread has computed a step, and is about to arrive."""
        self._num_steps += 1
        if not made.has_passed():
            return
        if self._began_at is not None:
            self._last_s = (self._net.now() - self._began_at) / self._num_steps
        self._num_steps = 0

    def step_begins(self) -> None:
        """Notes that the training thread goes on to compute."""
        if not self._num_steps:
            self._began_at = self._net.now()

    def stand_still(self) -> None:
        """Notes that what comes next, such as an evaluation, is no step; it may be the first."""
        self._began_at = self._net.now() if self._last_s is None else None
        self._num_steps = 0

    def seconds(self, now: float) -> float:
        """Returns how long a version that is executed from now on waits."""
        if self._given_s is not None:
            return self._given_s
        last_s, began_at = self._last_s, self._began_at
        if last_s is None:
            last_s = 0.0 if began_at is None else (now - began_at) / (1 + self._num_steps)
        return GRACE_SHARE * last_s

    @property
    def is_endless(self) -> bool:
        """Whether every version waits for its arrival."""
        return self._given_s is not None and math.isinf(self._given_s)


def exact(net: Transport, x: Tensor, group: Sequence[int]) -> None:
    """Puts the sum over the group into x, as the transport sums."""
    net.all_reduce(x, group).wait()


class WaitAvoiding:
    """Takes one rank's part in a series of first-come collectives.

    Args:
        net: the network, with channels of its own
        member: what this rank contributes, and what it does with the sums
        grace: how long an activated version waits for the own training thread
        first_version: where to begin, the same on all ranks
        all_reduce: puts the sum over a group of ranks into a tensor; called by the lane
    """

    def __init__(
        self,
        net: Transport,
        member: Member,
        grace: Grace,
        first_version: int = 0,
        all_reduce: Callable[[Transport, Tensor, Sequence[int]], None] = exact,
    ) -> None:
        self.next_version = first_version
        """The first version that this rank has not executed."""
        self._member = member
        self._grace = grace
        self._all_reduce = all_reduce
        self._me = net.rank
        self._home = net.sub("home")  # where the training thread is answered
        self._newest_arrival = self._activated = self._arrived = first_version - 1
        self._awaited = -1  # the version whose execution the training thread waits for
        self._is_settled = False
        self._asked_for = -1  # the newest version that others wait for this rank to activate
        self._num_unacknowledged = 0
        size = net.world_size  # what is passed on to 1, 2, 4, ... ahead reaches all in log2 P hops
        self._tells = topology.out_peers("exponential", 0, net.rank, size, num_peers=size)
        self._num_done = 0  # of as many that tell this rank, how many pass nothing on any more
        self._finish_at: int | None = None
        self._lane = net.spawn_lane(self._serve, "wait-avoiding")

    # ---- the training thread ----

    def arrive(self, version: int, wait_for: int | None = None) -> None:
        """Arrives, and waits until this rank has executed the version, or an earlier one.

        Args:
            version: the version at which this rank arrives, one more than the last time
            wait_for: the version to wait for; -1: none
        """
        wait_for = version if wait_for is None else wait_for
        self._newest_arrival = version
        self._tell(_ARRIVED, version, wait_for)
        if wait_for >= 0:
            self._answer()

    def settle(self) -> int:
        """Serves the others until no rank arrives any more; returns all ranks' next version."""
        self._tell(_SETTLE)
        [last] = largest(self._home, self._newest_arrival)  # known once all ranks are here
        self._tell(_FINISH, last)
        self._answer()
        self._home.barrier().wait()  # nobody arrives at the next version before all are through
        self._newest_arrival = last
        return last + 1

    def stop(self) -> None:
        """Ends the lane; `settle` has left nothing to execute."""
        self._lane.stop()

    def _tell(self, kind: int, a: int = 0, b: int = 0) -> None:
        self._lane.check()
        self._lane.tell(torch.tensor([kind, a, b]))

    def _answer(self) -> None:
        self._home.recv(_WORDS, self._me).wait()

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            while not self._may_execute():
                self._hear(net, math.inf)
            self._wait_for_own_arrival(net)
            self._execute(net)

    def _execute(self, net: Transport) -> None:
        version = self.next_version
        group = self._member.group(version)
        self._all_reduce(net, self._member.contribute(version), group)
        self.next_version += 1
        self._member.reduced(version, len(group))
        if self._awaited == version:
            self._awaited = -1
            self._reply()

    def _may_execute(self) -> bool:
        self._rest_if_finished()
        version = self.next_version
        if self._activated < version:
            return False
        has_arrived = self._arrived >= version or self._is_settled
        return has_arrived or not self._needs_arrival(version)

    def _needs_arrival(self, version: int) -> bool:
        return (
            self._grace.is_endless
            or self._member.is_global(version)
            or len(self._member.group(version)) == 1
        )

    def _wait_for_own_arrival(self, net: Transport) -> None:
        deadline = net.now() + self._grace.seconds(net.now())
        while self._arrived < self.next_version and not self._is_settled:
            left = deadline - net.now()
            if left <= 0:
                return
            try:
                self._hear(net, left)
            except Timeout:
                return

    def _hear(self, net: Transport, timeout_s: float) -> None:
        kind, a, b = net.recv(_WORDS, ANY).wait(timeout_s).tolist()
        if kind == _ARRIVED:
            self._hear_of_own_arrival(net, a, wait_for=b)
        elif kind == _ACTIVATE:
            self._activate(net, a)
        elif kind == _ACTIVATE_IF_SETTLED:
            net.send(torch.tensor([_ACKNOWLEDGE, 0, 0]), b)
            self._asked_for = max(self._asked_for, a)
            self._activate_if_settled(net)
        elif kind == _ACKNOWLEDGE:
            self._num_unacknowledged -= 1
        elif kind == _SETTLE:
            self._is_settled = True
            self._activate_if_settled(net)
        elif kind == _FINISH:
            self._finish_at = a
            self._activated = max(self._activated, a)
            self._tell_neighbours(net, _LAST)
        else:
            self._num_done += 1

    def _hear_of_own_arrival(self, net: Transport, version: int, wait_for: int) -> None:
        self._arrived = version
        if version < self.next_version:
            self._member.late(version)
        else:
            self._member.arrived(version)
            self._activate_or_ask(net, version)
        if 0 <= wait_for < self.next_version:
            self._reply()
        else:
            self._awaited = wait_for

    def _activate_or_ask(self, net: Transport, version: int) -> None:
        activator = self._member.activator(version)
        if activator in (None, self._me):
            self._activate(net, version)
        elif version > self._activated:
            self._num_unacknowledged += 1
            net.send(torch.tensor([_ACTIVATE_IF_SETTLED, version, self._me]), activator)

    def _activate_if_settled(self, net: Transport) -> None:
        if self._is_settled:
            self._activate(net, self._asked_for)

    def _activate(self, net: Transport, version: int) -> None:
        if version > self._activated:
            self._activated = version
            self._tell_neighbours(net, _ACTIVATE, version)

    def _tell_neighbours(self, net: Transport, kind: int, version: int = 0) -> None:
        for rank in self._tells:
            net.send(torch.tensor([kind, version, 0]), rank)

    def _reply(self) -> None:
        self._home.send(_WORDS, self._me)

    def _rest_if_finished(self) -> None:
        is_through = self._num_done == len(self._tells) and not self._num_unacknowledged
        if self._finish_at is not None and self.next_version > self._finish_at and is_through:
            self._member.settled(self._finish_at)
            self._arrived = self._activated = self._finish_at
            self._finish_at = None
            self._num_done = 0
            self._is_settled = False
            self._reply()


_WORDS = torch.empty(0, dtype=torch.int64)
