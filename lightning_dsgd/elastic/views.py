"""One rank's end of the views: what it asks, and what the agreement (`membership`) makes of it.

    a rank is lost, comes, or is to leave    the waits of this rank end; the membership acts
    a message of the agreement comes         the membership hears it
    a view is committed                      `next_view` returns, and waits work again

It is the same between processes (`survival`) and in a simulated world (`simulated`).  These differ
in their clock, in how a wait ends, and in who acts: the mesh's thread, or whoever has the baton.

**What ends all.**  A rank that fails with `Diverged` tells that what all train is not finite.
A rank that hears of it enters no view any more, and tells the others when it fails itself.

**Threads.**  One thread drives the membership, by `_act`.  Others leave it actions (`_soon`), end
the waits of their own rank at once, and wait for a view in `next_view`, under `_lock`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from lightning_dsgd.elastic.ballots import Message
from lightning_dsgd.elastic.membership import Membership
from lightning_dsgd.transport.contract import PeerLost, Reason, Transport, TransportError, Views

Action = Callable[[Membership, float], None]
"""What a membership is to do, at a time."""

# Why the waits of a rank end, where nobody is lost.
JOINS: Final = "joins"
LEAVES: Final = "has left, as it was told to"
RENEWS: Final = "goes on with the others of its replica, which know of a loss"


class ChangingViews(Views):
    """The verbs by which members change; in this class, nobody comes or leaves."""

    def renew(self) -> None:
        """Has the ranks agree on the next view, also where this rank knows of no loss.

        Waits of this rank end as after a loss, and `next_view` is to be called.  The call does
        nothing where the next view is agreed on already and this rank has not entered it.
        """
        raise TransportError("only a network that goes on after a loss has another view")

    @property
    def is_outside(self) -> bool:
        """Whether no next view will hold this rank: its group has lost a rank, or it has ended."""
        return False

    def newcomers(self) -> tuple[int, ...]:
        """Returns the numbers of processes that have asked to become ranks of the next view.

        Where ranks hold a replica together, these are whole groups.
        """
        return ()

    def admit(self, newcomers: Sequence[int]) -> bool:
        """Has the ranks agree on a view with these newcomers; False if none can be let in.

        If so, waits of this rank end as after a loss, and `next_view` is to be called.
        """
        return False

    def dismiss(self, leavers: Sequence[int]) -> bool:
        """Has the ranks agree on a view without these ranks; False if they are no ranks any more.

        Waits end as `admit` says.  All ranks call it, also those that leave, for which no view
        follows.
        """
        return False

    def card(self) -> tuple[str, int, str] | None:
        """Returns the host and port where newcomers reach this rank, and the secret they need.

        Returns None where nobody can join.
        """
        return None


_FINAL: Final = ChangingViews()


def views_of(net: Transport) -> ChangingViews:
    """Returns the views of a network, also where a loss is final."""
    return views if isinstance(views := net.views, ChangingViews) else _FINAL


class AgreedViews(ChangingViews, ABC):
    """One rank's end of the views; see the head of the file.

    Attributes:
        membership: this rank's end of the agreements
        agreed: the number and the members of the newest view
        entered: the number of the view that its threads are in
        ended: why this rank is in no view any more; empty as long as it may be

    Args:
        membership: this rank's end of the agreements
        lock: guards all fields but `membership`, which one thread has
        reasons: why ranks were lost
    """

    def __init__(
        self, membership: Membership, lock: AbstractContextManager[Any], reasons: dict[int, str]
    ) -> None:
        self.rank = membership.me
        self.membership = membership
        self.agreed = membership.number, membership.members
        self.entered = membership.number
        self.ended = ""
        self._lock = lock
        self._reasons = reasons
        self._diverged: PeerLost | None = None
        """The loss with which all ranks end, as what they train is not finite."""
        self._noted: dict[int, bool] = {}
        """The ranks that the membership was told to suspect, and whether they have died."""
        self._left: set[int] = set()
        """The ranks that have said farewell, and are not needed as long as nothing changes."""

    # ---- what carries the agreement ----

    @property
    @abstractmethod
    def failure(self) -> PeerLost | None:
        """Why the waits of this rank raise; None: they do not."""

    @abstractmethod
    def _break_off(self, lost: PeerLost) -> None:
        """Ends the waits of this rank."""

    @abstractmethod
    def _resume(self) -> None:
        """Makes the waits of this rank work again."""

    @abstractmethod
    def _await(self, is_there: Callable[[], bool]) -> None:
        """Waits under `_lock` until `_notify` tells that something is there."""

    @abstractmethod
    def _notify(self) -> None:
        """Tells whoever waits that something has changed."""

    @abstractmethod
    def _soon(self, action: Action) -> None:
        """Has the membership act."""

    @abstractmethod
    def _send(self, rank: int, message: Message) -> None:
        """Sends news of the agreement to a rank."""

    def _tell_end(self) -> None:
        """Tells, before the training thread can notice, that this rank can go on no more."""

    def _begin_view(self) -> None:
        """Clears away what waited in the view before."""

    # ---- from any thread ----

    def lose(self, rank: int, reason: str, *, died: bool) -> None:
        """Takes a rank for lost: ends the waits of this view, has the ranks agree on the next."""
        lost = PeerLost(rank, reason)
        with self._lock:
            if lost.ends_all and self._diverged is None:
                self._diverged, self.ended = lost, "ends with it"
                self._break_off(lost)
                self._notify()
            elif rank in self._noted and (self._noted[rank] or not died):
                return
            self._noted[rank] = died
            self._reasons[rank] = reason
            if rank in self.agreed[1]:
                self._break(lost)
        self._soon(lambda membership, now: membership.suspect(now, rank, died=died))

    def next_view(self, lost: PeerLost) -> tuple[int, tuple[int, ...]]:
        with self._lock:
            if self.failure is None and not self._has_next:
                raise lost  # no rank is lost: one has left in order
            self._await(lambda: bool(self.ended) or self._has_next)
            if self.ended:
                raise self._own_end(lost)
            self.entered, members = self.agreed
            if not self.membership.is_changing:
                self._resume()
            return self.entered, members

    @property
    def _has_next(self) -> bool:
        """Whether a view is agreed on that this rank has not entered."""
        return self.agreed[0] > self.entered

    def _own_end(self, lost: PeerLost) -> PeerLost:
        """Returns why this rank is in no view any more, after that loss."""
        if self._diverged is not None:
            return PeerLost(self._diverged.rank, self._diverged.reason, lost.waited_for)
        missing = self.membership.believes.missing
        if missing >= 0:
            lost = PeerLost(missing, self._why(missing), lost.waited_for)
        why = self.ended or self.membership.ended
        reason = Reason(f"{lost.reason}; rank {self.rank} {why}", ends_all=lost.ends_all)
        return PeerLost(lost.rank, reason, lost.waited_for)

    def renew(self) -> None:
        with self._lock:
            if self._has_next:
                return
            self._break(PeerLost(self.rank, RENEWS))
            in_this_view = partial(_act_in, self.entered, Membership.renew)
        self._soon(in_this_view)

    @property
    def is_outside(self) -> bool:
        membership = self.membership
        with self._lock:  # the membership may not have acted on what is noted
            is_noted = not membership.believes.group.isdisjoint(self._noted)
        return is_noted or membership.believes.missing >= 0 or bool(membership.ended or self.ended)

    def newcomers(self) -> tuple[int, ...]:
        return self.membership.waiting()

    def admit(self, newcomers: Sequence[int]) -> bool:
        with self._lock:
            new = [n for n in newcomers if n not in self.agreed[1] and n not in self._noted]
            if not new:
                return False
            self._break(PeerLost(new[0], JOINS))
            in_this_view = partial(_act_in, self.entered, partial(Membership.admit, newcomers=new))
        self._soon(in_this_view)
        return True

    def dismiss(self, leavers: Sequence[int]) -> bool:
        with self._lock:
            going = [n for n in leavers if n in self.agreed[1] and n not in self._noted]
            if not going:
                return False
            self._break(PeerLost(going[0], LEAVES))
        if self.rank in going:
            self._soon(Membership.leave)
        return True

    # ---- in the thread that drives the membership ----

    def leave(self, rank: int) -> None:
        """Notes that a rank has said farewell, and so takes part in no agreement any more."""
        self._left.add(rank)

    def _hear(self, sender: int, message: Message, now: float) -> None:
        self.membership.hear(now, sender, message)
        for rank in (*message.dead, *message.lost):
            what = "died" if rank in message.dead else "does not answer"
            self._reasons.setdefault(rank, f"{what}, as rank {sender} says")

    def _suspect_left(self, now: float) -> None:
        """Takes ranks that have left for lost, once something changes."""
        if self.membership.is_changing:
            for rank in self._left:
                self.membership.suspect(now, rank, died=True)
            self._left.clear()

    def _act(self) -> None:
        """Carries out what has come of the membership, and shows it to the rank's threads."""
        membership = self.membership
        outbox, membership.outbox = membership.outbox, []
        for rank, message in outbox:
            self._send(rank, message)
        is_new = membership.number > self.agreed[0]
        if not (is_new or membership.is_changing or membership.ended):
            return
        self._tell_end()
        with self._lock:
            self._break(self._some_loss())
            if is_new and not membership.ended:
                self._begin_view()
                self.agreed = membership.number, membership.members
            self.ended = self.ended or membership.ended
            self._notify()

    def _break(self, lost: PeerLost) -> None:
        """Ends the waits of this rank, unless they have ended."""
        if self.failure is None:
            self._break_off(lost)

    def _some_loss(self) -> PeerLost:
        gone = [rank for rank in self._reasons if rank in self.agreed[1] and rank != self.rank]
        if not gone:
            return PeerLost(self.rank, "was told that the members change")
        return PeerLost(gone[-1], self._why(gone[-1]))

    def _why(self, rank: int) -> str:
        """Returns why a rank was lost, as far as this rank knows."""
        return self._reasons.get(rank, "is lost to others")


def _act_in(number: int, action: Action, membership: Membership, now: float) -> None:
    """Has a membership act, unless the members have changed since the view of that number."""
    if number == membership.number:
        action(membership, now)
