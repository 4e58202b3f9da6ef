"""A verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_dsgd.why.causes import place_of, usual_cause
from lightning_dsgd.why.records import Job, Rank
from lightning_dsgd.why.stacks import Frame, purpose_of
from lightning_dsgd.why.verdict import Verdict

_MOST_RANKS: Final = 8
_ENDED: Final = {
    "left": "has ended its program",
    "raised": "has raised an error",
    "killed": "was killed without a word, as by SIGKILL",
    "terminated": "was ended by SIGTERM",
    "crashed": "has crashed",
}


def lines(verdict: Verdict, job: Job) -> list[str]:
    """Returns the lines that tell a user the verdict about a job."""
    told = [_headline(verdict, job)]
    for ranks, frames in _by_place(verdict.culprits, job):
        told.append(f"  {_ranks(ranks)}: {_state(job, ranks[0], place_of(frames))}")
    told += _error(verdict, job)
    if verdict.is_over and verdict.waiting:
        told.append(f"  {_ranks(verdict.waiting)} ended after that")
    elif verdict.waiting:
        for ranks, frames in _by_place(verdict.waiting, job):
            told.append(f"  {_ranks(ranks)}: {_wait(len(ranks))} in {place_of(frames)}")
    cause = usual_cause(verdict, job)
    if cause.often:
        told.append(f"  often: {cause.often}")
    told.append(f"  next:  {cause.next}")
    return told


def _headline(verdict: Verdict, job: Job) -> str:
    who = _ranks(verdict.culprits)
    where = _collective(verdict, job)
    since = f"{_ranks(verdict.waiting)} {_wait(len(verdict.waiting))} since {verdict.since_s:.0f} s"
    if verdict.is_over:
        return f"ended badly: {_how_it_ended(verdict, who, where)}"
    if verdict.is_late_only:
        return f"late: {who} works and has not entered {where}; {since}"
    if verdict.cause in _ENDED:
        return f"stuck: {who} {_ENDED[verdict.cause]}, and never entered {where}; {since}"
    if verdict.cause == "unstarted":
        return f"stuck: {who} has never started; {since} in {where}"
    if verdict.cause == "disagree":
        return f"stuck: {_entered_another(verdict, who, where)}; {since}"
    if verdict.cause == "cycle":
        return f"stuck: ranks wait for each other in different groups; {since} in {where}"
    if verdict.cause == "everyone":
        return f"stuck: all ranks have entered {where}, and it does not end; {since}"
    if verdict.cause == "idle":
        return f"stuck: no rank has worked since {verdict.since_s:.0f} s"
    return f"stuck: {who} never entered {where}; {since}"


def _how_it_ended(verdict: Verdict, who: str, where: str) -> str:
    if verdict.cause == "missing":
        return f"{who} never entered {where}"
    if verdict.cause == "disagree":
        return _entered_another(verdict, who, where)
    if verdict.cause == "left":
        return f"{who} has ended its program and never entered {where}"
    return f"{who} {_ENDED[verdict.cause]}, before any other rank"


def _entered_another(verdict: Verdict, who: str, where: str) -> str:
    other = verdict.instead
    theirs = "another collective" if other is None else f"{other.name} {other.number}"
    return f"{who} entered {theirs} where the others entered {where}"


def _collective(verdict: Verdict, job: Job) -> str:
    """Returns the name of what the ranks wait in."""
    frames = next((job.ranks[rank].frames for rank in verdict.waiting if rank in job.ranks), ())
    each = verdict.collective
    if each is None:
        stages = {job.ranks[rank].stage for rank in verdict.waiting if rank in job.ranks}
        return "init_process_group" if "joining" in stages else "what the others wait for"
    about = [purpose_of(frames)] if purpose_of(frames) else []
    about += [] if each.group == "0" else [f"group {each.group}"]
    return f"{each.name} {each.number}" + (f" ({', '.join(about)})" if about else "")


def _error(verdict: Verdict, job: Job) -> list[str]:
    first = job.ranks.get(verdict.culprits[0]) if verdict.culprits else None
    if first is None or first.ending is None or not first.ending.error:
        return []
    return [f"    {line}" for line in first.ending.error.splitlines()[:6]]


def _state(job: Job, rank: int, place: str) -> str:
    known = job.ranks.get(rank)
    if known is None:
        return "no process of it has been seen"
    if known.ending is not None:
        was = "was last seen at" if known.ending.how != "raised" else "raised at"
        return f"{was} {place}"
    if known.idle_s > 1.0:
        return f"is at {place}, and has not worked since {known.idle_s:.0f} s"
    return f"is at {place}"


def _by_place(ranks: Sequence[int], job: Job) -> list[tuple[list[int], Sequence[Frame]]]:
    """Groups ranks by where they are."""
    found: dict[str, tuple[list[int], Sequence[Frame]]] = {}
    for rank in ranks:
        frames = _frames(job.ranks.get(rank))
        found.setdefault(place_of(frames), ([], frames))[0].append(rank)
    return list(found.values())


def _frames(rank: Rank | None) -> Sequence[Frame]:
    if rank is None:
        return ()
    if rank.ending is not None and rank.ending.frames:
        return rank.ending.frames
    return rank.frames


def _ranks(ranks: Sequence[int]) -> str:
    """Returns ranks in words: "rank 2", "ranks 0, 1, 3"."""
    if not ranks:
        return "no rank"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"
