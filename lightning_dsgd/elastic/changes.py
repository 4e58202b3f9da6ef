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

Threads: the training thread alone; a signal handler says that this rank is to leave.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import Any, cast

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.members import Members
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.session.ending import ended_by, say
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.sharding import Sharding
from lightning_dsgd.session.stopping import MEET, STOP, AgreedBatch
from lightning_dsgd.transport import PeerLost, Transport, TransportError
from lightning_dsgd.transport.view import View


class ChangingMembers(Members):
    """Ranks that change while they train a loop of their user's; the head of the file tells how."""

    def find_training(self, address: tuple[str, int], calls: str | None = None) -> None:
        self._entrance.refuse_training(address)

    # ---- a view ----

    def _enter_view(self, view: View) -> None:
        session, training = self.session, self.session.training
        if training is None:
            raise TransportError(
                "ranks can go on without one while they train, got the loss of one before or after "
                "that; start the job again"
            )
        session.take(view)
        session.world_size = view.world_size
        lost = [r for r in self._members if r not in view.members] if session.takes_part else []
        if training.balancing is not None:
            training.balancing.stand_still()
        self._begin_anew(view, lost)
        if training.balancing is not None:
            training.balancing.change_view(view.sub("balancing"), view.members, self.replica)
        has_stopped = session.phase is Phase.STOPPING
        old = training.agreed
        training.agreed = _in_view(old, view.sub("stop"), has_stopped=has_stopped)
        training.agreed.leaves |= old.leaves  # a signal may have come meanwhile
        if old.requested and not training.agreed.requested:
            training.agreed.request(old.requested)
        if training.claiming is not None:
            training.claiming.open(view.sub("claims"))
        self._members = view.members
        seconds = time.monotonic() - self.calls.changing_since
        self._changes_s += seconds
        self._begun_anew(view, lost)
        changes = self._changes(lost)
        if changes:
            say(f"view {view.number}: {changes}, {view.world_size} ranks go on, {seconds:.1f} s")

    def _begin_anew(self, view: View, lost: list[int]) -> None:
        """Has the replica go on among the members of the view."""
        self._change_replica(view)

    def _change_replica(self, view: View, old: Transport | None = None, giver: int = -1) -> None:
        """Has the replica go on among a view's ranks; see `SurvivingReplica.change_view`."""
        net = view.sub("replica")
        if self._at_first is None:
            self.replica.change_view(net, old, giver)
        else:
            now = self._at_first.among(view.members, self._rows)
            self.session.sharding = cast(Sharding, now)
            self.replica.change_view(now.column(net), everyone=net)

    def _begun_anew(self, view: View, lost: list[int]) -> None:
        """Does what a face does besides, once the replica has begun anew."""
        if self.is_first:
            self.session.become_first()

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

    def before_batch(self) -> None:
        """Lets others come and leave, if all members are to meet before this batch."""
        is_apart = not self.session.takes_part
        super().before_batch()
        training = self.session.training
        if is_apart or training is None or self.session.has_ended:
            return
        if self._wants_to_meet(training.agreed):
            training.agreed.ask_to_meet()
        if training.agreed.take_meeting():
            found = self.calls.once(self._find_changes)
            if found is not None:
                self._change_members(*found)

    def _wants_to_meet(self, agreed: AgreedBatch) -> bool:
        return agreed.leaves

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
        if not self.session.meet(MEET):
            return [], []
        view, place = self.calls.view, self._place()
        text = json.dumps([place, self._newcomers(), self._agreed.leaves])
        told = [json.loads(theirs) for theirs in everyones(self.session.meetings, text)]
        leavers = [view.members[rank] for rank, each in enumerate(told) if each[2]]
        if leavers:
            self.replica.average()  # what those have learnt that leave
            training = self.session.training
            if training is not None and training.claiming is not None:
                training.claiming.dealing.share(self.session.meetings)
            return [], leavers
        if not place or any(each[0] != place for each in told):
            return [], []
        newcomers: list[int] = told[0][1]
        return newcomers, []

    @property
    def _agreed(self) -> AgreedBatch:
        assert self.session.training is not None
        agreed: AgreedBatch = self.session.training.agreed
        return agreed

    def _change_members(self, newcomers: list[int], leavers: list[int]) -> None:
        if newcomers:
            self.calls.admit(newcomers)
        if not leavers:
            return
        session = self.session
        needed = self._min_ranks or session.world_size // 2 + 1
        if session.world_size - len(leavers) < needed:
            agreed = self._agreed  # for those that a loss keeps from this
            agreed.signum, agreed.origin = signal.SIGTERM, leavers[0]
            agreed.stop_at = agreed.num_begun
            session.stop()
            begin, end = f"rank {leavers[0]} received", "; all ranks stopped, as too few would stay"
            session.end_by(signal.SIGTERM, begin, end)
        if session.rank not in leavers:
            self.calls.dismiss(leavers)
            return
        with contextlib.suppress(PeerLost):
            self.calls.dismiss(leavers)
        self.tell_register(Register.say_left)  # so that the launcher does not start it again
        session.depart()
        self._end_departed()

    # ---- leaving ----

    def _end_departed(self) -> None:
        """Raises what this rank, which is no member any more, ends with."""
        self.check_stays()

    def check_stays(self) -> None:
        if self.session.phase is Phase.LEFT:
            begin, end = f"rank {self.session.rank} received", " and has left; the others go on"
            raise ended_by(signal.SIGTERM, SystemExit, begin, end)

    def end_leaver(self) -> None:
        session = self.session
        if session.training is not None and self._agreed.leaves and not session.has_ended:
            self.tell_register(Register.say_left)
            self._end_after_last()

    def _end_after_last(self) -> None:
        """Ends a rank that got SIGTERM with no batch left before which all could meet.

        It leaves the network together with the others.
        """
        self.session.enter(Phase.STOPPING)
        self.session.quiet_observer()
        self.session.end_by(signal.SIGTERM, f"rank {self.session.rank} received")

    def request_end(self, signum: int) -> None:
        training = self.session.training
        if training is None:
            return
        if self._holds_with_others or training.is_uneven:
            self.session.request_stop(signum)  # this rank cannot leave alone
        else:
            training.agreed.leaves = True


def _in_view(agreed: AgreedBatch, net: Transport, *, has_stopped: bool) -> AgreedBatch:
    """Makes an agreement among the members of a view that goes on from an earlier one."""
    with contextlib.suppress(TransportError):  # of which its lane has failed
        agreed.close()
    new = AgreedBatch(net, is_of_each=agreed.is_of_each)
    new.num_begun, new.requested = agreed.num_begun, agreed.requested
    new.leaves = agreed.leaves
    mine = [agreed.stop_at, int(agreed.signum), agreed.origin]
    texts = everyones(net.sub("decided"), json.dumps([mine, has_stopped]))
    told = [json.loads(text) for text in texts]
    new.stop_at, new.signum, new.origin = max(decided for decided, _ in told)
    new.others_stopped = any(stopped for _, stopped in told)
    if new.stop_at >= 0:
        new.is_asked = True
        new.stop_at = new.num_begun if new.is_of_each else new.stop_at
    elif new.requested:
        new.ask(STOP, new.requested)
    return new
