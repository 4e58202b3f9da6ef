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
   are executed only once the own training thread has arrived.  `grace_s` is how long a lane waits
   for that in all other versions; infinite, it makes the collective a synchronous one.  A lane
   whose contribution has become too old (`is_stale`) waits for the next arrival too; if the
   training thread is itself waiting, the lane takes what it has (`renew`).
4. **Arrival.**  `arrive(v)` blocks the training thread until v is executed here.  The lane tells
   the member beforehand (`arrived`), or, when v was executed without it, asks it to make do with
   the newest sum (`late`).  All calls of the member happen in the lane, between all-reduces: while
   `arrive` blocks the training thread, what both use needs no lock.
5. **Running out.**  A rank that stops to arrive calls `settle`.  Its lane goes on as if it had
   arrived at whatever others activate.  When all ranks have called it, they agree on the last
   version V that anyone arrived at, execute all up to V, take in every activation still under way,
   and only then return: no message is left, and every rank goes on with V + 1.

Why nobody waits for ever: a lane that knows of v has passed it on before it can block in the sum of
v, and blocks in no later one; so once any rank has arrived at v, all come to know of v, or are in
sums of earlier versions, of which the same holds.

Versions behind: at a group version, the contribution of a rank may be as old as its last arrival.
It cannot be older than the last global version, which needed its arrival.

Legend: v version, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.transport import ANY, Timeout, Transport

_ARRIVED, _ACTIVATE, _SETTLE, _SETTLED, _FINISH, _DRAIN = range(6)


class Member(Protocol):
    """What one rank brings to the collective; called by its lane."""

    def group(self, version: int) -> Sequence[int]:
        """The ranks, this one among them, that sum up with this one; the same on each of them."""
        ...

    def is_global(self, version: int) -> bool:
        """Whether every rank must have arrived by itself."""
        ...

    def activator(self, version: int) -> int | None:
        """The only rank whose arrival activates; None: any."""
        ...

    def arrived(self, version: int) -> None:
        """The training thread has arrived in time: its newest state may be contributed now."""
        ...

    def is_stale(self, version: int) -> bool:
        """Whether what it would contribute is too old, and has to be renewed first."""
        ...

    def renew(self) -> None:
        """The training thread is held here: what it has now may be contributed."""
        ...

    def contribute(self, version: int) -> Tensor:
        """What to add to the sum; overwritten with the sum."""
        ...

    def reduced(self, version: int, group_size: int) -> None:
        """The tensor that was contributed now holds the sum over the group."""
        ...

    def late(self, version: int) -> None:
        """The training thread has arrived at a version that was executed before."""
        ...


