"""What became of a job in a storm, and what of it held.

views        all members of a view name the same members; a rank's views only follow each other;
more than half of the members of the view before have gone on, or left
samples      every portion was trained on in each epoch; again only if whoever had trained
on it first was lost
waits        nobody waited for ever, no change of a view took longer than it may, and no newcomer
waited for half as long to be let in
consensus    all members began each view with the same weights, and ended with the same
going on     a rank to which nothing happened came to the end, unless too few were left
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.elastic.chaos.schedule import Event

TAKES_PART: Final = "taking part"
ALIVE: Final = "alive"
JOINS: Final = "joining"
LEFT: Final = "left"
FINISHED: Final = "finished"
_MUST_END: Final = ("taken for lost", "must go on with more than half")
_ENDING_S: Final = 20.0
"""By how much, at most, the ends of ranks differ where a job ends."""
_TOO_LATE: Final = ("must reach a rank that trains", "could not join")


@dataclass
class Process:
    """Holds what one process did.

    Args:
        rank: its number, which no other has
        place: the place that it has taken; -1: none, as all were taken
        begin_s: when it began
        states: from when on it was in which state, in the view of which number
        views: the views that it has entered: when, the number, the members, a digest of the weights
        trained: the epoch and the number of each portion that it has trained on
        struck_s: when something happened to it of which it may be lost; None: nothing did
        end_s: when it ended
        how: FINISHED, LEFT, or what it ended with
        is_dead: whether it was killed
    """

    rank: int
    place: int
    begin_s: float
    states: list[tuple[float, str, int]] = field(default_factory=list)
    views: list[tuple[float, int, tuple[int, ...], str]] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)
    struck_s: float | None = None
    end_s: float = 0.0
    how: str = ""
    is_dead: bool = False

    def enter(self, at_s: float, state: str, number: int) -> None:
        """Notes that another state begins."""
        if not self.states or self.states[-1][1:] != (state, number):
            self.states.append((at_s, state, number))


@dataclass
class Record:
    """Holds what became of a job.

    Args:
        events: what went wrong, and the ranks that it befell
        processes: all that there were
        num_portions: of an epoch
        longest_s: how long a change of a view may take
    """

    num_portions: int
    longest_s: float
    events: list[tuple[Event, tuple[int, ...]]] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    """A digest of each rank's weights at the end."""
    num_epochs: int = 0

    def views(self) -> dict[int, tuple[int, ...]]:
        """The members of each view, as the first of them says."""
        found: dict[int, tuple[int, ...]] = {}
        for process in self.processes.values():
            for _, number, members, _ in process.views:
                found.setdefault(number, members)
        return dict(sorted(found.items()))


def _views(record: Record) -> Iterator[str]:
    views = record.views()
    for process in record.processes.values():
        last = -1
        for _, number, members, _ in process.views:
            if members != views[number]:
                yield f"view {number} is {members} on rank {process.rank}, and {views[number]}"
            if process.rank not in members:
                yield f"rank {process.rank} is in view {number} of {members}"
            if number <= last:
                yield f"rank {process.rank} entered view {number} after view {last}"
            last = number
    leavers = {p.rank for p in record.processes.values() if p.how == LEFT}
    for number, members in views.items():
        before = views.get(number - 1)
        if before is not None:
            lost = {*before} - {*members} - leavers
            if 2 * len(lost) >= len(before):
                yield f"view {number} of {members} followed {before}, without more than half"


def _samples(record: Record) -> Iterator[str]:
    trained: dict[tuple[int, int], list[int]] = defaultdict(list)
    for process in record.processes.values():
        for made in process.trained:
            trained[made].append(process.rank)
    for epoch in range(record.num_epochs):
        never = [each for each in range(record.num_portions) if (epoch, each) not in trained]
        if never:
            yield f"epoch {epoch}: nobody trained on {never}"
    for (epoch, portion), ranks in sorted(trained.items()):
        stayed = [rank for rank in ranks if record.processes[rank].how in (FINISHED, LEFT)]
        if len(stayed) > 1:
            yield f"epoch {epoch}: ranks {stayed} all trained on {portion}"


