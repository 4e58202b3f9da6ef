"""The times of the same job on another cluster: with more or fewer ranks, or over another link.

    ranks    each has a batch as large as those that were recorded.  More ranks than were recorded
             are copies of all of them, each at other steps of the run: so what ranks have in common
             stays common, and of a hundred ranks as many are slow.  All validate at the same steps.
    sums     the pieces of the gradient are ready as early as they were, and are summed one after
             the other, in a ring of messages: `_sum_s`.  Where ranks share cores, they work on
             their messages in turn.
    cores    each further machine is like those that were recorded

All else stays as it was recorded: the other meetings too.  What `verdict` and `remedies` say of the
times holds for that cluster.

Legend: P ranks, S steps, M meetings of a step, F parts of a rank's own time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.lab.diagnose.times import PARTS, Times
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.simulate.processors import Costs

LATENCY_S: Final = 1e-4
"""What a message takes at most, where a trace alone tells of the link; and where nobody says."""
MOST_STEPS: Final = 400
"""The last steps of a long run, which are played."""
_MOST_MEETINGS: Final = 4
"""How many meetings of a step are told apart: the last ones; the others count as the first."""
_VALIDATION: Final = PARTS.index("validation")


def link_of(times: Times) -> Link:
    """Returns the link that the times are foretold for, or that the recorded sums have shown."""
    if times.link is not None:
        return times.link
    busy_s, num_ranks = max(float(times.busy.median()), 1e-9), times.num_ranks
    num_messages = 2 * (num_ranks - 1) * max(1, *map(len, times.pieces))
    latency_s = min(LATENCY_S, busy_s / 2 / num_messages)
    carried_s = busy_s - num_messages * latency_s
    num_bytes = 2 * (num_ranks - 1) / num_ranks * max(1.0, times.num_bytes)
    return Link(8 * num_bytes / carried_s, latency_s)


def elsewhere(times: Times, num_ranks: int | None = None, link: Link | None = None) -> Times:
    """Returns the times of the same job on another cluster.

    Args:
        times: those that were recorded
        num_ranks: how many ranks there are; None: as many as were recorded
        link: the link of each rank; None: as the recorded sums have shown it

    Raises:
        ValueError: if that cannot be foretold
    """
    if times.strategy != "ddp":
        raise ValueError(
            "another cluster is foretold for DDP, whose ranks hold whole models, got a trace of "
            f"{times.strategy}; leave --ranks and --link out"
        )
    size = times.num_ranks if num_ranks is None else num_ranks
    if size < 2:
        raise ValueError(f"--ranks must be at least 2, got {size}; try --ranks 64")
    if not any(times.pieces):
        raise ValueError(
            "another cluster is foretold by the sums of the gradient, got a trace without any; "
            "record the run again"
        )
    link = link or link_of(times)
    sources = _sources(times, size)
    own, parts, takes, is_sum = _by_step(times)
    shifts = _shifts(len(own), times.num_ranks, size)
    validated = parts[_VALIDATION]
    worked = _shifted(own - validated, sources, shifts)
    parts = torch.stack([_shifted(part, sources, shifts) for part in parts])
    parts[_VALIDATION] = validated[..., sources]
    begin = times.num_steps - len(own)
    pieces = times.pieces[begin:]
    takes = torch.where(is_sum, 0.0, takes)
    # A step without a sum of its own, such as one whose gradients were not recorded, has none.
    last = is_sum.double().cumsum(1).argmax(1)
    abouts = tuple(_about(times, rank, place) for place, rank in enumerate(sources))
    costs = replace(times, abouts=abouts).costs
    sums_s = [[_sum_s(num_bytes, link, size, costs) for _, num_bytes in each] for each in pieces]
    exposed_s = [
        _exposed_s([early_s for early_s, _ in each], of_step)
        for each, of_step in zip(pieces, sums_s, strict=True)
    ]
    has_sum = is_sum.any(1)
    steps = torch.arange(len(own))
    takes[steps[has_sum], last[has_sum]] = torch.tensor(exposed_s).double()[has_sum]
    num_meetings = own.shape[1]
    return replace(
        times,
        own=(worked + parts[_VALIDATION]).flatten(0, 1),
        parts=parts.flatten(1, 2),
        takes=takes.flatten(),
        over=torch.zeros(len(own) * num_meetings, size, dtype=torch.float64),
        step=steps.repeat_interleave(num_meetings),
        is_sum=is_sum.flatten(),
        items=_shifted(times.items[begin:, None], sources, shifts)[:, 0],
        numbers=times.numbers[begin:],
        busy=torch.tensor([sum(of_step) for of_step in sums_s]).double(),
        pieces=pieces,
        abouts=abouts,
        running=tuple(times.running[rank] for rank in sources),
        link=link,
    )


def some_ranks(own: Tensor, most: int) -> list[int]:
    """Returns so many ranks of all that are there: every so many of them by their speed.

    Args:
        own: what each rank did in each step: [S, P]
        most: the most ranks
    """
    order = own.mean(0).argsort().tolist()
    if len(order) <= most:
        return sorted(order)
    places = torch.linspace(0, len(order) - 1, most).round().int().tolist()
    return sorted(order[place] for place in places)


def _sources(times: Times, size: int) -> list[int]:
    """Returns which of the recorded ranks each rank is a copy of."""
    if size < times.num_ranks:
        return some_ranks(times.by_step(times.own), size)
    return [rank % times.num_ranks for rank in range(size)]


def _about(times: Times, rank: int, place: int) -> dict[str, Any]:
    """Returns the first line of the trace of a copy, whose machine is another one."""
    about, copy = times.abouts[rank], place // times.num_ranks
    return {**about, "host": f"{about.get('host', rank)}, copy {copy}"} if copy else about


def _by_step(times: Times) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns own, parts, takes and is_sum with as many meetings in each step: [..., S, M, ...].

    The last meetings of the steps are the same; a step with fewer has empty ones before.
    """
    counts = torch.bincount(times.step, minlength=times.num_steps)
    ends = counts.cumsum(0)
    from_end = ends[times.step] - 1 - torch.arange(len(times.step))
    num_meetings = min(_MOST_MEETINGS, int(counts.max()))
    slot = (num_meetings - 1 - from_end).clamp(min=0)
    place = times.step * num_meetings + slot
    first = max(0, times.num_steps - MOST_STEPS)

    def in_slots(x: Tensor) -> Tensor:
        """[N, ...] to [S, M, ...]."""
        sums = torch.zeros(times.num_steps * num_meetings, *x.shape[1:], dtype=torch.float64)
        sums.index_add_(0, place, x.double())
        return sums.reshape(times.num_steps, num_meetings, *x.shape[1:])[first:]

    parts = torch.stack([in_slots(part) for part in times.parts])
    is_sum = in_slots(times.is_sum) > 0
    return in_slots(times.own), parts, in_slots(times.takes), is_sum


