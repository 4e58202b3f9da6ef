"""How the members of a training change, whatever the face: ranks are lost, or leave.

What a rank does where the view changes:

    the network of the session, its channels for meetings, its number of ranks
    the replica          from the consensus of the members
    the agreed batch     a stop that any member knows of holds; what nobody knows is asked anew;
                         where others have stopped already, this rank stops where it is
    the first member     is what rank 0 was

**Leaving.**  A rank that gets SIGTERM asks that all meet before the same batch.  There all average
their weights, and then have the view changed to one without it, on which it votes too; so any
number may leave, but not so many that too few stay: then all stop.  It ends once the view is
committed.  Where not all are before a batch, as some have done all of theirs, it asks again before
its next one.  Where it has none, it ends as SIGTERM ends a rank once all have come to the end of
training.

Threads: the training thread alone; a signal handler sets `_leaves`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.members import SurvivingSession
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.lateness import Lateness
from lightning_dsgd.session.meeting import Meeting
from lightning_dsgd.session.session import Phase, TrainingT
from lightning_dsgd.session.stopping import MEET, STOP, AgreedBatch
from lightning_dsgd.transport import PeerLost, Transport, TransportError, failed
from lightning_dsgd.transport.register import Register
from lightning_dsgd.transport.view import View


class ChangingSession(SurvivingSession[TrainingT]):
    """A session whose ranks change while it trains; the head of the file tells how.

    Args:
        meeting: the meeting of its ranks
        min_ranks: how many ranks must be left; None: more than half of those before a loss
        *args: the arguments of a session that a loss ends
    """

    def __init__(self, meeting: Meeting, min_ranks: int | None, *args: Any) -> None:
        super().__init__(meeting, min_ranks, *args)
        self._asked_of: AgreedBatch | None = None
        self._met_at = -1
        self._leaves = False  # a signal handler sets it
        self._farewell = ""
        """The text with which this rank has ended, once it has left."""

    # ---- a view ----

    def _enter_view(self, view: View) -> None:
        training = self.training
        if training is None:
            raise TransportError(
                "ranks can go on without one while they train, got the loss of one before or after "
                "that; start the job again"
            )
        self._net, self._meetings = view, view.sub("meetings")
        self.world_size = view.world_size
        lost = [] if self.is_alone else [r for r in self._members if r not in view.members]
        self._begin_anew(view, lost)
        has_stopped = self.phase is Phase.STOPPING
        training.agreed = _in_view(training.agreed, view.sub("stop"), has_stopped=has_stopped)
        self._members = view.members
        self._lateness = Lateness(view)
        seconds = time.monotonic() - self.calls.changing_since
        self._changes_s += seconds
        self._begun_anew(view, lost)
        changes = self._changes(lost)
        if changes:
            say(f"view {view.number}: {changes}, {view.world_size} ranks go on, {seconds:.1f} s")

    def _begin_anew(self, view: View, lost: list[int]) -> None:
        """Begins anew: the replica goes on among the members of the view."""
        self._change_replica(view)

    def _change_replica(self, view: View, old: Transport | None = None, giver: int = -1) -> None:
        """Has the replica go on among a view's ranks; see `SurvivingReplica.change_view`."""
        net = view.sub("replica")
        if self._at_first is None:
            self.replica.change_view(net, old, giver)
        else:
            self.sharding = self._at_first.among(view.members, self._rows)
            self.replica.change_view(self.sharding.column(net), everyone=net)

    def _begun_anew(self, view: View, lost: list[int]) -> None:
        """Does what a face does besides, once the replica has begun anew."""

    def _changes(self, lost: list[int]) -> str:
        """Says what has changed, on the one rank that speaks; empty on the others."""
        return ", ".join(self._in_words(lost)) or "the same ranks" if self.is_first else ""

    def _in_words(self, ranks: list[int]) -> list[str]:
        failure = self.calls.lost
        reasons = {failure.rank: f" ({failure.reason})"} if failure is not None else {}
        if self._holds_with_others:
            return [self._replica_in_words(row) for row in self._rows if row[0] in ranks]
        return [f"rank {rank} lost{reasons.get(rank, '')}" for rank in ranks]

    def _replica_in_words(self, row: tuple[int, ...]) -> str:
        failure = self.calls.lost
        is_known = failure is not None and failure.rank in row
        reason = f" (rank {failure.rank} {failure.reason})" if failure and is_known else ""
        return f"replica of ranks {' and '.join(map(str, row))} lost{reason}"

    # ---- before a batch ----

    def _meet_others(self) -> None:
        """Lets others come and leave, if all members are to meet before this batch."""
        training = self.training
        if training is None or self.has_ended:
            return
        agreed = training.agreed
        if self._asked_of is not agreed and self._wants_to_meet():
            agreed.ask(MEET)
            self._asked_of = agreed
        if agreed.meet_at > self._met_at and agreed.num_begun >= agreed.meet_at:
            self._met_at = agreed.meet_at
            found = self.calls.once(self._find_changes)
            self._asked_of = None
            if found is not None:
                self._change_members(*found)

    def _wants_to_meet(self) -> bool:
        return self._leaves

    def _place(self) -> Any:
        """Returns this rank's place in the data, equal at the same batch; None: nobody can join."""
        return None

    def _newcomers(self) -> list[int]:
        """Returns the ranks that wait to be let in, as many as there is room for."""
        return []

    def _find_changes(self) -> tuple[list[int], list[int]]:
        """Returns who comes and who leaves, the same on all members; all of them call it.

        Nobody comes unless all members are at the same batch; ranks that leave go first.
        """
        if not self.meet(MEET):
            return [], []
        view, place = self.calls.view, self._place()
        texts = everyones(self.meetings, json.dumps([place, self._newcomers(), self._leaves]))
        told = [json.loads(text) for text in texts]
        leavers = [view.members[rank] for rank, each in enumerate(told) if each[2]]
        if leavers:
            self.replica.average()  # what those have learnt that leave
            return [], leavers
        if not place or any(each[0] != place for each in told):
            return [], []
        newcomers: list[int] = told[0][1]
        return newcomers, []

    def _change_members(self, newcomers: list[int], leavers: list[int]) -> None:
        if newcomers:
            self.calls.admit(newcomers)
        if not leavers:
            return
        needed = self._min_ranks or self.world_size // 2 + 1
        if self.world_size - len(leavers) < needed:
            self.phase = Phase.STOPPING
            agreed = self._agreed()  # for those that a loss keeps from this
            agreed.signum, agreed.origin = signal.SIGTERM, leavers[0]
            agreed.stop_at = agreed.num_begun
            self._quiet_observer()
            begin, end = f"rank {leavers[0]} received", "; all ranks stopped, as too few would stay"
            self._end_by(signal.SIGTERM, begin, end)
        if self.rank not in leavers:
            self.calls.part(leavers)
            return
        with contextlib.suppress(PeerLost):
            self.calls.part(leavers)
        self._depart()

    # ---- leaving ----

    def end_training(self) -> None:
        super().end_training()
        if self._leaves and self.training is not None and not self.has_ended:
            self._end_after_last()

    def _end_after_last(self) -> NoReturn:
        """Ends all ranks where SIGTERM came with no batch left before which all could meet."""
        self._say_has_left()
        self.phase = Phase.STOPPING  # so it goes on to leave the network together with the others
        self._quiet_observer()
        super()._end_by(signal.SIGTERM, f"rank {self.rank} received")

    def _depart(self) -> NoReturn:
        """Ends this rank, which is no member any more."""
        self._leave_others()
        self._farewell = f"rank {self.rank} received SIGTERM and has left; the others go on"
        raise SystemExit(self._farewell)

    def _say_has_left(self) -> None:
        """Tells the launcher that this rank has left, so that it is not started again."""
        self._tell_register(Register.say_left)

    def fail(self, exception: BaseException) -> str:
        if PeerLost(self.rank, failed(exception)).ends_all and self.survives and not self.is_fork:
            self._tell_register(Register.say_stopped)  # else the launcher starts ranks again
        return super().fail(exception)

    def _leave_others(self) -> None:
        self._say_has_left()
        self.phase, self.is_alone = Phase.STOPPING, True
        self._quiet_observer()
        self._leave_alone(self.calls.view)

    def check_stays(self) -> None:
        if self._farewell:
            raise SystemExit(self._farewell)

    @property
    def net(self) -> Transport:
        """The network; a rank that has left ends where it asks for the network."""
        self.check_stays()
        return super().net

    def together(self, call: Callable[[], Any], adopt: Callable[[], None] | None = None) -> Any:
        """Makes a call of all ranks (see `Calls.together`); a rank that has left ends here."""
        self.check_stays()
        return super().together(call, adopt)

    def _end_by(self, signum: int, begin: str, end: str = "") -> NoReturn:
        # All stop: who came later would find nobody.
        self._tell_register(Register.say_stopped)
        super()._end_by(signum, begin, end)

    def request_end(self, signum: int) -> None:
        if self._holds_with_others:
            self.request_stop(signum)  # it cannot leave alone
        else:
            self._leaves = True


def _in_view(agreed: AgreedBatch, net: Transport, *, has_stopped: bool) -> AgreedBatch:
    """Makes an agreement among the members of a view that goes on from an earlier one."""
    with contextlib.suppress(TransportError):  # of which its lane has failed
        agreed.close()
    new = AgreedBatch(net)
    new.num_begun, new.requested = agreed.num_begun, agreed.requested
    mine = [agreed.stop_at, int(agreed.signum), agreed.origin]
    texts = everyones(net.sub("decided"), json.dumps([mine, has_stopped]))
    told = [json.loads(text) for text in texts]
    new.stop_at, new.signum, new.origin = max(decided for decided, _ in told)
    new.others_stopped = any(stopped for _, stopped in told)
    if new.stop_at >= 0:
        new.is_asked = True
    elif new.requested:
        new.ask(STOP, new.requested)
    return new
