"""A mesh that goes on after a loss: the agreement (`views`) over the mesh's connections.

    a connection ends, silence, a rank says that it fails    suspected; waits of this view end
    news of kind AGREEMENT                                   messages of the agreement, both ways
    a view is committed                                      `next_view` returns, waits work again

Every rank is connected to every other and watches it, so that no loss needs another rank to be
noticed and none is in the midst of all news.  Until a rank calls `survive`, a loss ends the rank: a
job that cannot start is better ended.

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

**Groups.**  A rank whose replica has lost another rank stays until the others have agreed on a view
without it: they may need its vote, which the mesh's thread gives.  Its training thread may be in a
collective of another library then, which fails or hangs: `blame`, and `_tell_end`.

**Threads.**  The mesh's thread drives the membership.  `_changed` is never held while anything is
sent or waited for but the next view.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from lightning_dsgd.elastic.ballots import Message, group_of
from lightning_dsgd.elastic.membership import Membership
from lightning_dsgd.elastic.views import JOINS, Action, AgreedViews
from lightning_dsgd.transport.contract import PeerLost, TransportError
from lightning_dsgd.transport.mesh import LossPolicy, Mesh, encode
from lightning_dsgd.transport.messages import AGREEMENT, HEADER
from lightning_dsgd.transport.view import is_old

_LOOK_EVERY_S: Final = 0.5


def survive(mesh: Mesh, min_ranks: int | None, groups: Sequence[Sequence[int]]) -> None:
    """Has a view follow each loss from now on; connects to every rank, and watches it."""
    others = [rank for rank in range(mesh.world_size) if rank != mesh.rank]
    for peer in others:
        mesh.connections.to(peer)
    mesh.connections.let_in_newcomers()
    mesh.watched = others
    mesh.policy = Survival(mesh, min_ranks, groups)


def join(
    mesh: Mesh, min_ranks: int | None, within_s: float, groups: Sequence[Sequence[int]] = ()
) -> None:
    """Asks the ranks whose addresses the mesh was given to let this newcomer in.

    Raises:
        TransportError: if none of them can be reached, or one of this newcomer's group cannot
    """
    mesh.connections.let_in_newcomers()
    mesh.policy = survival = Survival(mesh, min_ranks, groups, is_newcomer=True)
    contacts: list[int] = []
    for rank in mesh.connections.known():
        if mesh.connections.reaches(rank):
            contacts.append(rank)
            mesh.watched = tuple(contacts)  # they hear from this rank while it tries others
    out_of_reach = {*group_of(mesh.rank, groups)} - {mesh.rank, *contacts}
    if out_of_reach:
        rank = min(out_of_reach)
        raise PeerLost(rank, f"cannot be reached by rank {mesh.rank}, which joins with it")
    survival.ask(contacts, within_s)


class Survival(AgreedViews, LossPolicy):
    """What becomes of a loss on a mesh that goes on: see the head of the file.

    Args:
        mesh: the mesh of this rank
        min_ranks: how many ranks a view must have; None: more than half of the last view's
        groups: ranks none of which can go on without the others of their group
        is_newcomer: whether this rank is in no view yet, and will `ask`
    """

    goes_on = True

    def __init__(
        self,
        mesh: Mesh,
        min_ranks: int | None,
        groups: Sequence[Sequence[int]] = (),
        *,
        is_newcomer: bool = False,
    ) -> None:
        self._mesh = mesh
        self._connections, self._mailboxes = mesh.connections, mesh.mailboxes
        membership = Membership(
            mesh.rank,
            () if is_newcomer else range(mesh.world_size),
            mesh.heartbeat_timeout_s / 2,
            min_ranks,
            holds_joins=True,
            groups=groups,
        )
        self._changed = threading.Condition()
        super().__init__(membership, self._changed, {})
        self._has_groups, self._has_told_end = bool(groups), False
        self._actions: deque[Action] = deque()
        if is_newcomer:
            self._mailboxes.break_off(PeerLost(mesh.rank, JOINS))

    # ---- from any thread ----

    def ask(self, contacts: Sequence[int], within_s: float) -> None:
        """Asks these ranks, to which the mesh is connected, to let this newcomer in.

        Raises:
            TransportError: if none of them is left that is not of its group
        """
        with self._changed:
            is_alone = {*contacts} <= self._noted.keys() | self.membership.believes.group
        if is_alone:
            raise TransportError(
                f"a newcomer must reach a rank that trains, but none of "
                f"{self._connections.known()} answers; start the job anew"
            )
        self._soon(lambda membership, now: membership.ask(now, contacts, within_s))

    @property
    def failure(self) -> PeerLost | None:
        return self._mailboxes.failure

    def card(self) -> tuple[str, int, str]:
        return *self._connections.own(), self._mesh.secret.hex()

    def lose(self, rank: int, reason: str, *, died: bool) -> None:
        super().lose(rank, reason, died=died)
        lost = PeerLost(rank, reason)
        if lost.ends_all:
            self._mesh.tell_loss(lost)

    def blame(self, what: str) -> None:
        """Raises `PeerLost` if a collective of this rank's group fails for one of its ranks."""
        end = time.monotonic() + self._mesh.heartbeat_timeout_s
        with self._changed:
            while not self.ended and (time.monotonic() < end or self._is_changing()):
                self._changed.wait(_LOOK_EVERY_S)
            if self.ended:
                raise self._own_end(PeerLost(self.rank, "is in no view any more", what))

    def _is_changing(self) -> bool:
        """Returns whether the ranks are agreeing on the next view, which has a limit of its own."""
        return self.failure is not None and not self._has_next

    def _break_off(self, lost: PeerLost) -> None:
        self._mailboxes.break_off(lost)

    def _resume(self) -> None:
        self._mailboxes.go_on(partial(is_old, self.entered))

    def _await(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self._changed.wait(_LOOK_EVERY_S)  # the agreement has a limit of its own

    def _notify(self) -> None:
        self._changed.notify_all()

    def _soon(self, action: Action) -> None:
        self._actions.append(action)
        self._connections.wake()

    # ---- in the mesh's thread ----

    def tick(self) -> float:
        """Has the membership act, and do what is due; returns when `tick` is due again."""
        now = time.monotonic()
        while self._actions:
            self._actions.popleft()(self.membership, now)
        self._suspect_left(now)
        if self.membership.next_at <= now:
            self.membership.tick(now)
        self._act()
        return self.membership.next_at

    def hear_loss(self, sender: int, rank: int, reason: str) -> None:
        """Hears from a rank that it has failed; what it says of others is no matter here."""
        if rank == sender:
            self._mesh.lose(sender, reason, died=True)

    def hear(self, sender: int, text: bytes) -> None:
        """Hears news of the agreement; raises `ValueError` or `TypeError` if it is no such news."""
        message = Message(**{name: _tuples(value) for name, value in json.loads(text).items()})
        self._hear(sender, message, time.monotonic())
        self._act()

    def _send(self, rank: int, message: Message) -> None:
        connection = self._connections.for_news(rank)
        if connection is not None:
            text = encode(dataclasses.asdict(message))
            connection.send(HEADER.pack(0, 0, len(text), AGREEMENT, 0), text, copy=True)

    def _begin_view(self) -> None:
        self._mailboxes.forget_broken()
        for connection in self._connections.all():
            connection.read_elsewhere()

    def _tell_end(self) -> None:
        """Tells it once: the training thread may be in a collective of another library."""
        if self.membership.ended and self._has_groups and not self._has_told_end:
            self._has_told_end = True
            self._mesh.tell_loss(self._own_end(self._some_loss()))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
