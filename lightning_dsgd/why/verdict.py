"""From what is known of all ranks to a verdict: who keeps the others waiting, and in what.

Everything here is a function of the records: no file, no clock, no process.

**A rank waits** where it has entered a collective that is not over.  It waits for the members of
the group that have not entered the collective with this number.  Such a member may wait too, in
another group: then it is not the one.  The culprits are the ranks that are waited for, and wait for
nobody.

    cause        what the records show
    missing      it never entered: it is elsewhere in its program, and runs
    left         its program is through, such as after fewer batches
    raised       it has raised an error
    killed       its process is gone, without a word
    terminated   SIGTERM has ended it
    crashed      a fatal signal, such as SIGSEGV, has ended it
    unstarted    no process of it has been seen
    disagree     all entered the collective of this number, but not the same one
    cycle        everyone waits for someone who waits: groups in different orders
    everyone     all entered the same collective, and it does not end
    idle         nobody works, and nobody is in a collective that torch records

**Why a clean run gives no alarm.**  A collective that takes `stuck_after_s`, or ten times what is
usual between two, is suspicious only if the culprit does nothing meanwhile: one that computes,
compiles, reads or saves is late, and gets ten times as long.  A rank that has ended does not come
any more, so the others need not wait for that verdict.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from lightning_dsgd.why.records import Collective, Ending, Job, Rank
from lightning_dsgd.why.stacks import waits_outside

USUAL_TIMES: Final = 10.0
"""A rank is suspicious after so many times what it usually takes between two collectives."""
WORKING_TIMES: Final = 10.0
"""A rank that works gets so many times as long as one that has stopped."""
EVERYONE_TIMES: Final = 5.0
"""The same where all ranks have entered a collective, or none is in one: they may go on."""
GONE_S: Final = 3.0
"""Nobody needs to wait longer for a rank that has ended."""
_CONSEQUENCE: Final = re.compile(
    r"closed by peer|connection reset|connection refused|broken pipe|timed? ?out|socket timeout"
    r"|remote process exited|connectFullMesh|DistStoreError|DistBackendError|no error message"
    r"|KeyboardInterrupt|wait timeout|aborted",
    re.IGNORECASE,
)
"""What a rank says after another one has gone."""
_BAD: Final = ("raised", "killed", "terminated", "crashed")
_SAME_SIZES: Final = ("all_reduce", "broadcast", "reduce", "_allgather_base")
"""The collectives in which all ranks must give as many numbers."""


@dataclass(frozen=True)
class Verdict:
    """Says who keeps the others waiting, or who failed first.

    Args:
        cause: one of those above
        culprits: the ranks that are waited for, or have failed
        waiting: the ranks that wait, or failed after them
        collective: what these wait in
        since_s: for how long
        is_over: whether the command has ended
        is_late_only: whether the culprits work, so that they will come
        instead: with "disagree", the collective that the culprits have entered in place of it
    """

    cause: str
    culprits: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    collective: Collective | None = None
    since_s: float = 0.0
    is_over: bool = False
    is_late_only: bool = False
    instead: Collective | None = None


@dataclass(frozen=True)
class Wait:
    """Holds the collective in which ranks of one group wait, and for whom."""

    collective: Collective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    strange: tuple[int, ...]
    instead: Collective | None
    since_s: float


def judge(job: Job, stuck_after_s: float) -> Verdict | None:
    """Returns the verdict; None while all is well."""
    if job.exit_status is not None:
        return _of_the_end(job)
    return (
        _at_the_start(job, stuck_after_s)
        or _in_collectives(job, stuck_after_s)
        or _idle(job, stuck_after_s)
    )


def is_suspicious(job: Job, stuck_after_s: float) -> bool:
    """Returns whether a verdict may be near, so that the ranks should be asked for their stacks."""
    return judge(job, 0.8 * stuck_after_s) is not None


# ---- before the first collective ----


def _at_the_start(job: Job, stuck_after_s: float) -> Verdict | None:
    living = [rank for rank in job.ranks.values() if rank.ending is None]
    joining = [rank for rank in living if rank.stage == "joining"]
    if not joining:
        return None
    since_s = max(rank.still_s for rank in joining)
    waiting = tuple(sorted(rank.rank for rank in joining))
    unseen = tuple(sorted(set(range(job.world_size)) - job.ranks.keys()))
    absent = [rank for rank in job.ranks.values() if rank.stage != "joined" and rank not in joining]
    gone = [rank for rank in absent if rank.ending is not None]
    if gone and since_s >= GONE_S:
        return _of_gone(gone, waiting, None, since_s)
    if since_s < stuck_after_s:
        return None
    if absent:
        return _late_or_stuck(
            job,
            "missing",
            tuple(rank.rank for rank in absent),
            waiting,
            None,
            since_s,
            stuck_after_s,
        )
    if unseen:
        return Verdict("unstarted", unseen, waiting, since_s=since_s)
    return Verdict("everyone", (), waiting, since_s=since_s)


# ---- in collectives ----


def waits_of(job: Job) -> dict[str, Wait]:
    """Returns the groups in which somebody waits: by the numbers that torch gives collectives."""
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


def _in_collectives(job: Job, stuck_after_s: float) -> Verdict | None:
    waits = waits_of(job)
    waits = {
        group: wait for group, wait in waits.items() if wait.since_s >= min(GONE_S, stuck_after_s)
    }
    if not waits:
        return None
    waiting = {rank for wait in waits.values() for rank in wait.waiting}
    for wait in sorted(waits.values(), key=lambda wait: -wait.since_s):
        if wait.strange and wait.since_s >= _limit(job, stuck_after_s):
            return _of_strange(wait)
        guilty = tuple(rank for rank in wait.missing if rank not in waiting)
        gone = [job.ranks[r] for r in guilty if r in job.ranks and job.ranks[r].ending is not None]
        if gone and wait.since_s >= GONE_S:
            return _of_gone(gone, wait.waiting, wait.collective, wait.since_s)
        if wait.since_s < _limit(job, stuck_after_s):
            continue
        if guilty and all(rank not in job.ranks for rank in guilty):
            return Verdict("unstarted", guilty, wait.waiting, wait.collective, wait.since_s)
        if guilty:
            return _late_or_stuck(
                job, "missing", guilty, wait.waiting, wait.collective, wait.since_s, stuck_after_s
            )
    longest = max(waits.values(), key=lambda wait: wait.since_s)
    if longest.since_s < _limit(job, stuck_after_s):
        return None
    if longest.missing:
        if set(longest.missing) - waiting:
            return None
        return Verdict(
            "cycle", longest.missing, longest.waiting, longest.collective, longest.since_s
        )
    is_idle = all(job.ranks[rank].idle_s >= stuck_after_s for rank in longest.waiting)
    if not is_idle or longest.since_s < EVERYONE_TIMES * _limit(job, stuck_after_s):
        return None
    return Verdict("everyone", (), longest.waiting, longest.collective, longest.since_s)


def _of_strange(wait: Wait) -> Verdict:
    """Returns the verdict where ranks have entered different collectives of one number."""
    others = tuple(rank for rank in wait.waiting if rank not in wait.strange)
    return Verdict(
        "disagree",
        wait.strange,
        others,
        wait.collective,
        wait.since_s,
        instead=wait.instead,
    )


def _limit(job: Job, stuck_after_s: float) -> float:
    usual_s = max((rank.usual_s for rank in job.ranks.values()), default=0.0)
    return max(stuck_after_s, USUAL_TIMES * usual_s if usual_s > 1.0 else 0.0)


def _late_or_stuck(
    job: Job,
    cause: str,
    culprits: tuple[int, ...],
    waiting: tuple[int, ...],
    collective: Collective | None,
    since_s: float,
    stuck_after_s: float,
) -> Verdict:
    idle_s = [job.ranks[rank].idle_s for rank in culprits if rank in job.ranks]
    works = min(idle_s, default=since_s) < 0.5 * stuck_after_s
    is_late_only = works and since_s < WORKING_TIMES * _limit(job, stuck_after_s)
    return Verdict(cause, culprits, waiting, collective, since_s, is_late_only=is_late_only)


def _of_gone(
    gone: Collection[Rank], waiting: tuple[int, ...], collective: Collective | None, since_s: float
) -> Verdict:
    first = min(gone, key=_order_of_ending)
    assert first.ending is not None
    same = tuple(
        sorted(r.rank for r in gone if r.ending is not None and r.ending.how == first.ending.how)
    )
    culprits = same if first.ending.how == "left" else (first.rank,)
    return Verdict(first.ending.how, culprits, waiting, collective, since_s)


# ---- where nobody is in a collective ----


def _idle(job: Job, stuck_after_s: float) -> Verdict | None:
    living = [rank for rank in job.ranks.values() if rank.ending is None]
    limit_s = EVERYONE_TIMES * _limit(job, stuck_after_s)
    if not living or min(rank.idle_s for rank in living) < limit_s:
        return None
    waiting = tuple(sorted(rank.rank for rank in living if waits_outside(rank.frames)))
    others = tuple(sorted(rank.rank for rank in living if rank.rank not in waiting))
    since_s = min(rank.idle_s for rank in living)
    gone = [rank for rank in job.ranks.values() if rank.ending is not None]
    if waiting and gone and not others:
        return _of_gone(gone, waiting, None, since_s)
    return Verdict("idle", others, waiting, since_s=since_s)


# ---- once the command has ended ----


def _of_the_end(job: Job) -> Verdict | None:
    ended = [rank for rank in job.ranks.values() if rank.ending is not None]
    bad = [rank for rank in ended if rank.ending is not None and rank.ending.how in _BAD]
    if not bad and job.exit_status == 0:
        return None
    own = [rank for rank in bad if not is_consequence(rank.ending)]
    found = None if own else _before_the_consequences(job, ended)
    if found is not None:
        return replace(found, is_over=True)
    own = own or bad
    if not own:
        return None
    first = min(own, key=_order_of_ending)
    assert first.ending is not None
    others = tuple(sorted(rank.rank for rank in bad if rank is not first))
    return Verdict(first.ending.how, (first.rank,), others, is_over=True)


def _before_the_consequences(job: Job, ended: Collection[Rank]) -> Verdict | None:
    """Returns the verdict where no rank has failed of itself: someone has left, or never came."""
    left = [rank for rank in ended if rank.ending is not None and rank.ending.how == "left"]
    wait = next(iter(sorted(waits_of(job).values(), key=lambda wait: -wait.since_s)), None)
    if wait is not None and wait.strange:
        return _of_strange(wait)
    if wait is not None and wait.missing:
        gone = tuple(rank.rank for rank in left if rank.rank in wait.missing)
        return Verdict(
            "left" if gone else "missing", gone or wait.missing, wait.waiting, wait.collective
        )
    return _left_first(job, left)


def _left_first(job: Job, left: Collection[Rank]) -> Verdict | None:
    """Returns the verdict on ranks that have entered fewer collectives than others, and left."""
    for name in {name for rank in left for name in rank.groups}:
        stands = {r.rank: r.groups[name] for r in job.ranks.values() if name in r.groups}
        furthest = max(group.entered for group in stands.values())
        early = {r.rank for r in left if r.rank in stands and stands[r.rank].entered < furthest}
        if not early:
            continue
        number = min(stands[rank].entered for rank in early) + 1
        known = [group.recent[number] for group in stands.values() if number in group.recent]
        return Verdict(
            "left",
            tuple(sorted(early)),
            tuple(sorted(stands.keys() - early)),
            known[0] if known else Collective(name, number, "collective"),
        )
    return None


def is_consequence(ending: Ending | None) -> bool:
    """Returns whether a rank has ended since another one had."""
    if ending is None or ending.how == "terminated":
        return ending is not None
    return ending.how == "raised" and bool(_CONSEQUENCE.search(ending.error))


def _order_of_ending(rank: Rank) -> tuple[bool, float]:
    """Orders ranks: first those that ended of themselves, then by time."""
    ending = rank.ending
    assert ending is not None
    return is_consequence(ending) or ending.how == "left", ending.at_s
