"""Sums of numbered tensors in the order of their numbers: equal to the bit, whoever has which.

    owner of a piece     s <- d_0;  s <- s + d_1;  ...;  s <- s + d_(N-1)
    all                  d <- all pieces, one behind the other

Legend: d_u the tensor with number u, of which each is on one rank; N tensors; P ranks, of which
each owns one of P pieces.

Who has which tensor is told first.  Then each rank sends each owner its piece of each tensor, in
the order of the numbers, so a message needs no number.  No rank waits in a circle: all that a rank
sends is on its way before the rank waits for the first piece.

Sends (N_i + 1)(P-1)/P |d| on a rank with N_i tensors, where a sum of all of them in any order sends
2(P-1)/P |d|.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dsgd.primitives.error_feedback import evenly
from lightning_dsgd.transport import Transport


def sum_in_order(net: Transport, mine: Mapping[int, Tensor], out: Tensor) -> None:
    """Puts the sum of the numbered tensors of all ranks into `out`, the same on all ranks.

    Uses messages with tag 0 between the ranks.

    Args:
        net: the network of all ranks
        mine: this rank's tensors by number, each laid out like `out`; perhaps none
        out: will hold the sum; none of the tensors
    """
    numbers = torch.tensor([len(mine), *sorted(mine)], dtype=torch.int64)
    everyones = [theirs.tolist()[1:] for theirs in net.all_gather(numbers).wait()]
    holders = {number: rank for rank, theirs in enumerate(everyones) for number in theirs}
    assert len(holders) == sum(map(len, everyones)), "each tensor is on one rank"

    bounds = evenly(len(out), net.world_size)
    spans = [slice(*pair) for pair in pairwise(bounds)]
    sent = [
        net.send(mine[number][spans[other]], other, copy=False)
        for number in sorted(mine)
        for other in range(net.world_size)
        if other != net.rank
    ]
    total = out[spans[net.rank]]
    total.zero_()
    for place, number in enumerate(sorted(holders)):
        holder = holders[number]
        is_mine = holder == net.rank
        piece = mine[number][spans[net.rank]] if is_mine else net.recv(total, holder).wait()
        if place:
            total += piece
        else:
            total.copy_(piece)
    for work in sent:
        work.wait()
    net.gather_into(out, total, [end - begin for begin, end in pairwise(bounds)]).wait()