class WaitAvoiding:
    """One rank's part in a series of first-come collectives.

    Args:
        net: the network, with channels of its own
        member: what this rank contributes, and what it does with the sums
        grace_s: how long an activated version waits for the own training thread
        first_version: where to begin, the same on all ranks
    """

    def __init__(
        self, net: Transport, member: Member, grace_s: float = 0.0, first_version: int = 0
    ) -> None:
        self.grace_s = grace_s
        self.next_version = first_version
        """The first version that this rank has not executed."""
        self._member = member
        self._me = net.rank
        self._home = net.sub("home")  # where the training thread is answered
        self._newest_arrival = self._activated = self._arrived = first_version - 1
        self._awaited = -1  # the version whose execution the training thread waits for
        self._is_settled = False
        self._settled: set[int] = set()
        self._tells = topology.exponential_neighbours(net.rank, net.world_size)
        self._hears_from = topology.exponential_neighbours(net.rank, net.world_size, sign=-1)
        self._num_told = self._num_heard = 0
        self._finish_at: int | None = None
        self._is_finished = False
        self._num_to_hear: int | None = None
        self._lane = net.spawn_lane(self._serve, "wait-avoiding")

    # ---- the training thread ----

    def arrive(self, version: int, wait_for: int | None = None) -> None:
        """Arrives, and waits until the version, or an earlier one, is executed on this rank.

        Args:
            version: the one arrived at, one more than the last time
            wait_for: the one to wait for; -1: none
        """
        wait_for = version if wait_for is None else wait_for
        self._newest_arrival = version
        self._tell(_ARRIVED, version, wait_for)
        if wait_for >= 0:
            self._answer()

    def settle(self) -> int:
        """Serves the others until no rank arrives any more; gives the next version of all ranks."""
        self._tell(_SETTLE)
        self._home.barrier().wait()
        last = max(map(int, self._home.all_gather(torch.tensor([self._newest_arrival])).wait()))
        self._tell(_FINISH, last)
        num_told = self._home.all_gather(self._answer()).wait()
        self._tell(_DRAIN, sum(int(num_told[rank]) for rank in self._hears_from))
        self._answer()
        self._home.barrier().wait()  # nobody arrives at the next version before all have drained
        self._newest_arrival = last
        return last + 1

    def stop(self) -> None:
        """Ends the lane; nothing is left to execute after `settle`."""
        self._lane.stop()

    def _tell(self, kind: int, a: int = 0, b: int = 0) -> None:
        self._lane.check()
        self._lane.net.send(torch.tensor([kind, a, b]), self._me)

    def _answer(self) -> Tensor:
        return self._home.recv(_WORDS, self._me).wait()

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            while not self._may_execute():
                self._hear(net, math.inf)
            self._wait_for_own_arrival(net)
            self._execute(net)

    def _execute(self, net: Transport) -> None:
        version = self.next_version
        if self._holds_training:
            self._member.renew()
        group = self._member.group(version)
        net.all_reduce(self._member.contribute(version), group).wait()
        self.next_version += 1
        self._member.reduced(version, len(group))
        if self._awaited == version:
            self._awaited = -1
            self._reply()

    def _may_execute(self) -> bool:
        if self._finish_at is not None:
            self._report_if_finished()
        version = self.next_version
        if self._activated < version:
            return False
        if self._arrived < version and not self._is_settled and self._needs_arrival(version):
            return False
        return self._holds_training or not self._member.is_stale(version)

    @property
    def _holds_training(self) -> bool:
        """Whether the training thread waits for this lane, and leaves its state alone."""
        return self._is_settled or self._awaited >= 0

    def _needs_arrival(self, version: int) -> bool:
        return (
            math.isinf(self.grace_s)
            or self._member.is_global(version)
            or len(self._member.group(version)) == 1
        )

    def _wait_for_own_arrival(self, net: Transport) -> None:
        deadline = net.now() + self.grace_s
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
            self._num_heard += 1
            self._activate(net, a)
        elif kind == _SETTLE:
            self._is_settled = True
            self._add_settled(net, self._me)
        elif kind == _SETTLED:
            self._num_heard += 1
            self._add_settled(net, a)
            self._activate_if_due(net)
        elif kind == _FINISH:
            self._finish_at = a
            self._activated = max(self._activated, a)
        else:
            self._num_to_hear = a

    def _hear_of_own_arrival(self, net: Transport, version: int, wait_for: int) -> None:
        self._arrived = version
        if version < self.next_version:
            self._member.late(version)
        else:
            self._member.arrived(version)
            self._activate_if_due(net)
        if 0 <= wait_for < self.next_version:
            self._reply()
        else:
            self._awaited = wait_for

    def _activate_if_due(self, net: Transport) -> None:
        activator = self._member.activator(self._arrived)
        if activator in (None, self._me) or activator in self._settled:
            self._activate(net, self._arrived)

    def _activate(self, net: Transport, version: int) -> None:
        if version > self._activated:
            self._activated = version
            self._pass_on(net, _ACTIVATE, version)

    def _add_settled(self, net: Transport, rank: int) -> None:
        if rank not in self._settled:
            self._settled.add(rank)
            self._pass_on(net, _SETTLED, rank)

    def _pass_on(self, net: Transport, kind: int, what: int) -> None:
        if self._finish_at is None:  # else all ranks know already
            self._num_told += 1
            for rank in self._tells:
                net.send(torch.tensor([kind, what, 0]), rank)

    def _reply(self, number: int = 0) -> None:
        self._home.send(torch.tensor([number]), self._me)

    def _report_if_finished(self) -> None:
        assert self._finish_at is not None
        if self.next_version <= self._finish_at:
            return
        if not self._is_finished:
            self._is_finished = True
            self._reply(self._num_told)
        if self._num_heard == self._num_to_hear:
            self._arrived = self._activated = self._finish_at
            self._finish_at = self._num_to_hear = None
            self._num_told = self._num_heard = 0
            self._is_settled = self._is_finished = False
            self._settled.clear()
            self._reply()


_WORDS = torch.empty(0, dtype=torch.int64)
