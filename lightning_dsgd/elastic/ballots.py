"""What ranks believe, and say to each other, in the course of an agreement: see `membership`."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Final

Ranks = tuple[int, ...]
Ballot = tuple[int, int]
"""A round, and the rank that leads it."""

NONE: Final[Ballot] = (0, -1)
WANT, PREPARE, PROMISE, REFUSE, ACCEPT, ACCEPTED, COMMIT, JOIN, GONE = (
    "want", "prepare", "promise", "refuse", "accept", "accepted", "commit", "join", "gone",
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    """What a rank says to another in the course of an agreement.

    Args:
        kind: see the head of `membership`
        number: the number of the view to agree on; in COMMIT: of the view that is agreed on
        base: the members of the view before that view
        ballot: the ballot that the message belongs to; in REFUSE: the higher one
        members: the members that are proposed, accepted or committed
        accepted: in PROMISE: the ballot in which `members` were accepted
        lost: the ranks that the sender believes lost
        dead: the ranks that have died, or have ended
        joins: the newcomers that want to be members
        leaves: the members that want to leave
    """

    kind: str
    number: int
    base: Ranks = ()
    ballot: Ballot = NONE
    members: Ranks = ()
    accepted: Ballot = NONE
    lost: Ranks = ()
    dead: Ranks = ()
    joins: Ranks = ()
    leaves: Ranks = ()


@dataclass
class Lead:
    """A ballot that this rank leads."""

    ballot: Ballot
    deadline: float
    promises: dict[int, Message] = field(default_factory=dict)
    members: Ranks = ()
    accepts: set[int] = field(default_factory=set)
    """The ranks that have accepted `members`; none while there are promises to come."""


@dataclass
class Beliefs:
    """What one rank believes of the others.

    Attributes:
        lost: the ranks that do not answer, or have died
        dead: the ranks that will never act again
        told: the ranks that others believe lost, since the last view
        waiting: newcomers that have asked, and are neither members nor lost
        joins: newcomers that are to be members of the next view
        leaves: members that are to be none of the next view
        missing: the first rank of this one's group that it believes lost, or that others believe
            lost and have left out of the view for that; -1: none

    Args:
        me: this rank
        group: the ranks that hold a replica with this one, and this one
    """

    me: int
    group: frozenset[int]
    missing: int = -1
    lost: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    joins: set[int] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)

    def alive(self, members: Iterable[int]) -> list[int]:
        """Returns the members that this rank does not believe lost, itself among them."""
        return [rank for rank in members if rank not in self.lost]

    def give_up(self, ranks: Set[int]) -> None:
        """Believes ranks lost from now on."""
        self.lost |= ranks
        if self.missing < 0:
            self.missing = min(ranks & self.group, default=-1)

    def suspect(self, rank: int, *, died: bool) -> None:
        """Believes a rank lost, which does not answer, or has died."""
        self.give_up({rank})
        self.joins.discard(rank)
        self.waiting.discard(rank)
        if died:
            self.dead.add(rank)

    def hear(self, message: Message, members: Ranks) -> None:
        """Takes in what another member believes, but for who has died."""
        self.joins |= {*message.joins} - self.lost - {*members}
        self.leaves |= {*message.leaves} & {*members}
        self.told.update(message.lost)

    def tell(self, message: Message) -> Message:
        """Returns a message with what this rank believes."""
        members = {*message.base}
        return replace(
            message,
            lost=tuple(sorted(self.lost & members)),
            dead=tuple(sorted(self.dead & members)),
            joins=tuple(sorted(self.joins)),
            leaves=tuple(sorted(self.leaves)),
        )

    def enter(self, members: Ranks) -> bool:
        """Enters a view with these members; returns whether another must follow it."""
        self.joins.clear()  # a newcomer that is not in it asks again
        self.waiting -= {*members}
        self.leaves &= {*members}
        return bool(self.lost & {*members} or self.leaves)

    def why_outside(self, number: int) -> str:
        """Returns why this rank is no member of the view of that number."""
        if self.me in self.leaves:
            return "left"
        if self.missing < 0 and self.me not in self.told:
            self.missing = min(self.told & self.group, default=-1)
        if self.missing >= 0:
            return f"cannot go on without rank {self.missing}, which held shards of its replica"
        what = ", or another rank of its replica is" if len(self.group) > 1 else ""
        return f"is not in view {number}, taken for lost{what}"
