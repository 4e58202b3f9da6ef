"""Gathers and exchanges of parts whose lengths the ranks know, by torch's own collectives.

As sums in `native`: they are begun once all members have called them.  NCCL sends and receives all
parts in one group call; nothing goes through the host's memory.  The members of a gather must agree
on the length of what all get; those of an exchange have told each other what comes.  A gather
copies its tensor once for each member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.native import NativeCollective
from lightning_dsgd.transport.processes import ProcessTransport
from lightning_dsgd.transport.tickets import GATHER, SWAP


class Parts(NativeCollective):
    """A gather, or an exchange of parts.

    Args:
        net: the endpoint on which it was called
        number: the number of the group
        call: who takes part, and which call it is
        into: will hold what comes
        from_each: how many elements come from each member
        x: what leaves
        to_each: how many elements of x leave for each member; None: all of x for each
    """

    def __init__(
        self,
        net: ProcessTransport,
        number: int,
        call: Call,
        into: Tensor,
        from_each: Sequence[int],
        x: Tensor,
        to_each: Sequence[int] | None,
    ) -> None:
        agreed, root = (into, GATHER) if to_each is None else (into[:0], SWAP)
        super().__init__(net, agreed, number, call, root)
        self._into, self._from_each = into, list(from_each)
        self._to_each = [len(x)] * call.size if to_each is None else list(to_each)
        self._sent = x.repeat(call.size) if to_each is None else x
        self.bytes_sent = (sum(self._to_each) - self._to_each[call.me]) * into.itemsize

    def missing(self, left: set[int]) -> int | None:
        """Returns a member that has left, before the ticket is here."""
        return None if self._is_launching else min(left.intersection(self._members), default=None)

    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Sends and receives all parts in one call."""
        self._is_launching = True
        each = self._from_each, self._to_each
        return [dist.all_to_all_single(self._into, self._sent, *each, group=group, async_op=True)]

    @property
    def result(self) -> Tensor:
        """What has come."""
        return self._into
