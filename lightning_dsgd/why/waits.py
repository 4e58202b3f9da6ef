"""Who waits for whom, and in which collective: by the numbers that torch gives them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.why.records import Collective, Job

_SAME_SIZES: Final = ("all_reduce", "broadcast", "reduce", "_allgather_base")
"""The collectives in which all ranks must give as many numbers."""


@dataclass(frozen=True)
class Wait:
    """Holds the collective in which ranks of one group wait, and for whom."""

    collective: Collective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    strange: tuple[int, ...]
    instead: Collective | None
    since_s: float


def waits_of(job: Job) -> dict[str, Wait]:
    """Returns the groups in which somebody waits."""
    found = {}
    names = {name for rank in job.ranks.values() for name in rank.groups}
    for name in names:
        stands = {r.rank: r.groups[name] for r in job.ranks.values() if name in r.groups}
        pending = {rank: group for rank, group in stands.items() if group.entered > group.over}
        if not pending:
            continue
        number = min(group.over for group in pending.values()) + 1
        waiting = tuple(sorted(rank for rank in pending if pending[rank].over + 1 == number))
        members = set(stands).union(*(group.ranks for group in pending.values()))
        missing = tuple(
            sorted(rank for rank in members if rank not in stands or stands[rank].entered < number)
        )
        told = {
            rank: group.recent[number] for rank, group in stands.items() if number in group.recent
        }
        strange = _strange(told)
        alike = [told[rank] for rank in waiting if rank in told and rank not in strange]
        known = alike[0] if alike else Collective(name, number, "collective")
        instead = told[strange[0]] if strange else None
        since_s = max(pending[rank].still_s for rank in waiting)
        found[name] = Wait(known, waiting, missing, strange, instead, since_s)
    return found


def _strange(told: dict[int, Collective]) -> tuple[int, ...]:
    """Returns the ranks whose collective of one number differs from that of most."""
    kinds = {
        rank: (each.name, each.size if each.name in _SAME_SIZES else 0)
        for rank, each in told.items()
    }
    if len(set(kinds.values())) < 2:
        return ()
    most, _ = Counter(kinds.values()).most_common(1)[0]
    return tuple(sorted(rank for rank, kind in kinds.items() if kind != most))
