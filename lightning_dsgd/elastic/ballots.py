"""What ranks believe and say to each other in an agreement, and which ranks may agree and go on.

`membership` states the rules, and is the machine that follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
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


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> Ranks:
    """Returns the ranks of a rank's group; without groups, it alone.

    Args:
        rank: a rank of the start, or a newcomer, whose number is above all of these
        groups: those of the start, of k ranks each; the numbers of newcomers make groups of k
            consecutive ones, from a multiple of k on
    """
    for group in groups:
        if rank in group:
            return tuple(group)
    size = len(groups[0]) if groups else 1
    begin = rank - rank % size
    return tuple(range(begin, begin + size))


@dataclass(frozen=True)
class Terms:
    """What a view must have.

    Args:
        min_ranks: how many members; None: more than half as many as the last view
        groups: ranks none of which can go on without the others of their group; see `group_of`
    """

    min_ranks: int | None
    groups: tuple[Ranks, ...]

    def whole(self, ranks: set[int]) -> set[int]:
        """Returns the ranks whose group is whole."""
        return {rank for rank in ranks if ranks.issuperset(group_of(rank, self.groups))}

    def may_follow(self, members: Set[int], staying: Set[int], last: Iterable[int]) -> bool:
        """Returns whether a view may follow another.

        Args:
            members: the ranks of the view
            staying: these, and ranks that would stay if their group were whole
            last: the ranks of the view before
        """
        if self.min_ranks is None:
            return bool(members) and len(staying) > len(tuple(last)) // 2
        return len(members) >= max(1, self.min_ranks)

    def too_few(self, ranks: Iterable[int], number: int, num_members: int) -> str:
        """Says that these ranks are too few to follow the view of that number."""
        left = ", ".join(map(str, sorted(ranks)))
        must = f"more than half of view {number}, which has {num_members} ranks"
        if self.min_ranks is not None:
            must += f", and min_ranks={self.min_ranks}"
        if self.groups:
            must += ", in replicas that have lost none of their ranks"
        return f"must go on with {must}, got {left or 'none'}"


def is_majority(ranks: Iterable[int], members: Iterable[int], dead: Set[int]) -> bool:
    """Returns whether ranks are more than half of the members; of two, one if the other is dead."""
    all_of_them = {*members}
    heard = {*ranks} & all_of_them
    if len(all_of_them) == 2:
        return all_of_them - dead <= heard
    return 2 * len(heard) > len(all_of_them)


def trusting(opinions: dict[int, set[int]]) -> list[int]:
    """Returns ranks none of which believes another lost, without those in most quarrels.

    Args:
        opinions: for each rank, the ranks that it believes lost
    """
    left = sorted(opinions)
    while True:
        quarrels = {
            rank: sum(b in opinions[rank] or rank in opinions[b] for b in left if b != rank)
            for rank in left
        }
        worst = max(left, key=lambda rank: (quarrels[rank], rank), default=-1)
        if worst < 0 or not quarrels[worst]:
            return left
        left.remove(worst)