def _waits(record: Record) -> Iterator[str]:
    for process in record.processes.values():
        words = ("waited", "every rank waits", "could not agree", "still there")
        if any(word in process.how for word in words):
            yield f"rank {process.rank}: {process.how}"
        ends = [at_s for at_s, *_ in process.states[1:]] + [process.end_s]
        limits_s = {ALIVE: record.longest_s, JOINS: record.longest_s / 2}
        for (begin_s, state, _), end_s in zip(process.states, ends, strict=False):
            is_own = process.struck_s is None or end_s < process.struck_s
            if is_own and end_s - begin_s > limits_s.get(state, math.inf):
                yield (
                    f"rank {process.rank} was in no view for {end_s - begin_s:.1f} s, "
                    f"from {begin_s:.1f} s on"
                )


def _consensus(record: Record) -> Iterator[str]:
    digests: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process in record.processes.values():
        for _, number, _, digest in process.views:
            digests[number][digest].append(process.rank)
    for number, by_digest in digests.items():
        if len(by_digest) > 1:
            yield f"view {number} began with different weights: {[*by_digest.values()]}"
    if len({*record.ends.values()}) > 1:
        yield f"ranks ended with different weights: {record.ends}"


def _going_on(record: Record) -> Iterator[str]:
    for process in record.processes.values():
        if process.how in (FINISHED, LEFT) or process.is_dead or process.place < 0:
            continue
        if not process.views and any(why in process.how for why in _TOO_LATE):
            if process.struck_s is None and _someone_trained(record, process):
                yield f"rank {process.rank} could not join: {process.how}"
        elif process.struck_s is None and not _has_too_few(record, process):
            yield f"rank {process.rank}, to which nothing happened, ended: {process.how}"
        elif not any(why in process.how for why in _MUST_END):
            yield f"rank {process.rank} ended: {process.how}"


def _someone_trained(record: Record, newcomer: Process) -> bool:
    """Returns whether a rank trained while a newcomer asked to be let in, and for long after."""
    until_s = newcomer.end_s + _ENDING_S
    return any(
        process.views and process.views[0][0] <= newcomer.begin_s and process.end_s > until_s
        for process in record.processes.values()
    )


def _has_too_few(record: Record, process: Process) -> bool:
    """Returns whether half or less of a process's last view was left alone, as far as is known."""
    if not process.views:
        return False
    members = process.views[-1][2]
    struck = [
        rank
        for rank in members
        if (at_s := record.processes[rank].struck_s) is not None and at_s <= process.end_s
    ]
    return 2 * (len(members) - len(struck)) <= len(members)


RULES: Final[dict[str, Callable[[Record], Iterator[str]]]] = {
    "all members of a view agree on it, and more than half go on": _views,
    "every sample is trained on, and once by those that stay": _samples,
    "nobody waits for ever": _waits,
    "members have the same weights where a view begins, and at the end": _consensus,
    "who is left alone goes on to the end": _going_on,
}
"""What must hold, and what finds where it did not."""


def findings(record: Record) -> dict[str, list[str]]:
    """Returns for each rule where it did not hold."""
    return {rule: list(find(record)) for rule, find in RULES.items()}


def summary(record: Record) -> dict[str, Any]:
    """Returns what two plays of one schedule must have in common."""
    times = {
        number: min(
            at_s for p in record.processes.values() for at_s, n, *_ in p.views if n == number
        )
        for number in record.views()
    }
    return {
        "events": [
            {"at_s": _ms(e.at_s), "kind": e.kind, "what": e.in_words(), "ranks": ranks}
            for e, ranks in record.events
        ],
        "views": [
            {"number": number, "at_s": _ms(times[number]), "members": members}
            for number, members in record.views().items()
        ],
        "processes": [_process(p) for p in record.processes.values() if p.place >= 0],
    }


def _process(process: Process) -> dict[str, Any]:
    return {
        "rank": process.rank,
        "place": process.place,
        "begin_s": _ms(process.begin_s),
        "end_s": _ms(process.end_s),
        "end": process.how,
        "num_trained": len(process.trained),
        "states": [(_ms(at_s), *rest) for at_s, *rest in process.states],
    }


def _ms(seconds: float) -> float:
    return round(seconds, 3)
