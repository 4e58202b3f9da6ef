"""One order, the same on all ranks, for collectives that threads begin in different ones.

Libraries such as NCCL must be called in one order on all ranks.  The threads of a rank know of no
such order: one sums gradients, another averages weights, and on each rank another one is first.

    thread     asks for its collective, and waits; it is named by its group, its channel and its
               number there
    starter    a lane on each rank: passes on what is asked for, and begins collectives, one after
               another

The starters form a tree whose root is rank 0 (`parent_of`).  A group is any ranks in any order;
every message names its members, so nobody has to know of a group beforehand.  The top of a group is
the lowest rank of the tree below which all of its members are, and the top of all ranks is rank 0.
Messages to and from the parent:

1. **Ask.**  Once a rank's own thread, if it is a member, and all its children with members below
   have asked for a collective, it asks its parent.
2. **Ticket.**  Once the top has heard of all of these, all members have asked.  The top gives the
   collective its ticket: it tells its children with members below, and begins it if it is one.
3. **Launch.**  A rank that is told of a ticket tells its own children with members below, and
   begins the collective if it is a member.
4. **Refusal.**  An ask carries what is to be done: the root of a broadcast, dtype and length, the
   least and the greatest that was asked for below, and on which ranks.  If these differ, nobody
   begins it, and all who wait for it learn which two ranks disagree.

**Why there is one order.**  A rank passes on the tickets of its parent in the order in which they
have come, among them the tickets that it gives as a top; messages of one path keep their order.  So
what comes to a rank is what its parent has passed on, less what does not concern it, with its own
tickets inserted.  Take the order of rank 0 and insert its children's orders, then their children's,
and so on: tickets of different children concern no common rank, so any order does between them.
The result is one order that no rank departs from, however the groups overlap.

**Why a ticket needs all members, and not the first.**  Were it given when the first rank asks, a
starter would have to wait until its own thread asks too.  That may take for ever: with two sums a
and b, a's ticket first, a thread that waits for b before it calls a would wait for a starter that
waits for a.  Here channels stay independent, as the contract promises.  It also leaves the devices
free: a kernel of NCCL's that waits for a late rank takes processors, and cannot be timed out, while
who waits for a ticket can.  The price is the way of the last ask up and of the ticket down, up to
2 log2 P messages one after another, after the last rank has called.  For ranks of one node they
stay on the node, where its first number is a multiple of its size, a power of two.

**Why nobody waits for ever.**  A starter waits for messages alone; it begins a collective only
when its own thread has asked for it, for that is what a ticket says.  So whatever one waits for
holds up no other: every collective that all its members ask for gets a ticket, as long as the ranks
between them and their top serve, members or not; no rank may close while others still need it.
What it may wait for once it is begun are those before it in the one order, which are begun on all
their members, and the computation of its arguments, which waits for no network.  One that some
member never asks for ends with `Timeout`.  A lost rank ends every starter's wait with `PeerLost`:
it gives up what it has begun (`abandon`), and passes nothing on; the waits of all other threads end
by themselves.

**Pairs** are groups of two.  Where they exchange or push, lengths may differ: each rank is told
both.

**When a rank asks.**  For all ranks it asks at once, and its device begins the collective once it
has made the argument.  For a group, pairs among them, it asks once its device has made the
argument, so nothing is launched before; the head of `native_sends` says why.

**Threads.**  Any thread may `ask`.  `_heard` and `_passed_on` are the starter's; others read them
for errors, in single operations.  `Backend` is called by the starter alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

import torch

from lightning_dsgd.transport.contract import ANY, PeerLost, Transport

Members = tuple[int, ...]
"""The ranks of a group, in its order, or `ALL`."""
Key = tuple[Members, int, int]
"""A collective: who takes part, its channel, and its number on that channel."""
Form = tuple[int, int, int, int]
"""The root of a broadcast, or a name below; the code of a dtype; a number of elements; who has
asked.
"""

SUM: Final = -1
EXCHANGE: Final = -2
GATHER: Final = -3
SWAP: Final = -4
PUSH: Final = -5
ALL: Final[Members] = ()
"""Stands for all ranks, in their order."""

_ASK: Final = 0
_TICKET: Final = 1
_WORDS: Final = torch.empty(0, dtype=torch.int64)


class Backend(Protocol):
    """What sums and broadcasts tensors on this rank."""

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        """Begins what this rank's thread has asked for.

        Args:
            key: names it
            lengths: of what each of a pair sends; empty where all have asked for the same length
        """
        ...

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        """Hears that a collective will not be made: two ranks have asked for different ones."""
        ...

    def abandon(self, failure: Exception | None = None) -> None:
        """Gives up all collectives under way and begins none, as this or another rank failed."""
        ...


@dataclass
class _Group:
    """A group, as one starter sees it."""

    members: frozenset[int]
    top: int
    children: list[int]
    """This rank's children, as far as there are members below them."""


@dataclass
class _Asked:
    """What a starter knows of a collective that some ranks have not asked for yet."""

    least: Form
    greatest: Form
    sources: list[int] = field(default_factory=list)


