"""One order, the same on all ranks, for sums that threads begin in different ones.

Libraries such as NCCL must be called in one order on all ranks.  The threads of a rank know of no
such order: one sums gradients, another averages weights, and on each rank another one is first.

    thread     asks for its sum, and waits; the sum is named by its channel and its number there
    launcher   a lane on each rank: passes on what is asked for, and begins sums, one after another

The launchers form a tree whose root is rank 0 (`parent_of`).  Messages to and from the parent:

1. **Ask.**  Once a rank's own thread and all its children have asked for a sum, it asks its parent.
2. **Ticket.**  Once rank 0's own thread and all its children have asked, all ranks have.  Rank 0
   gives the sum the next ticket: it tells its children, and begins the sum.
3. **Launch.**  Whoever is told of a ticket tells its own children, and begins the sum.  All tickets
   come from rank 0 along one path, on which messages keep their order; so all ranks begin the same
   sums in the same order.
4. **Refusal.**  An ask carries what is to be summed: dtype and length, the least and the greatest
   that was asked for below, and on which ranks.  If these differ, nobody begins the sum, and all
   who wait for it learn which two ranks disagree.

**Why a ticket needs all ranks, and not the first.**  Were it given when the first rank asks, a
launcher would have to wait until its own thread asks too.  That may take for ever: with two sums a
and b, a's ticket first, a thread that waits for b before it calls a would wait for a launcher that
waits for a.  Here channels stay independent, as the contract promises.  It also leaves the devices
free: a kernel of NCCL's that waits for a late rank takes processors, and cannot be timed out, while
who waits for a ticket can.  The price is the way of the last ask up and of the ticket down, up to
2 log2 P messages one after another, after the last rank has called.

**Why nobody waits for ever.**  A launcher waits for messages alone; it begins a sum only when its
own thread has asked for it, for that is what a ticket says.  So whatever one sum waits for holds up
no other: every sum that all ranks ask for gets a ticket.  What a sum may wait for once it is begun
are the sums with earlier tickets, which are begun on all ranks, and the computation of its
arguments, which waits for no network.  A sum that some rank never asks for ends with `Timeout`.  A
lost rank ends every launcher's wait with `PeerLost`: it gives up what it has begun (`abandon`),
and passes nothing on; the waits of all other threads end by themselves.

**Threads.**  Any thread may `ask`.  `_heard` and `_passed_on` are the launcher's; others read them
for errors, in single operations.  `Backend` is called by the launcher alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from lightning_dsgd.transport.contract import ANY, PeerLost, Transport

Sum = tuple[int, int]
"""Its channel, and its number there."""
Form = tuple[int, int, int]
"""The code of a dtype, a number of elements, and a rank that has asked for a sum of these."""

_ASK: Final = 0
_TICKET: Final = 1
_WORDS: Final = torch.empty(0, dtype=torch.int64)


class Backend(Protocol):
    """What sums, on this rank."""

    def launch(self, key: Sum) -> None:
        """Begins a sum that this rank's thread has asked for."""
        ...

    def refuse(self, key: Sum, least: Form, greatest: Form) -> None:
        """The sum will not be made: two ranks have asked for different ones."""
        ...

    def abandon(self, failure: Exception | None = None) -> None:
        """No sum is begun any more, and those under way will not end, as this or a rank failed."""
        ...


@dataclass
class _Asked:
    """What a launcher knows of a sum that not all have asked for who are to tell it."""

    least: Form
    greatest: Form
    sources: list[int] = field(default_factory=list)


class Tickets:
    """One rank's part in the agreement; all ranks make it together.

    Args:
        net: the network, with channels of its own
        backend: what sums
    """

    def __init__(self, net: Transport, backend: Backend) -> None:
        self._me, self._world_size = net.rank, net.world_size
        self._children = children_of(net.rank, net.world_size)
        self._backend = backend
        self._heard: dict[Sum, _Asked] = {}
        self._passed_on: set[Sum] = set()
        """What this rank's parent was asked for, and has sent no ticket of."""
        self._lane = net.spawn_lane(self._serve, "launcher")

    # ---- any thread ----

    def ask(self, key: Sum, code: int, numel: int) -> None:
        """Asks for a sum of so many elements of a dtype; the backend can be called for it now."""
        form = (code, numel, self._me)
        self._lane.net.send(_message(_ASK, key, form, form), self._me)

    def known_callers(self, key: Sum) -> list[int]:
        """The ranks that this one knows to have asked for a sum for which it has no ticket."""
        if key in self._passed_on:
            return list(_below(self._me, self._world_size))
        asked, callers = self._heard.get(key), [self._me]
        if asked is None:
            return callers
        for source in tuple(asked.sources):
            if source != self._me:
                callers += _below(source, self._world_size)
        return sorted(callers)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the launcher, and raises what it failed with."""
        self._lane.stop(timeout_s)

    # ---- the launcher ----

    def _serve(self, net: Transport) -> None:
        try:
            while True:
                receipt = net.recv(_WORDS, ANY)
                kind, channel, number, *forms = receipt.wait(math.inf).tolist()
                key, least, greatest = (channel, number), _form(forms[:3]), _form(forms[3:])
                if kind == _ASK:
                    self._hear(net, key, least, greatest, receipt.source)
                else:
                    self._begin(net, key, least, greatest)
        except PeerLost:  # which the waits of all other threads raise as well
            self._backend.abandon()
        except Exception as failure:
            self._backend.abandon(failure)
            raise

    def _hear(self, net: Transport, key: Sum, least: Form, greatest: Form, source: int) -> None:
        asked = self._heard.setdefault(key, _Asked(least, greatest))
        asked.least, asked.greatest = min(asked.least, least), max(asked.greatest, greatest)
        asked.sources.append(source)
        if len(asked.sources) <= len(self._children):
            return
        del self._heard[key]
        if self._me == 0:
            self._begin(net, key, asked.least, asked.greatest)
        else:
            self._passed_on.add(key)
            net.send(_message(_ASK, key, asked.least, asked.greatest), parent_of(self._me))

    def _begin(self, net: Transport, key: Sum, least: Form, greatest: Form) -> None:
        self._passed_on.discard(key)
        for child in self._children:
            net.send(_message(_TICKET, key, least, greatest), child)
        if least[:2] == greatest[:2]:
            self._backend.launch(key)
        else:
            self._backend.refuse(key, least, greatest)


def parent_of(rank: int) -> int:
    """Its number without the lowest bit that is set: 0 for 1, 2, 4, 8; 4 for 5 and 6; 6 for 7."""
    return rank & (rank - 1)


def children_of(rank: int, world_size: int) -> list[int]:
    """The ranks whose parent it is, at most log2 P."""
    bits = range((rank & -rank or world_size).bit_length())
    children = [rank | 1 << bit for bit in bits]
    return [child for child in children if child < world_size and parent_of(child) == rank]


def _below(rank: int, world_size: int) -> Sequence[int]:
    """The rank and all that is below it in the tree."""
    return range(rank, min(world_size, rank + (rank & -rank or world_size)))


def _message(kind: int, key: Sum, least: Form, greatest: Form) -> torch.Tensor:
    return torch.tensor([kind, *key, *least, *greatest])


def _form(words: Sequence[int]) -> Form:
    code, numel, rank = words
    return code, numel, rank
