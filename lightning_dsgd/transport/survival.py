"""A mesh that goes on after a loss: `membership` over the mesh's connections.

    a connection ends, silence, a rank says that it fails    suspected; waits of this view end
    news of kind AGREEMENT                                   messages of the agreement, both ways
    a view is committed                                      `next_view` returns, waits work again

Every rank is connected to every other and watches it, so that no loss needs another rank to be
noticed and none is in the midst of all news.  Until a rank calls `survive`, a loss ends the
rank: a job that cannot start is better ended.

**What has died.**  Where a connection ends (FIN or RST), the process at its other end has ended:
this package closes none while it lives, but after it has said farewell.  One that the kernel gives
up for want of answers, and silence, are a link that may be cut.

**Old messages.**  From the first sign of a change until `next_view` every wait on this rank raises.
What still arrives for older views is dropped when the next one is entered; and what is just being
read into memory that a receive of an older view has offered is read to its end elsewhere, as that
memory may be weights.

**Newcomers.**  A process that comes later has a number of its own.  It connects to every member and
asks to be let in; to members that connection serves for both directions.  It waits in `next_view`,
as after a loss, until a view has it as a member.

**What ends all.**  A rank that fails with `Diverged` tells that what all train is not finite.
Whoever hears of it enters no view any more, and tells the others when it fails itself.

**Groups.**  A rank whose replica has lost another rank stays until the others have agreed on a view
without it: they may need its vote, which the mesh's thread gives.  Its training thread may be in a
collective of another library then, which fails or hangs: `blame`, and `on_end`.

**Threads.**  The mesh's thread alone drives the agreement.  Others leave it a note (`lose`), end
the waits of their own rank at once, and wait for a view in `next_view` under `_changed`, which is
never held while anything is sent or waited for but that.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_dsgd.transport.connections import Connections
from lightning_dsgd.transport.contract import PeerLost
from lightning_dsgd.transport.mailboxes import Mailboxes
from lightning_dsgd.transport.membership import JOINS, LEAVES, RENEWS, Membership, Message
from lightning_dsgd.transport.view import bits_of, number_of

_LOOK_EVERY_S: Final = 0.5
_HALF: Final = 1 << 14


class Survival:
    """One rank's end of the agreement on who goes on: see the head of the file.

    Args:
        rank: this rank
        world_size: how many ranks there are at the start
        connections: the connections to all other ranks
        mailboxes: the mailboxes, in which waits end
        patience_s: how long an agreement waits for an answer
        min_ranks: how many ranks a view must have; None: more than half of the last view's
        send: sends news of the agreement to a rank
        contacts: the ranks that a newcomer asks to be let in; None: this is a member of view 0
        join_within_s: how long a newcomer asks
        groups: ranks none of which can go on without the others of their group
        on_end: is told that this rank can go on no more: its group, or the training, has failed
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connections: Connections,
        mailboxes: Mailboxes,
        patience_s: float,
        min_ranks: int | None,
        send: Callable[[int, Any], None],
        contacts: Sequence[int] | None = None,
        join_within_s: float | None = None,
        groups: Sequence[Sequence[int]] = (),
        on_end: Callable[[PeerLost], None] = lambda lost: None,
    ) -> None:
        self._rank = rank
        self._connections, self._mailboxes, self._send = connections, mailboxes, send
        is_newcomer = contacts is not None
        self._membership = Membership(
            rank,
            range(world_size) if contacts is None else contacts,
            patience_s,
            min_ranks,
            time.monotonic(),
            is_newcomer=is_newcomer,
            limit_s=join_within_s,
            holds_joins=True,
            groups=groups,
        )
        self._on_end, self._has_groups, self._has_told_end = on_end, bool(groups), False
        self._mine = {other for group in groups if rank in group for other in group}
        if is_newcomer:
            mailboxes.break_off(PeerLost(rank, JOINS))
        self._notes: deque[tuple[int, str, bool]] = deque()
        self._changed = threading.Condition()
        self._admits: deque[tuple[int, int]] = deque()
        """Newcomers to let in, each with the number of the view that is to end for it."""
        self._renewals: deque[int] = deque()
        """The numbers of the views that are to end."""
        self._agreed = self._membership.number, self._membership.members
        self._departs = False
        self._ended = ""
        self._diverged: PeerLost | None = None
        """The loss with which all ranks end, as what they train is not finite."""
        self._entered = self._agreed[0]
        self._left: set[int] = set()
        self._noted: set[int] = set()
        self._reasons: dict[int, str] = {}

    # ---- from any thread ----

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last view that was agreed on."""
        return self._agreed[1]

    def lose(self, rank: int, reason: str, *, died: bool) -> None:
        """Takes a rank for lost: ends the waits of this view, has the ranks agree on the next."""
        lost = PeerLost(rank, reason)
        with self._changed:
            if lost.ends_all and self._diverged is None:
                self._diverged, self._ended = lost, "ends with it"
                self._mailboxes.break_off(lost)
                self._changed.notify_all()
            elif rank in self._noted:
                return
            self._noted.add(rank)
            self._reasons[rank] = reason
            if rank in self._agreed[1] and self._mailboxes.failure is None:
                self._mailboxes.break_off(lost)
        self._notes.append((rank, reason, died))
        self._connections.wake()
        if lost.ends_all:
            self._on_end(lost)

    def next_view(self, lost: PeerLost) -> tuple[int, tuple[int, ...]]:
        """Returns the next view, to the training thread: see `Endpoint.next_view`."""
        with self._changed:
            if self._mailboxes.failure is None and self._agreed[0] == self._entered:
                raise lost  # no rank is lost: one has left in order
            while not self._ended and self._agreed[0] == self._entered:
                self._changed.wait(_LOOK_EVERY_S)  # the agreement has a limit of its own
            if self._ended:
                raise self._own_end(lost)
            self._entered, members = self._agreed
            self._mailboxes.go_on(self._is_old)
            return self._entered, members

    def _own_end(self, lost: PeerLost) -> PeerLost:
        """Returns why this rank is in no view any more, after that loss."""
        if self._diverged is not None:
            return PeerLost(self._diverged.rank, self._diverged.reason, lost.waited_for)
        missing = self._membership.missing
        if missing >= 0:
            lost = PeerLost(missing, self.why(missing), lost.waited_for)
        return PeerLost(
            lost.rank, f"{lost.reason}; rank {self._rank} {self._ended}", lost.waited_for
        )

    def blame(self, what: str, within_s: float) -> None:
        """Raises `PeerLost` if a collective of this rank's group has failed for one of its ranks.

        Args:
            what: what the collective does
            within_s: how soon a loss is noticed
        """
        end = time.monotonic() + within_s
        with self._changed:
            while not self._ended and (time.monotonic() < end or self._is_changing()):
                self._changed.wait(_LOOK_EVERY_S)
            if self._ended:
                raise self._own_end(PeerLost(self._rank, "is in no view any more", what))

    def _is_changing(self) -> bool:
        """Returns whether the ranks are agreeing on the next view, which has a limit of its own."""
        return self._mailboxes.failure is not None and self._agreed[0] == self._entered

    def renew(self) -> None:
        """Has the ranks agree on the next view: see `Endpoint.renew`."""
        with self._changed:
            if self._agreed[0] > self._entered:
                return
            if self._mailboxes.failure is None:
                self._mailboxes.break_off(PeerLost(self._rank, RENEWS))
            self._renewals.append(self._entered)
        self._connections.wake()

    @property
    def is_outside(self) -> bool:
        """Whether no next view will hold this rank: see `Endpoint.is_outside`."""
        membership = self._membership
        with self._changed:  # the mesh's thread may not have taken the last notes yet
            is_noted = not self._mine.isdisjoint(self._noted)
        return is_noted or membership.missing >= 0 or bool(membership.ended or self._ended)

    def newcomers(self) -> tuple[int, ...]:
        """Returns the newcomers that have asked to be let in, and wait."""
        return tuple(sorted(self._membership.waiting))

    def admit(self, newcomers: Sequence[int]) -> bool:
        """Has the ranks agree on a view with these newcomers; False if none can be let in.

        If so, waits of this rank end, and `next_view` is to be called.
        """
        with self._changed:
            new = [n for n in newcomers if n not in self._agreed[1] and n not in self._noted]
            if not new:
                return False
            if self._mailboxes.failure is None:
                self._mailboxes.break_off(PeerLost(new[0], JOINS))
            self._admits.extend((self._entered, newcomer) for newcomer in new)
        self._connections.wake()
        return True

    def part(self, leavers: Sequence[int]) -> bool:
        """Has the ranks agree on a view without these, perhaps without this rank; see `admit`."""
        with self._changed:
            going = [n for n in leavers if n in self._agreed[1] and n not in self._noted]
            if not going:
                return False
            if self._mailboxes.failure is None:
                self._mailboxes.break_off(PeerLost(going[0], LEAVES))
        self._departs = self._rank in going
        self._connections.wake()
        return True

    def leave(self, rank: int) -> None:
        """Notes that a rank has said farewell, and so takes part in no agreement any more."""
        self._left.add(rank)

    def why(self, rank: int) -> str:
        """Returns why a rank was lost, as far as this rank knows."""
        return self._reasons.get(rank, "is lost to others")

    def _is_old(self, channel: int) -> bool:
        behind = bits_of(self._entered) - number_of(channel)
        return 0 < behind % (2 * _HALF) < _HALF

    # ---- in the mesh's thread ----

    @property
    def next_at(self) -> float:
        """The time at which `tick` is due."""
        return self._membership.next_at

    def tick(self) -> None:
        """Takes the notes of other threads, and does what is due."""
        now = time.monotonic()
        while self._notes:
            rank, _, died = self._notes.popleft()
            self._membership.suspect(now, rank, died=died)
        if self._departs:
            self._departs = False
            self._membership.leave(now)
        while self._admits:
            number, newcomer = self._admits.popleft()
            if number == self._membership.number:  # else the members have changed meanwhile
                self._membership.admit(now, newcomer)
        while self._renewals:
            if self._renewals.popleft() == self._membership.number:
                self._membership.renew(now)
        if self._membership.is_changing:
            for rank in self._left:
                self._membership.suspect(now, rank, died=True)
            self._left.clear()
        if self._membership.next_at <= now:
            self._membership.tick(now)
        self._act()

    def hear(self, sender: int, text: bytes) -> None:
        """Hears news of the agreement; raises `ValueError` or `TypeError` if it is no such news."""
        message = Message(**{name: _tuples(value) for name, value in json.loads(text).items()})
        self._membership.hear(time.monotonic(), sender, message)
        for rank in (*message.dead, *message.lost):
            what = "died" if rank in message.dead else "does not answer"
            self._reasons.setdefault(rank, f"{what}, as rank {sender} says")
        self._act()

    def _act(self) -> None:
        membership = self._membership
        outbox, membership.outbox = membership.outbox, []
        for rank, message in outbox:
            self._send(rank, dataclasses.asdict(message))
        is_new = membership.number > self._agreed[0]
        if not (is_new or membership.is_changing or membership.ended):
            return
        self._tell_end()  # before the training thread can notice: then it is no last resort
        with self._changed:
            if self._mailboxes.failure is None:
                self._mailboxes.break_off(self._some_loss())
            if is_new and not membership.ended:
                self._mailboxes.forget_broken()
                for connection in self._connections.all():
                    connection.read_elsewhere()
                self._agreed = membership.number, membership.members
            if not membership.is_changing or membership.ended:
                self._ended = self._ended or membership.ended
                self._changed.notify_all()

    def _tell_end(self) -> None:
        """Tells, once, that this rank can go on no more."""
        if self._membership.ended and self._has_groups and not self._has_told_end:
            self._has_told_end = True
            self._on_end(self._own_end(self._some_loss()))

    def _some_loss(self) -> PeerLost:
        gone = [rank for rank in self._reasons if rank in self._agreed[1] and rank != self._rank]
        if not gone:
            return PeerLost(self._rank, "was told that the members change")
        return PeerLost(gone[-1], self.why(gone[-1]))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