class Tickets:
    """One rank's end of the agreement on an order; all ranks make it together.

    Args:
        net: the network, with channels of its own
        backend: what sums and broadcasts
    """

    def __init__(self, net: Transport, backend: Backend) -> None:
        self._me, self._world_size = net.rank, net.world_size
        self._backend = backend
        self._heard: dict[Key, _Asked] = {}
        self._passed_on: set[Key] = set()
        """The collectives that the parent was asked for, and has sent no ticket of."""
        self._lane = net.spawn_lane(self._serve, "starter")

    def _group(self, members: Members) -> _Group:
        everyone = members or tuple(range(self._world_size))
        return _group_of(everyone, self._me, self._world_size)

    # ---- any thread ----

    def ask(self, key: Key, root: int, code: int, numel: int) -> None:
        """Asks for a collective of `numel` elements; the backend may be called from now on."""
        form = (root, code, numel, self._me)
        message = _message(_ASK, key, form, form)
        if key[0] == ALL:
            self._lane.net.send(message, self._me)
        else:
            self._lane.tell(message)

    def known_callers(self, key: Key) -> list[int]:
        """Returns ranks known to have asked for a collective that has no ticket here yet."""
        sources = {self._me}
        if key in self._passed_on:
            sources.update(_below(self._me, self._world_size))
        elif (asked := self._heard.get(key)) is not None:
            for source in set(asked.sources) - sources:
                sources.update(_below(source, self._world_size))
        return sorted(sources & self._group(key[0]).members)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the starter, and raises its failure, if any."""
        self._lane.stop(timeout_s)

    # ---- the starter ----

    def _serve(self, net: Transport) -> None:
        try:
            while True:
                receipt = net.recv(_WORDS, ANY)
                words = receipt.wait(math.inf).tolist()
                self.take(net, words, receipt.source)
        except PeerLost:  # the waits of all other threads raise it as well
            self._backend.abandon()
        except Exception as failure:
            self._backend.abandon(failure)
            raise

    def take(self, net: Transport, words: Sequence[int], source: int) -> None:
        """Takes one message, and sends what follows from it.

        Args:
            net: the starter's endpoint
            words: the message
            source: the rank that has sent it
        """
        kind, channel, number, *rest = words
        key, least, greatest = (tuple(rest[8:]), channel, number), _form(rest[:4]), _form(rest[4:8])
        if kind == _ASK:
            self._hear(net, key, least, greatest, source)
        else:
            self._begin(net, key, least, greatest)

    def _hear(self, net: Transport, key: Key, least: Form, greatest: Form, source: int) -> None:
        group = self._group(key[0])
        asked = self._heard.setdefault(key, _Asked(least, greatest))
        asked.least, asked.greatest = min(asked.least, least), max(asked.greatest, greatest)
        asked.sources.append(source)
        if len(asked.sources) < len(group.children) + (self._me in group.members):
            return
        del self._heard[key]
        if self._me == group.top:
            self._begin(net, key, asked.least, asked.greatest)
        else:
            self._passed_on.add(key)
            net.send(_message(_ASK, key, asked.least, asked.greatest), parent_of(self._me))

    def _begin(self, net: Transport, key: Key, least: Form, greatest: Form) -> None:
        group = self._group(key[0])
        self._passed_on.discard(key)
        for child in group.children:
            net.send(_message(_TICKET, key, least, greatest), child)
        if self._me not in group.members:
            return
        if least[0] in (EXCHANGE, PUSH) and least[:2] == greatest[:2]:
            self._backend.launch(key, {rank: n for _, _, n, rank in (least, greatest)})
        elif least[:-1] == greatest[:-1]:
            self._backend.launch(key, {})
        else:
            self._backend.refuse(key, least, greatest)


@lru_cache(maxsize=1024)
def _group_of(members: Members, me: int, world_size: int) -> _Group:
    top, group = min(members), frozenset(members)
    while max(members) not in _below(top, world_size):
        top = parent_of(top)
    below = [(child, _below(child, world_size)) for child in children_of(me, world_size)]
    concerned = [child for child, ranks in below if any(rank in ranks for rank in members)]
    return _Group(group, top, concerned)


def parent_of(rank: int) -> int:
    """Returns a rank without its lowest set bit: 0 for 1, 2, 4, 8; 4 for 5 and 6; 6 for 7."""
    return rank & (rank - 1)


def children_of(rank: int, world_size: int) -> list[int]:
    """Returns the ranks whose parent a rank is, at most log2 P."""
    bits = range((rank & -rank or world_size).bit_length())
    children = [rank | 1 << bit for bit in bits]
    return [child for child in children if child < world_size and parent_of(child) == rank]


def _below(rank: int, world_size: int) -> Sequence[int]:
    """Returns a rank and all ranks below it in the tree."""
    return range(rank, min(world_size, rank + (rank & -rank or world_size)))


def _message(kind: int, key: Key, least: Form, greatest: Form) -> torch.Tensor:
    members, channel, number = key
    return torch.tensor([kind, channel, number, *least, *greatest, *members])


def _form(words: Sequence[int]) -> Form:
    root, code, numel, rank = words
    return root, code, numel, rank
