"""What ranks send each other by torch's own calls, such as NCCL's: two as a pair, or many in parts.

A pair is an exchange, a push or a pull of two ranks:

    thread     exchange, push, pull: a mark behind what is to be sent; gives a `Pair`
    courier    once the mark has passed: asks for the ticket of the pair
    starter    once both have asked: one batched call of torch's, its send and receive side by side
    thread     wait, or done: until that is called, then until what is sent and received is there

**Who asks, and when.**  Both ranks know of each other beforehand, by step and seed.  Each asks
for its own end, in the order in which its threads have called.  It asks once its device has made
what it had queued.  So a kernel is launched when both ends can run: none spins for a rank whose
batch or kernel is slow, that has stopped, or that is lost.  Until then a push stays with its
sender.

**Two colours.**  A communicator runs what is launched on it one after another.  With a single one a
rank's pair waits for the rank's other pair, that one for the other pair of its partner, and so on:
a step of `sgp` among 16 ranks is 3.25 transfers long (`tests/transport/test_critical_path.py`).  So
there are two communicators, and a pair has a colour, which says on which of them it travels.  Where
the pairs of a step form circles, as those of `dpsgd` and `sgp` do, colours alternate along a circle
of even length (`colour_of`): both pairs of a rank run at once, and a step is one transfer long.
Elsewhere, as with random graphs, two pairs of a rank may have one colour; then one waits for the
other.  Nothing relies on colours but speed.

**Why there is no cycle.**  Pairs that share ranks need one order on all of these, and so do pairs
and sums.  Tickets give it, one for both communicators: a pair is a group of two, whose top is the
rank of the tree below which both are.  Take the first in that order that is not done.  All before
it are done on both of its ranks.  So nothing is before it on its communicator there, nor in a
hardware queue that streams share, and both run it.  Beside it a device may run one call of the
other colour, which waits for its own partner: a device must have room for two calls of NCCL's.
NCCL connects two ranks the first time that one sends to the other.  The starter, which launches
both colours, waits for the other's then, which comes to the same pair for the same reason.

**Why not one call for all pairs of a step**, which would need a single communicator.  A rank would
hold what one partner has asked for until the others ask, and that partner's kernel would spin.  A
call of only those whose tickets are there leaves a step of `sgp` 2.4 transfers long.

**Why nobody waits for ever.**  A thread waits for a ticket as for a message: a lost rank, a limit
or the end of its lane ends the wait.  What is asked for holds up nothing else, whatever the partner
does.  Once a rank is lost the starter aborts the communicators, which ends what is launched.

**Stops.**  What is sent may be empty: the ticket tells the partner, and nothing is launched for it.
So a rank says that it makes no more steps.

**Memory.**  torch makes a communicator for each pair whose send or receive is called by itself; in
a batch it takes the group's, here one of all ranks.  NCCL 2.30 has two pools for all that a
communicator sends and receives over the network.  Each has up to 64 MiB (32 channels, 16 chunks,
128 KiB).  So a rank has both once per colour, and not once per partner.  Within a node the rank
that receives takes 9.6 MB per channel for each rank that sends to it, either way.

**Parts.**  A gather, or an exchange of parts whose lengths the ranks know, is begun once all its
members have called it, as sums are; the members are all ranks, or any group.  NCCL sends and
receives all parts in one group call; nothing goes through the host's memory.

**Threads.**  As in `native`: any thread makes a `Pair` or `Parts`, and the starter launches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import is_on_host, port_of
from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.native import NativeCollective, members_of
from lightning_dsgd.transport.processes import ProcessTransport
from lightning_dsgd.transport.tickets import EXCHANGE, GATHER, PUSH, SWAP

End = tuple[Any, Tensor, int]
"""What a rank does in a batch: `isend` or `irecv`, of what, and with which rank."""


def batch(group: Any, ends: Iterable[End]) -> Sequence[Any]:
    """Sends and receives in one call what is not empty, and returns torch's works."""
    calls = [dist.P2POp(do, x, peer, group) for do, x, peer in ends if len(x)]
    return dist.batch_isend_irecv(calls) if calls else ()


