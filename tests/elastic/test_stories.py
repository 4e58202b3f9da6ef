"""Eleven stories of the agreement on views: commands, and beneath each what the code makes of it.

    REWRITE_STORIES=1 python -m pytest tests/elastic/test_stories.py     # writes what it makes now

A story begins with what happens and why it must end so.  Time stands still until `time` lets it
pass, and a message lies where it was sent until `messages` has it arrive.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from lightning_dsgd.elastic.ballots import (
    ACCEPT,
    ACCEPTED,
    COMMIT,
    GONE,
    JOIN,
    NONE,
    PREPARE,
    PROMISE,
    REFUSE,
    WANT,
    Message,
)
from lightning_dsgd.elastic.membership import Membership

STORIES = sorted(Path(__file__).with_name("stories").glob("*.txt"))
PATIENCE_S = 1.0
LIMIT_S = 20.0
Sent = tuple[int, int, Message]


class Cast:
    """The ranks of a story: each command is a method, and its words are the method's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ranks: dict[int, Membership] = {}
        self.min_ranks: int | None = None
        self.died: set[int] = set()
        self.stopped: set[int] = set()
        self.sides: list[set[int]] = []
        self.under_way: list[Sent] = []
        self.lines: list[str] = []
        self.seen: dict[int, int] = {}

    # ---- commands ----

    def start(self, count: str, *options: str) -> None:
        """Begins with so many ranks, perhaps with `min_ranks N`."""
        self.min_ranks = int(options[1]) if options else None
        members = range(int(count))
        for rank in members:
            self.ranks[rank] = Membership(
                rank, members, PATIENCE_S, self.min_ranks, holds_joins=True
            )
        self.seen = dict.fromkeys(members, 0)
        self.lines.append(f"all ARE IN VIEW 0: {words(tuple(members))}")

    def die(self, *ranks: str) -> None:
        """Processes end; the others notice at once."""
        self.died |= set(map(int, ranks))
        self.under_way = [each for each in self.under_way if each[1] not in self.died]
        for lost in map(int, ranks):
            self.of_all(lambda m, lost=lost: m.suspect(self.now, lost, died=True))

    def doubt(self, rank: str, other: str) -> None:
        """A rank has not heard of another for too long."""
        self.do(int(rank), lambda m: m.suspect(self.now, int(other), died=False))

    def cut(self, *words: str) -> None:
        """Nothing passes any more between sides, which doubt each other."""
        self.sides = [set(map(int, side.split())) for side in " ".join(words).split("|")]
        self.under_way = [each for each in self.under_way if self.passes(each[0], each[1])]
        for rank in list(self.ranks):
            for other in self.ranks:
                if not self.passes(rank, other):
                    self.doubt(str(rank), str(other))

    def heal(self) -> None:
        """The link is there again."""
        self.sides = []

    def stop(self, rank: str) -> None:
        """A process stands still; what comes to it waits."""
        self.stopped.add(int(rank))

    def wake(self, rank: str) -> None:
        """A process that stood still goes on."""
        self.stopped.remove(int(rank))

    def come(self, rank: str) -> None:
        """A fresh process asks all that are there to let it in."""
        contacts = [r for r, m in self.ranks.items() if r not in self.died and not m.ended]
        self.ranks[int(rank)] = Membership(
            int(rank), (), PATIENCE_S, self.min_ranks, holds_joins=True
        )
        self.do(int(rank), lambda m: m.ask(self.now, contacts, LIMIT_S))

    def admit(self, rank: str) -> None:
        """All members have met before the same batch, and let a newcomer in that they know of."""
        self.of_all(
            lambda m: m.admit(self.now, [int(rank)]) if m.number >= 0 and m.waiting() else None
        )

    def leave(self, *ranks: str) -> None:
        """Ranks that got SIGTERM have met the others before the same batch, and leave."""
        for rank in ranks:
            self.do(int(rank), lambda m: m.leave(self.now))

    def messages(self, *kinds: str) -> None:
        """All messages arrive, and the answers to them; or those of some kinds, without answers."""
        while arriving := [s for s in self.under_way if self.arrives(s, kinds)]:
            for sent in arriving:
                if sent in self.under_way:
                    self.under_way.remove(sent)
                    src, dst, message = sent
                    self.do(dst, lambda m, s=src, w=message: m.hear(self.now, s, w))
            if kinds:
                return

    def time(self, seconds: str) -> None:
        """So many seconds pass; messages lie where they are."""
        end = self.now + float(seconds)
        while True:
            acting = [r for r in self.ranks if r not in self.died | self.stopped]
            due = min((self.ranks[r].next_at for r in acting), default=math.inf)
            if due > end:
                break
            self.now = max(self.now, due)
            for rank in acting:
                if self.ranks[rank].next_at <= self.now:
                    self.do(rank, lambda m: m.tick(self.now))
        self.now = end

    # ---- what comes of them ----

    def passes(self, rank: int, other: int) -> bool:
        return all((rank in side) == (other in side) for side in self.sides)

    def arrives(self, sent: Sent, kinds: tuple[str, ...]) -> bool:
        return sent[1] not in self.stopped and (not kinds or sent[2].kind in kinds)

    def of_all(self, act: Callable[[Membership], object]) -> None:
        for rank in list(self.ranks):
            self.do(rank, act)

    def do(self, rank: int, act: Callable[[Membership], object]) -> None:
        member = self.ranks[rank]
        if rank in self.died | self.stopped or member.ended:
            return
        act(member)
        outbox, member.outbox = member.outbox, []
        for message, same in groupby(outbox, key=lambda each: each[1]):
            told = [dst for dst, _ in same]
            self.lines.append(f"{rank} {in_words(message, ' '.join(map(str, told)))}")
            self.under_way += [
                (rank, dst, message)
                for dst in told
                if dst in self.ranks and dst not in self.died and self.passes(rank, dst)
            ]
        self.look()

    def look(self) -> None:
        """Notes who has come to a view, or has ended."""
        for rank, member in self.ranks.items():
            if member.ended and rank not in self.died:
                self.died.add(rank)
                self.lines.append(f"{rank} ENDS: {member.ended}")
            elif rank not in self.died and member.number > self.seen.get(rank, -1):
                self.seen[rank] = member.number
                self.lines.append(f"{rank} IS IN VIEW {member.number}: {words(member.members)}")

    def play(self, command: str) -> list[str]:
        """Carries a command out; gives the lines that it has led to."""
        name, *given = command.split()
        self.lines = []
        getattr(self, name)(*given)
        counted = [(line, len([*same])) for line, same in groupby(self.lines)]
        return [line + f", {n} times" * (n > 1) for line, n in counted] or ["nothing"]


