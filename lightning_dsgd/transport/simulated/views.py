"""Who goes on after a loss in a simulated world, and who joins: `membership` on virtual time.

Each rank has its own `Membership`, as a real one has (`survival`), and messages between these take
the world's latency.  So the ranks learn of a change at different times, may be lost in the midst of
an agreement, and newcomers come to whatever there is.

    a rank is killed, or fails     the others suspect it, `detect_s` later; they end with one that
                                   tells that what all train is not finite
    a rank is dropped              they suspect it, and it suspects all of them
    a rank doubts another          it alone suspects that one
    a rank has returned            it takes part in no agreement any more

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_dsgd.transport.contract import PeerLost, TransportError
from lightning_dsgd.transport.membership import JOINS, LEAVES, RENEWS, Membership, Message
from lightning_dsgd.transport.simulated.baton import Awaited, Baton


class _NextView(Awaited):
    """The event that a rank is in a view, or in none any more."""

    needs_others = False

    def in_words(self) -> str:
        return "the next view"


@dataclass
class _Member:
    """What one rank knows of the views.

    Attributes:
        membership: the rank's end of the agreements
        agreed: the number and the members of the newest view
        entered: the number of the view that its threads are in
        failure: why its waits raise; None: they do not
        noted: the ranks that it has been told to suspect
        left: the ranks that have returned, and are not needed as long as nothing changes
        diverged: the loss with which all end, as what they train is not finite
        awaited: what its training thread waits for
        tick_at: when its membership is looked at next
    """

    membership: Membership
    agreed: tuple[int, tuple[int, ...]]
    entered: int
    failure: PeerLost | None = None
    noted: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    diverged: PeerLost | None = None
    awaited: _NextView | None = None
    tick_at: float = math.inf


class Views:
    """The memberships of all ranks of a simulated world.

    Args:
        baton: the run's baton
        num_first: how many ranks there are at the start; the others come later
        patience_s: how long an agreement waits for an answer
        latency_s: the latency of its messages
        min_ranks: how many ranks a view must have; None: more than half of the last view's
        takes_away: tells whether a message from one rank to another, sent then, does not arrive
        is_cut: tells whether nothing passes between two ranks, not even that one has ended
        on_change: is called with a rank whose waits end
        groups: ranks none of which can go on without the others of their group
    """

    def __init__(
        self,
        baton: Baton,
        num_first: int,
        patience_s: float,
        latency_s: float,
        min_ranks: int | None,
        takes_away: Callable[[int, int, float], bool],
        is_cut: Callable[[int, int], bool],
        on_change: Callable[[int, PeerLost], None],
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._baton, self._on_change = baton, on_change
        self._takes_away, self._is_cut = takes_away, is_cut
        self._patience_s, self._latency_s = patience_s, latency_s
        self.min_ranks, self.groups = min_ranks, groups
        ranks = tuple(range(num_first))
        self._members = {
            rank: _Member(
                Membership(rank, ranks, patience_s, min_ranks, holds_joins=True, groups=groups),
                (0, ranks),
                0,
            )
            for rank in ranks
        }
        self._gone: set[int] = set()
        self._reasons: dict[int, str] = {}

    # ---- by a rank's threads ----

    def failure(self, rank: int) -> PeerLost | None:
        """Returns why waits of this rank raise; None if they do not."""
        return self._members[rank].failure if rank in self._members else None

    def next_view(self, rank: int, lost: PeerLost) -> tuple[int, tuple[int, ...]]:
        """Returns the next view, to the training thread: see `Endpoint.next_view`."""
        me = self._members[rank]
        if me.failure is None and me.agreed[0] == me.entered:
            raise lost  # no rank is lost: one has left in order
        if me.agreed[0] == me.entered and not (me.membership.ended or me.diverged):
            me.awaited = _NextView()
            try:
                self._baton.wait(me.awaited, None, math.inf)
            finally:
                me.awaited = None
        if me.diverged is not None:
            raise PeerLost(me.diverged.rank, me.diverged.reason, lost.waited_for)
        if me.membership.ended:
            raise PeerLost(
                lost.rank, f"{lost.reason}; rank {rank} {me.membership.ended}", lost.waited_for
            )
        me.entered = me.agreed[0]
        if not me.membership.is_changing:
            me.failure = None
        return me.agreed

    def renew(self, rank: int) -> None:
        """Has the ranks agree on the next view: see `Endpoint.renew`."""
        me = self._members[rank]
        if me.agreed[0] > me.entered:
            return
        self._break(rank, PeerLost(rank, RENEWS))
        if me.entered == me.membership.number:
            self._do(rank, lambda membership, now: membership.renew(now))

    def is_outside(self, rank: int) -> bool:
        """Returns whether no next view will hold this rank: see `Endpoint.is_outside`."""
        membership = self._members[rank].membership
        diverged = self._members[rank].diverged
        return membership.missing >= 0 or bool(membership.ended or diverged)

    def newcomers(self, rank: int) -> tuple[int, ...]:
        """Returns the newcomers that have asked this rank to be let in, and wait."""
        return tuple(sorted(self._members[rank].membership.waiting))

    def admit(self, rank: int, newcomers: Sequence[int]) -> bool:
        """Has the ranks agree on a view with these newcomers: see `Endpoint.admit`."""
        me = self._members[rank]
        new = [n for n in newcomers if n not in me.agreed[1] and n not in me.noted]
        if not new:
            return False
        self._break(rank, PeerLost(new[0], JOINS))
        if me.entered == me.membership.number:  # else the members have changed meanwhile
            for newcomer in new:
                self._do(rank, partial(_admit, newcomer=newcomer))
        return True

    def part(self, rank: int, leavers: Sequence[int]) -> bool:
        """Has the ranks agree on a view without these ranks: see `Endpoint.part`."""
        me = self._members[rank]
        going = [n for n in leavers if n in me.agreed[1] and n not in me.noted]
        if not going:
            return False
        self._break(rank, PeerLost(going[0], LEAVES))
        if rank in going:
            self._do(rank, lambda membership, now: membership.leave(now))
        return True

    def join(self, rank: int, within_s: float) -> None:
        """Has a newcomer ask all that are there to let it in; `next_view` gives its first view."""
        now = self._baton.time
        there = [r for r in self._members if r not in self._gone]
        contacts = [r for r in there if not self._is_cut(rank, r)]
        if not contacts:
            raise TransportError(
                "a newcomer must reach a rank that trains, but none is left; start the job anew"
            )
        membership = Membership(
            rank,
            contacts,
            self._patience_s,
            self.min_ranks,
            now,
            is_newcomer=True,
            limit_s=within_s,
            holds_joins=True,
        )
        self._members[rank] = _Member(membership, (-1, ()), -1, PeerLost(rank, JOINS))
        self._do(rank, Membership.tick)

    # ---- by the baton, at its time ----

    def all_arrive_at(self, sent_at_s: float) -> float:
        """Returns when all that was sent by then is there; a connection's end comes behind that."""
        return sent_at_s + self._latency_s

    def end(self, rank: int) -> None:
        """Notes that nothing of a rank is there any more; the others learn that by other calls."""
        self._gone.add(rank)

    def lose(self, rank: int, reason: str, *, died: bool) -> None:
        """Has all others suspect a rank, and the rank suspect them if it may live."""
        self._reasons.setdefault(rank, reason)
        for other in list(self._members):
            if other != rank and not (died and self._is_cut(rank, other)):
                self._suspect(other, rank, died=died)
                if not died:
                    self._suspect(rank, other, died=False)

    def doubt(self, rank: int, other: int) -> None:
        """Has a rank take another for lost, which lives."""
        self._reasons.setdefault(other, f"has not answered rank {rank}")
        self._suspect(rank, other, died=False)

    def leave(self, rank: int) -> None:
        """Notes that a rank has returned, and takes part in no agreement any more."""
        for other, member in list(self._members.items()):
            if other != rank and not self._is_cut(rank, other):
                member.left.add(rank)
                self._do(other, lambda membership, now: None)

    def _suspect(self, rank: int, lost: int, *, died: bool) -> None:
        member = self._members.get(rank)
        if member is not None:
            member.noted.add(lost)
            failure = PeerLost(lost, self._reasons.get(lost, "does not answer"))
            if failure.ends_all:
                member.diverged, member.failure = failure, None
            if lost in member.agreed[1]:
                self._break(rank, failure)
            self._do(rank, lambda membership, now: membership.suspect(now, lost, died=died))

    def _do(self, rank: int, action: Callable[[Membership, float], None]) -> None:
        """Has one membership act, unless its rank is gone, and carries out what comes of that."""
        if rank in self._gone:
            return
        me, now = self._members[rank], self._baton.time
        membership = me.membership
        action(membership, now)
        if membership.is_changing:
            for left in me.left:
                membership.suspect(now, left, died=True)
            me.left.clear()
        outbox, membership.outbox = membership.outbox, []
        for dst, message in outbox:
            if not self._takes_away(rank, dst, now):
                at_s = now + self._latency_s
                self._baton.plan(at_s, partial(self._deliver, rank, dst, message))
        self._take_over(rank, me)
        next_at = max(membership.next_at, now)
        if next_at < me.tick_at:
            me.tick_at = next_at
            self._baton.plan(next_at, partial(self._tick, rank))

    def _take_over(self, rank: int, me: _Member) -> None:
        """Shows the rank's threads what its membership has come to."""
        membership = me.membership
        is_new = membership.number > me.agreed[0]
        if not (is_new or membership.is_changing or membership.ended):
            return
        if me.failure is None:
            self._break(rank, self._some_loss(rank, me))
        if is_new and not membership.ended:
            me.agreed = membership.number, membership.members
        is_there = me.agreed[0] > me.entered or membership.ended or me.diverged
        if is_there and me.awaited is not None and me.awaited.at_s == math.inf:
            self._baton.ready(me.awaited, self._baton.time)

    def _break(self, rank: int, lost: PeerLost) -> None:
        """Ends the waits of this rank."""
        me = self._members[rank]
        if me.failure is None and rank not in self._gone:
            me.failure = lost
            self._on_change(rank, lost)

    def _some_loss(self, rank: int, me: _Member) -> PeerLost:
        gone = [lost for lost in self._reasons if lost in me.agreed[1] and lost != rank]
        if not gone:
            return PeerLost(rank, "was told that the members change")
        return PeerLost(gone[-1], self._reasons[gone[-1]])

    def _deliver(self, src: int, dst: int, message: Message) -> None:
        if dst in self._members and not self._is_cut(src, dst):
            self._do(dst, lambda membership, now: membership.hear(now, src, message))

    def _tick(self, rank: int) -> None:
        me = self._members[rank]
        if me.tick_at <= self._baton.time:
            me.tick_at = math.inf
            self._do(rank, Membership.tick)


def _admit(membership: Membership, now: float, newcomer: int) -> None:
    membership.admit(now, newcomer)
