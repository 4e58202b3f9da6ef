"""Sums and broadcasts in any group of ranks, by batched sends and receives such as NCCL's.

    x       in pieces; a piece in S shards; member i owns shard i
    1.      each member sends the owner of each shard its values           one batched call
    2.      the owner adds them
    3.      the owner sends the sum to all other members                   one batched call

A broadcast is the same: in 1 its source alone sends, 2 is left out, and in 3 nobody sends to the
source.

**Which communicator.**  The first one of all ranks.  So a rank may be in any number of groups,
which may overlap and may be new each time: nothing is made for a group.  The price: what a rank
does in different groups runs one after another.

**When.**  `tickets` orders these with all else that travels on the communicator.  A rank asks once
its device has made x.  The starter launches both calls of all pieces in a row, with the additions
between them on its own stream, and waits for none of them.

**Why nobody waits for ever.**  A device runs what is launched on a communicator one after another,
and an addition between two calls waits for the first of them alone.  So all calls of a ticket run
before any call of the next one.  Take the first ticket in the one order that is not done.  All
tickets before it are done on all its members, so each of them runs it, call by call.  In each call
a member sends to those that receive from it in the same call, and to no others: the call ends on
all members.  NCCL connects two ranks in the first call in which one sends to the other; the starter
waits for the other's then, which comes to the same call for the same reason.  Where the starter
waits for the end of each call, as over gloo, the same holds of starters.

**The bits** are those that messages make (`collectives.all_reduce`).  The owner adds in fp32 where
x is of 16 bits, in the order of the members; where S is a power of two, first those S / 2 apart,
then S / 4, as halving does.  Neither depends on who owns an element, so pieces change nothing.
What travels has the dtype of x, where messages bring fp32 to the owners of 16 bits.

**Memory.**  What comes to an owner: at most one piece, and three times that of 16 bits.

Legend: x the argument and result, S members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.native import NativeCollective
from lightning_dsgd.transport.native_sends import End, batch
from lightning_dsgd.transport.processes import ProcessTransport
from lightning_dsgd.transport.tickets import SUM

PIECE: Final = 1 << 24
"""So many elements of x at most are sent at a time."""


class InShards(NativeCollective):
    """A sum or a broadcast in a group.

    Args:
        net: the endpoint on which it was called
        x: the argument, which will hold the result
        call: who takes part, and which call it is
        place: the place in the group of a broadcast's source; None: a sum
    """

    def __init__(self, net: ProcessTransport, x: Tensor, call: Call, place: int | None) -> None:
        root = SUM if place is None else call.members[place]
        super().__init__(net, x, call, root, call.members)
        self._call, self._place = call, place
        self._pieces = torch.split(x, PIECE) if len(x) else ()
        own = sum(len(self._shards(piece)[call.me]) for piece in self._pieces)
        to_owners, to_members = len(x) - own, call.size - 1
        self.messages_sent = 2 * (call.size - 1)
        if place not in (None, call.me):
            to_owners, to_members = 0, call.size - 2
            self.messages_sent = call.size - 2
        self.bytes_sent = (to_owners + own * to_members) * x.itemsize

    def _shards(self, piece: Tensor) -> list[Tensor]:
        """Returns what each member owns of a piece."""
        size = self._call.size
        bounds = [len(piece) * i // size for i in range(size + 1)]
        return [piece[begin:end] for begin, end in pairwise(bounds)]

    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Makes two batched calls for each piece."""
        works: list[Any] = []
        room = self._room_for_shares()
        for piece in self._pieces:
            self._is_launching = True
            shards = self._shards(piece)
            own, came = shards[self._call.me], self._shares(shards, room)
            to_owners = batch(group, self._to_owners(shards, came))
            for work in to_owners:
                work.wait()  # on a device it holds up the starter's stream, and not the starter
            if came:
                own.copy_(total(came))
            works += [*to_owners, *batch(group, self._to_members(shards))]
        return works

    def _room_for_shares(self) -> list[Tensor]:
        """Returns room for what an owner gets of a piece, in the order of members.

        All pieces use it, one after the other.  Room of its own for each would stay taken until the
        device has come to the last of them, as the host is ahead of it.
        """
        if self._place is not None or not self._pieces:
            return []
        own = self._shards(self._pieces[0])[self._call.me]  # no later piece is longer
        return [torch.empty_like(own) for _ in range(self._call.size)]

    def _shares(self, shards: Sequence[Tensor], room: Sequence[Tensor]) -> list[Tensor]:
        """Returns, in the order of members, this one's share of a sum and room for the others'."""
        me = self._call.me
        own = shards[me]
        return [own if i == me else room[i][: len(own)] for i in range(len(room))]

    def _to_owners(self, shards: Sequence[Tensor], came: Sequence[Tensor]) -> list[End]:
        """Returns the first call: what this rank sends to owners, and what it gets as an owner."""
        call, ends = self._call, list[End]()
        for i in call.others():
            if self._place in (None, call.me):
                ends.append((dist.isend, shards[i], call.members[i]))
            if self._place is None:
                ends.append((dist.irecv, came[i], call.members[i]))
            elif self._place == i:
                ends.append((dist.irecv, shards[call.me], call.members[i]))
        return ends

    def _to_members(self, shards: Sequence[Tensor]) -> list[End]:
        """Returns the second call: every owner's shard goes to all that have it not."""
        call, ends = self._call, list[End]()
        for i in call.others():
            if self._place != i:
                ends.append((dist.isend, shards[call.me], call.members[i]))
            if self._place != call.me:
                ends.append((dist.irecv, shards[i], call.members[i]))
        return ends


def total(shares: Sequence[Tensor]) -> Tensor:
    """Returns the sum of what each member has, with the bits of `collectives.all_reduce`.

    Args:
        shares: the members' tensors, in the order of the group; may be overwritten
    """
    first, size = shares[0], len(shares)
    is_half = first.dtype in (torch.bfloat16, torch.float16)
    ys = [share.float() for share in shares] if is_half else list(shares)
    if size & (size - 1):
        y = torch.zeros_like(ys[0])
        for share in ys:
            y += share
        return y
    while len(ys) > 1:
        half = len(ys) // 2
        ys = [a.add_(b) for a, b in zip(ys[:half], ys[half:], strict=True)]
    return ys[0]