def words(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))


def in_words(message: Message, to: str) -> str:
    """What a rank says to others."""
    ballot = "{}.{}".format(*message.ballot)
    has = f"; has accepted {words(message.members)} in {{}}.{{}}".format(*message.accepted)
    said = {
        WANT: f"tells {to}: view {message.number} is wanted",
        PREPARE: f"asks {to}: follow ballot {ballot}?",
        PROMISE: f"promises {to}: follows ballot {ballot}{has * (message.accepted != NONE)}",
        REFUSE: f"refuses {to}: follows ballot {ballot}",
        ACCEPT: f"proposes to {to}: {words(message.members)} in ballot {ballot}",
        ACCEPTED: f"accepts from {to}: ballot {ballot}",
        COMMIT: f"tells {to}: view {message.number} is {words(message.members)}",
        JOIN: f"asks {to} to be let in",
        GONE: f"tells {to}: ends",
    }[message.kind]
    beliefs = {
        "dead": message.dead,
        "silent": tuple(rank for rank in message.lost if rank not in message.dead),
        "to come": message.joins,
        "to leave": message.leaves,
    }
    known = ", ".join(f"{what} {words(ranks)}" for what, ranks in beliefs.items() if ranks)
    return said + f" ({known})" * bool(known)


def told_again(text: str) -> str:
    """The story with what the code makes of its commands now."""
    head, *parts = re.split(r"\n\n(?=[a-z#])", text.strip())
    cast, parts_now = Cast(), [head]
    for part in parts:
        before = part.partition("\n----\n")[0]
        command = before.splitlines()[-1]
        parts_now.append("\n".join([before, "----", *cast.play(command)]))
    return "\n\n".join(parts_now) + "\n"


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_a_story_ends_as_it_is_told(story: Path) -> None:
    text = story.read_text()
    now = told_again(text)
    if os.environ.get("REWRITE_STORIES"):
        story.write_text(now)
    else:
        assert now == text
