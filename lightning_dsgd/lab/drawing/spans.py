"""From what the ranks recorded to what is drawn: who did what when, and whom a wait was due to.

A message that a rank waits for may be late because its sender waits itself, for another.  So each
wait is followed from rank to rank to the one that did not wait, moment by moment: that one was
late, if it was still to come to its exchange; else the messages were on their way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_dsgd.lab.timeline.recorder import ALL
from lightning_dsgd.lab.timeline.trace import Step, Trace

KINDS: Final = ("compute", "fetch", "wait", "exchange", "evaluate", "serve", "late")
"""What a rank does; the last two happen beside the others."""
NOBODY: Final = -1
_CLOCKS_DIFFER_S: Final = 5e-4
"""The most by which clocks differ between nodes."""


@dataclass(frozen=True)
class Span:
    """Holds something that a rank did, in seconds.

    Args:
        kind: one of KINDS
        begin_s: since the training's beginning
        end_s: since the training's beginning
        who: the rank that was late, or NOBODY, for a wait; for a service, the rank that had asked
        step: the step in which it was
    """

    kind: str
    begin_s: float
    end_s: float
    who: int
    step: int


@dataclass
class Track:
    """Holds what one rank did, one thing after the other, and what went on beside that."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    beside: list[Span] = field(default_factory=list)

    def seconds(self, kind: str) -> float:
        """Returns how long the rank did this; overlapping spans count once."""
        spans = self.beside if kind in ("serve", "late") else self.spans
        chosen = [(s.begin_s, s.end_s) for s in spans if s.kind == kind]
        return sum(end - begin for begin, end in union(chosen))

    def share(self, kind: str) -> float:
        """Returns the share of the drawn time in which the rank did this."""
        whole = self.spans[-1].end_s - self.spans[0].begin_s if self.spans else 0.0
        return self.seconds(kind) / whole if whole else 0.0


def tracks(traces: Sequence[Trace], first: int, last: int) -> list[Track]:
    """Returns the steps from `first` to `last` of every rank."""
    waits = _Waits(traces)
    drawn = []
    for trace in traces:
        track = Track(trace.rank)
        for step in trace.steps:
            if first <= step.number <= last:
                track.spans += _of_step(trace.rank, step, waits)
                track.beside += [Span("serve", *each, step.number) for each in step.serve]
        drawn.append(track)
    _mark_the_late(drawn)
    return drawn


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the same time, as spans that do not touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _of_step(rank: int, step: Step, waits: _Waits) -> Iterator[Span]:
    """Yields what the rank did in this step, without a gap; a wait goes before all around it."""
    layers = [
        [Span("exchange", *each, NOBODY, step.number) for each in step.exchange],
        [Span("fetch", *each, NOBODY, step.number) for each in step.fetch],
        [Span("evaluate", *each, NOBODY, step.number) for each in step.evaluate],
        [
            Span("wait", begin, end, who, step.number)
            for wait in step.wait
            for begin, end, who in waits.blame(rank, *wait)
        ],
    ]
    spans = [Span("compute", step.begin_s, step.end_s, NOBODY, step.number)]
    for layer in layers:
        spans = list(_laid_over(spans, sorted(layer, key=lambda span: span.begin_s)))
    return (span for span in spans if span.end_s > span.begin_s)


def _laid_over(below: Sequence[Span], above: Sequence[Span]) -> Iterator[Span]:
    """Yields `above`, cut off at the ends of `below`, and what it leaves of `below`."""
    for span in below:
        at_s = span.begin_s
        for over in above:
            begin_s, end_s = max(over.begin_s, at_s), min(over.end_s, span.end_s)
            if end_s > begin_s:
                yield Span(span.kind, at_s, begin_s, span.who, span.step)
                yield Span(over.kind, begin_s, end_s, over.who, over.step)
                at_s = end_s
        yield Span(span.kind, at_s, span.end_s, span.who, span.step)


class _Waits:
    """Knows when each rank waited, and when it computed."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._ranks = [trace.rank for trace in traces]
        self._waits = {t.rank: sorted(w for s in t.steps for w in s.wait) for t in traces}
        self._busy = {
            t.rank: union(s for step in t.steps for s in (*step.exchange, *step.evaluate))
            for t in traces
        }

    def blame(
        self, rank: int, begin_s: float, end_s: float, src: int
    ) -> Iterator[tuple[float, float, int]]:
        """Yields the wait in pieces, each with the rank that was late, or NOBODY."""
        at_s = begin_s
        part: tuple[float, float, int] | None = None
        while at_s < end_s:
            who, until_s = (
                self._latest(rank, at_s, end_s)
                if src == ALL
                else self._root(rank, src, at_s, end_s)
            )
            if part is not None and part[2] == who:
                part = part[0], until_s, who
            else:
                if part is not None:
                    yield part
                part = at_s, until_s, who
            at_s = until_s
        if part is not None:
            yield part

    def _root(self, rank: int, src: int, at_s: float, end_s: float) -> tuple[int, float]:
        """Returns to whom the chain of waits leads now, and until when it surely does.

        A rank that computes on until another's wait for it is over has sent its message before, or
        its lane has: it is not late.
        """
        seen, wanted_s = {rank}, end_s
        while src not in seen and src in self._waits:
            seen.add(src)
            waits = self._waits[src]
            index = bisect_right(waits, (at_s, float("inf"), 0)) - 1
            if index >= 0 and waits[index][1] > at_s:
                wanted_s = waits[index][1]
                end_s = min(end_s, wanted_s)
                if waits[index][2] == ALL:
                    return self._latest(src, at_s, end_s)
                src = waits[index][2]
                continue
            if index + 1 < len(waits):
                end_s = min(end_s, max(waits[index + 1][0], at_s + 1e-6))
            busy, until_s = self._is_busy(src, at_s)
            is_late = not busy and until_s <= wanted_s + _CLOCKS_DIFFER_S
            return (src if is_late else NOBODY), min(end_s, until_s)
        return NOBODY, end_s

    def _latest(self, rank: int, at_s: float, end_s: float) -> tuple[int, float]:
        """Returns the computing rank that comes to its exchange last."""
        computing, free_s = {}, end_s
        for other in self._ranks:
            busy, until_s = self._is_busy(other, at_s)
            if other != rank and not busy:
                computing[other] = until_s
            elif other != rank:
                free_s = min(free_s, until_s)
        if not computing:  # until one of them leaves what all meet for, and computes again
            return NOBODY, free_s
        latest = max(computing, key=lambda other: computing[other])
        return latest, min(end_s, computing[latest])

    def _is_busy(self, rank: int, at_s: float) -> tuple[bool, float]:
        """Returns whether a rank exchanges or evaluates, and until when that stays so."""
        busy = self._busy[rank]
        index = bisect_right(busy, (at_s, float("inf"))) - 1
        if index >= 0 and busy[index][1] > at_s:
            return True, busy[index][1]
        begin_s = busy[index + 1][0] if index + 1 < len(busy) else float("inf")
        return False, max(begin_s, at_s + 1e-6)


def _mark_the_late(drawn: Sequence[Track]) -> None:
    """Notes, for each rank, when others waited because that rank was late."""
    by_rank = {track.rank: track for track in drawn}
    late: dict[int, list[tuple[float, float]]] = {}
    for track in drawn:
        for span in track.spans:
            if span.kind == "wait" and span.who in by_rank:
                late.setdefault(span.who, []).append((span.begin_s, span.end_s))
    for rank, times in late.items():
        by_rank[rank].beside += [Span("late", *each, NOBODY, 0) for each in union(times)]