def colour_of(members: Sequence[int], world_size: int, *, is_push: bool) -> int:
    """Returns the colour of a pair, 0 or 1.

    Ranks that are h apart, h = 2^v times an odd number, form circles r, r + h, r + 2 h, ... modulo
    P.  With each hop the v-th bit of a rank changes, but for where a circle closes if P is no
    multiple of 2^(v + 1).  This bit of the rank that a hop begins at is the hop's colour.

    Args:
        members: the two ranks; of a push, the one that sends first
        world_size: P
        is_push: whether only the first rank sends; else a hop begins where it is the shorter way
    """
    begin, end = members
    hop = (end - begin) % world_size
    if not is_push and 2 * hop > world_size:
        begin, hop = end, world_size - hop
    return int(begin & hop & -hop != 0)


class Pair(NativeCollective):
    """One end of an exchange, a push or a pull; the result is what the other rank sends.

    Args:
        net: the endpoint on which it was called
        x: what this rank sends, which may be empty
        call: the two ranks, and which of their calls it is
    """

    def __init__(self, net: ProcessTransport, x: Tensor, call: Call) -> None:
        root = EXCHANGE if call.kind == "exchange" else PUSH
        super().__init__(net, x, call, root, call.members)
        self._peer = self.awaited = call.members[1 - call.me]
        self.colour = colour_of(call.members, net.world_size, is_push=root == PUSH)
        self._theirs = x[:0]
        self.bytes_sent, self.messages_sent = x.nbytes, int(root == EXCHANGE or call.me == 0)

    def missing(self, left: set[int]) -> int | None:
        return self._peer if self._peer in left and not self._is_launching else None

    def describe(self) -> str:
        """Says in words which exchange this is."""
        path = self.net.path.strip("/")
        what = (
            f"{self._kind} number {self.ticket[-1]} of ranks {self._members[0]}, {self._members[1]}"
        )
        return what + (f" [{path}]" if path else "")

    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Sends and receives in one call what is not empty."""
        self._is_launching = True
        if lengths[self._peer]:
            self._theirs = torch.empty(
                lengths[self._peer], dtype=self.x.dtype, device=self.x.device
            )
        ends = [(dist.isend, self.x, self._peer), (dist.irecv, self._theirs, self._peer)]
        return batch(group, ends)

    @property
    def result(self) -> Tensor:
        """What the other rank has sent."""
        return self._theirs

    def take(self) -> None:
        """Tells the allocator that this thread uses what the starter's stream has received."""
        if len(self._theirs) and not is_on_host(self._theirs):
            port_of(self._theirs.device).keep(self._theirs)


class Parts(NativeCollective):
    """A gather, or an exchange of parts.

    The members of a gather must agree on the length of what all get; those of an exchange have told
    each other what comes.

    Args:
        net: the endpoint on which it was called
        call: who takes part, and which call it is
        into: will hold what comes
        from_each: how many elements come from each member
        x: what leaves
        to_each: how many elements of x leave for each member; None: all of x for each
    """

    def __init__(
        self,
        net: ProcessTransport,
        call: Call,
        into: Tensor,
        from_each: Sequence[int],
        x: Tensor,
        to_each: Sequence[int] | None,
    ) -> None:
        agreed, root = (into, GATHER) if to_each is None else (into[:0], SWAP)
        super().__init__(net, agreed, call, root, members_of(net, call))
        self._into, self._call = into, call
        self._from_each = torch.split(into, list(from_each))
        self._to_each = [x] * call.size if to_each is None else torch.split(x, list(to_each))
        self.bytes_sent = sum(self._to_each[i].nbytes for i in call.others())
        self.messages_sent = call.size - 1

    def missing(self, left: set[int]) -> int | None:
        """Returns a member that has left, before the ticket is here."""
        return None if self._is_launching else min(left.intersection(self._members), default=None)

    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Sends and receives all parts in one call."""
        self._is_launching = True
        ends: list[End] = []
        for i in self._call.others():
            peer = self._members[i]
            ends.append((dist.isend, self._to_each[i], peer))
            ends.append((dist.irecv, self._from_each[i], peer))
        return batch(group, ends)

    @property
    def result(self) -> Tensor:
        """The parts that other ranks have sent, one after the other."""
        return self._into

    def take(self) -> None:
        """Puts this rank's own part beside those that have come, unless it is there."""
        place, own = (parts[self._call.me] for parts in (self._from_each, self._to_each))
        if len(place) and place.data_ptr() != own.data_ptr():
            place.copy_(own)
