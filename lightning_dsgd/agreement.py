"""What all ranks of a network find out together: a mean, a maximum, who goes on, who differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.transport import Transport

_LARGEST: Final = 1 << 40
"""The tag of the messages of `largest`, which no algorithm uses."""


def average(net: Transport, x: Tensor) -> None:
    """Puts the mean of x over all ranks into x."""
    net.all_reduce(x).wait()
    x /= net.world_size


def num_active(net: Transport, *, active: int, counts: Tensor | None = None) -> int:
    """Returns how many ranks are still stepping, or the sum of their weights.

    A rank that has stopped keeps calling this in `settle`, so every round of a synchronous
    algorithm begins with it: the ranks that go on learn who does, the stopped ones learn whether
    to go on serving.

    Args:
        net: a network of all ranks
        active: 1 or this rank's weight if it is stepping, else 0
        counts: what is summed in place beside that; zeros where this rank has nothing to count
    """
    flags = torch.tensor([int(active)])
    if counts is not None:
        flags = torch.cat([flags, counts])
    net.all_reduce(flags).wait()
    if counts is not None:
        counts.copy_(flags[1:])
    return int(flags[0])


def zeroed(counts: Tensor | None) -> Tensor | None:
    """Returns the counts of a rank that has nothing to count."""
    return None if counts is None else counts.zero_()


def weigh(net: Transport, x: Tensor, own: int | Tensor, total: int | Tensor) -> None:
    """Scales x for a mean over all ranks, in which this rank has its `own` of `total`.

    A tensor of no element stands for ranks that count alike.
    """
    is_asked = isinstance(own, int) or len(own) > 0
    if is_asked and int(own) * net.world_size != int(total):
        x *= int(own) * net.world_size / int(total)


def weigh_pieces(net: Transport, x: Tensor, own: Tensor, bounds: Sequence[int]) -> None:
    """Scales x, on all ranks, for a mean of its pieces between these bounds."""
    totals = net.all_reduce(own.clone()).wait() if len(own) else own
    for each, total, begin, end in zip(own, totals, bounds, bounds[1:], strict=False):
        weigh(net, x[begin:end], int(each), int(total))


def has_overflowed(net: Transport, g: Tensor) -> bool:
    """Returns whether any rank's gradient has NaN or inf in it."""
    flag = torch.tensor([int(not g.isfinite().all())])
    return bool(net.all_reduce(flag).wait())


def largest(net: Transport, *values: int) -> list[int]:
    """Returns the largest of each value on any rank; every rank sends log2 P messages.

    Values spread by dissemination, as in a barrier; the call is also a barrier.  After step s each
    rank knows the largest of 2^s ranks before it, itself included.
    """
    most, distance = torch.tensor(values, dtype=torch.int64), 1
    while distance < net.world_size:
        net.send(most, (net.rank + distance) % net.world_size, _LARGEST)
        theirs = net.recv(most, (net.rank - distance) % net.world_size, _LARGEST).wait()
        most = torch.maximum(most, theirs)
        distance *= 2
    return [int(value) for value in most]


def take_over_newest(net: Transport, x: Tensor, step: int) -> int:
    """Gives every rank the weights of the rank with the most steps; returns their number.

    For strategies whose ranks hold the same weights as long as they step: ranks that stopped
    before the others get the weights of these.
    """
    newest, most, fewest = _newest(net, step)
    if most != fewest:
        net.broadcast(x, newest).wait()
    return most


def give_newest(net: Transport, x: Tensor, step: int) -> None:
    """Does what `take_over_newest` does, but also where all have made as many steps."""
    net.broadcast(x, _newest(net, step)[0]).wait()


def _newest(net: Transport, step: int) -> tuple[int, int, int]:
    """Returns the first rank with the most steps, how many it has made, and the fewest of any."""
    size = net.world_size
    first, minus_fewest = largest(net, step * size + size - 1 - net.rank, -step)
    return size - 1 - first % size, first // size, -minus_fewest


def everyones(net: Transport, text: str) -> list[str]:
    """Returns the texts of all ranks, in the order of the ranks."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(theirs.tolist()).decode() for theirs in net.all_gather(mine).wait()]


def by_rank(values: Sequence[str]) -> str:
    """Says which ranks have what: "this on ranks 0 and 2, that on rank 1"."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on " + (f"ranks {', '.join(others)} and {last}" if others else f"rank {last}")
        for value, (*others, last) in ranks.items()
    )


def refuse_unless_alike(net: Transport, mine: str, must: str, way_out: str) -> None:
    """Raises `ValueError`, on every rank, unless `mine` is the same text on all.

    Args:
        net: a network of all ranks
        mine: what this rank has
        must: what has to be the same
        way_out: what to do about it
    """
    texts = everyones(net, mine)
    if len(set(texts)) > 1:
        raise ValueError(f"{must} must be the same on all ranks, got {by_rank(texts)}; {way_out}")
