"""Which ranks may agree, and go on: see the rules in `membership`."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """What a view must have.

    Args:
        min_ranks: how many members; None: more than half as many as the last view
        groups: ranks none of which can go on without the others of their group
    """

    min_ranks: int | None
    groups: tuple[frozenset[int], ...]

    def group_of(self, rank: int) -> frozenset[int]:
        """Returns the ranks of a rank's group; without groups, it alone."""
        return next((group for group in self.groups if rank in group), frozenset({rank}))

    def whole(self, ranks: set[int]) -> set[int]:
        """Returns the ranks whose group is whole."""
        return ranks.difference(*(group for group in self.groups if not group <= ranks))

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
