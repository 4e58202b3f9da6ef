"""How ranks come and leave: before a batch at which all members meet.

**Leaving.**  A rank that gets SIGTERM asks that all meet before the same batch.  There all average
their weights, and then have the view changed to one without it, on which it votes too; so any
number may leave, but not so many that too few stay: then all stop.  It ends once the view is
committed.  Where not all are before a batch, as some have done all of theirs, it asks again before
its next one.  Where it has none, it ends as SIGTERM ends a rank once all have come to the end of
training.  Where ranks have different numbers of batches, or hold a replica together, no rank leaves
alone: all stop.

**Joining.**  A process that is started later, and finds that training goes on (`register`), is a
newcomer.  It builds its model and optimizers, and then asks the members to let it in:

    the first member   hears of it, and asks that all meet before the same batch (`stopping`)
    all members        before that batch: serve the others until all are there, tell each other
                       which batch they are at, and learn from the first whom it has heard of
    all members        have the view changed to one with the newcomers (`Calls.admit`)
    all of that view   who is new, and whether its model is the same; the members average their
                       weights, and the first one gives them, and its own state, to each newcomer
                       (`changes`); all tell each other how many calls they have come back from
    the newcomer       has Lightning restore that state, alone, and begins with that batch

Newcomers that are to hold a replica together are let in together, once all of them ask; each gets
its shard, and the state that goes with it, from a member that holds the same (`rows`).

Before a batch a rank is in no evaluation, save or epoch's end, and at the same batch all have made
the same calls: so the newcomer makes the calls that the others make from there on.

Why nobody waits for ever, whoever is lost:

- The newcomer, before the view with it: it is in no view; if it is committed, it is lost in it.
- The newcomer later: as any member.
- The first member, before it has given its state: the change begins again, and the next member,
  which is before the same batch, gives its own, also to newcomers that have the first one's.  For
  no member comes back from a change before each newcomer has taken part in its last exchange, for
  which it needs the state.
- Any rank, while the members meet: the meeting is over, on all (`Calls.once`), without newcomers.
  They ask again.
- A newcomer whose model differs ends, with an error, and is lost to the others.
- A newcomer that is lost takes the others of its replica along, before the view and later.

Threads: the training thread; a signal handler says that this rank is to leave.
"""

from __future__ import annotations

import contextlib
import json
import signal
from typing import Any

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.changes import replica_of
from lightning_dsgd.elastic.entrance import Entrance
from lightning_dsgd.elastic.face import HAS_LEFT, Face
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.views import views_of
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import MEET
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.transport import PeerLost


class Turnover:
    """Lets ranks come and leave before a batch.

    Args:
        session: the session of this rank
        face: what leads the training
        calls: makes calls of all ranks
        entrance: tells those outside who has left
        min_ranks: how many ranks must be left; None: more than half of those before
        max_ranks: how many ranks there may be
    """

    def __init__(
        self,
        session: Session[Any],
        face: Face,
        calls: Calls,
        entrance: Entrance,
        min_ranks: int | None,
        max_ranks: int,
    ) -> None:
        self._session = session
        self._face = face
        self._calls = calls
        self._entrance = entrance
        self._min_ranks = min_ranks
        self._max_ranks = max_ranks

    def before_batch(self) -> None:
        """Lets ranks come and leave, if all members are to meet before this batch."""
        session, training = self._session, opened(self._session.training)
        may_see = self._face.can_be_joined and session.ranks.is_first
        sees_newcomers = may_see and bool(self.newcomers())
        if training.agreed.leaves or (sees_newcomers and not training.is_uneven):
            training.agreed.ask_to_meet()
        if not training.agreed.take_meeting():
            return
        found = self._calls.once(self._find)
        if found is None:
            return
        newcomers, leavers = found
        if newcomers:
            self._calls.admit(newcomers)
        if leavers:
            self._dismiss(leavers)

    def newcomers(self) -> list[int]:
        """Returns the ranks that wait to be let in, as many as there is room for."""
        view = self._calls.view
        room = max(0, self._max_ranks - view.world_size)
        return [*views_of(view).newcomers()[:room]]

    def _find(self) -> tuple[list[int], list[int]]:
        """Returns who comes and who leaves, the same on all members; all of them call it.

        Nobody comes unless all members are at the same batch; ranks that leave go first.
        """
        session, training = self._session, opened(self._session.training)
        if not session.meet(MEET):
            return [], []
        view, place = self._calls.view, self._face.place()
        text = json.dumps([place, self.newcomers(), training.agreed.leaves])
        told = [json.loads(theirs) for theirs in everyones(session.meetings, text)]
        leavers = [view.members[rank] for rank, each in enumerate(told) if each[2]]
        if leavers:
            replica_of(session).average()  # what those have learnt that leave
            if training.claiming is not None:
                training.claiming.dealing.share(session.meetings)
            return [], leavers
        if not place or any(each[0] != place for each in told):
            return [], []
        newcomers: list[int] = told[0][1]
        return newcomers, []

    def _dismiss(self, leavers: list[int]) -> None:
        """Goes on without ranks that leave, or leaves; all stop if too few would stay."""
        session = self._session
        needed = self._min_ranks or session.world_size // 2 + 1
        if session.world_size - len(leavers) < needed:
            opened(session.training).agreed.stop_here(signal.SIGTERM, leavers[0])
            session.stop()
            begin, end = f"rank {leavers[0]} received", "; all ranks stopped, as too few would stay"
            session.end_by(signal.SIGTERM, begin, end)
        if session.rank not in leavers:
            self._calls.dismiss(leavers)
            return
        with contextlib.suppress(PeerLost):
            self._calls.dismiss(leavers)
        self._entrance.tell(Register.say_left)  # so that the launcher does not start it again
        session.depart()
        session.end_by(signal.SIGTERM, f"rank {session.rank} received", HAS_LEFT)