def _shifts(num_steps: int, recorded: int, size: int) -> list[int]:
    """Returns by how many steps each copy of all ranks is ahead; the first one is not."""
    source = random.Random("copies of the recorded ranks")
    return [0, *(source.randrange(num_steps) for _ in range((size - 1) // recorded))]


def _shifted(x: Tensor, sources: list[int], shifts: list[int]) -> Tensor:
    """Returns what each rank does in each step: [S, M, recorded P] to [S, M, P]."""
    recorded = x.shape[2]
    ranks = [
        x[..., source].roll(-shifts[place // recorded], 0) for place, source in enumerate(sources)
    ]
    return torch.stack(ranks, 2)


def _sum_s(num_bytes: float, link: Link, num_ranks: int, costs: Costs | None) -> float:
    """Returns what the sum of one piece takes, once the piece is ready on all ranks."""
    size = num_bytes / num_ranks
    message_s = link.latency_s + size / link.bytes_s
    if costs is not None:
        core_s = costs.to_send(size) + costs.to_receive(size) + size * costs.add_s_per_byte
        message_s = max(message_s, core_s * costs.ranks / costs.cores)
    return 2 * (num_ranks - 1) * message_s


def _exposed_s(early_s: Sequence[float], sums_s: Sequence[float]) -> float:
    """Returns what the sums of a step take once the last piece is ready on all ranks."""
    begin_s = max(early_s, default=0.0)
    free_s = 0.0
    for early, sum_s in zip(early_s, sums_s, strict=True):
        free_s = max(free_s, begin_s - early) + sum_s
    return free_s - begin_s
