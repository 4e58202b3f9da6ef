"""What a rank does where the view changes: what begins anew, in which order.

    the session          its network, its channels for meetings, its number of ranks
    who is new           the members tell each other, and what they need to know of their data
    the replica          from the consensus of the members, which newcomers take too
    the agreed batch     a stop that any member knows of holds; what nobody knows is asked anew;
                         where others have stopped already, this rank stops where it is
    what is dealt        claims and units, among the members
    newcomers            take the state of the first member that is none; with shards, of the first
                         that holds the same shard.  Where another view follows before all have
                         taken it, all take it anew: else a replica could have it from two
    the first member     is what rank 0 was

Any of these may raise `PeerLost`: then all of it begins again, with the view after that (`calls`).

Threads: the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from lightning_dsgd.elastic.ballots import group_of
from lightning_dsgd.elastic.entrance import Entrance
from lightning_dsgd.elastic.face import Face
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.rows import ShardingInRows
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.sharding import Sharding
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.view import View


def replica_of(session: Session[Any]) -> SurvivingReplica:
    """Returns this rank's replica, which `Members.make_replica` has made."""
    return cast(SurvivingReplica, opened(session.training).replica)


class Changes:
    """Has one rank begin anew in each view.

    Attributes:
        members: the ranks of the newest view in which this rank has begun
        seconds: how long changes of the view have taken, as far as members have told
        options: a text of this rank's options, which must be the same on all ranks

    Args:
        session: the session of this rank
        face: what leads the training
        entrance: tells those outside who trains
    """

    def __init__(self, session: Session[Any], face: Face, entrance: Entrance) -> None:
        self._session = session
        self._face = face
        self._entrance = entrance
        self.members: tuple[int, ...] = (0,)
        self.seconds = 0.0
        self.options = ""
        self._at_first: ShardingInRows | None = None
        self._rows: Sequence[tuple[int, ...]] = ()
        """The ranks of each replica at the start, where several hold one."""

    def hold_in_rows(self, sharding: ShardingInRows, rows: Sequence[tuple[int, ...]]) -> None:
        """Takes over which ranks hold a replica together.

        Args:
            sharding: which ranks held this rank's shard at the start
            rows: the ranks of each replica at the start
        """
        self._at_first, self._rows = sharding, rows

    def enter(self, view: View, loss: PeerLost | None, since: float) -> None:
        """Begins anew in a view; all its members call it.

        Args:
            view: the view
            loss: the loss behind the change, as far as this rank knows
            since: when this rank learnt of that loss
        """
        session, training = self._session, self._session.training
        if training is None:
            raise TransportError(
                "ranks can go on without one while they train, got the loss of one before or after "
                "that; start the job again"
            )
        session.take(view)
        session.world_size = view.world_size
        lost = [r for r in self.members if r not in view.members] if session.takes_part else []
        if training.balancing is not None:
            training.balancing.stand_still()
        replica = replica_of(session)
        newcomers = self._face.introduce(view, [self.options, replica.description()])
        givers = self._givers(view, newcomers)
        if self._face.can_be_joined and view.rank == 0:
            self._entrance.tell(lambda register: _forget(register, lost))
        self._change_replica(view, newcomers)
        if training.balancing is not None:
            training.balancing.change_view(view.sub("balancing"), view.members, replica)
        old = training.agreed
        has_stopped = session.phase is Phase.STOPPING
        training.agreed = old.in_view(view.sub("stop"), has_stopped=has_stopped)
        training.agreed.catch_up(old)  # once a signal handler sees the new one
        if training.claiming is not None:
            training.claiming.open(view.sub("claims"))
        self.members = view.members
        seconds = time.monotonic() - since
        self.seconds += seconds
        if newcomers:
            self._hand_over(view, givers)
        self._face.go_on(view, lost)
        if view.rank == min({*range(view.world_size)} - newcomers.keys()):
            joined = {view.members[rank]: text for rank, text in newcomers.items()}
            said = self._lost_in_words(lost, loss) + self._joined_in_words(joined)
            changes = ", ".join(said) or "the same ranks"
            say(f"view {view.number}: {changes}, {view.world_size} ranks go on, {seconds:.1f} s")

    def _givers(self, view: View, newcomers: Collection[int]) -> dict[int, int]:
        """Returns which rank of the view gives each newcomer its state."""
        givers = {}
        for newcomer in newcomers:
            column = self._column(view.members[newcomer])
            have_it = [r for r, n in enumerate(view.members) if self._column(n) == column]
            givers[newcomer] = min({*have_it}.difference(newcomers), default=-1)
            if givers[newcomer] < 0:  # their members were lost while these came
                raise TransportError(
                    f"rank {view.members[newcomer]} must get its shard from a rank that has "
                    f"trained, but none of the ranks {view.members} has it; start the job anew, "
                    "from a checkpoint"
                )
        return givers

    def _column(self, number: int) -> int:
        """Returns which shard the rank of a number holds."""
        return number % len(self._rows[0]) if self._rows else 0

    def _change_replica(self, view: View, newcomers: Collection[int]) -> None:
        """Has the replica go on among a view's ranks; see `SurvivingReplica.change_view`."""
        replica, net = replica_of(self._session), view.sub("replica")
        everyone = Circle(net, newcomers)
        if self._at_first is None:
            replica.change_view(everyone)
            return
        now = self._at_first.among(view.members, self._rows)
        self._session.sharding = cast(Sharding, now)
        column = now.column(net)
        new = [column.members.index(rank) for rank in newcomers if rank in column.members]
        replica.change_view(Circle(column, new), everyone)

    def _hand_over(self, view: View, givers: Mapping[int, int]) -> None:
        """Gives newcomers a member's state, and has a newcomer count as the giver has counted."""
        agreed = opened(self._session.training).agreed
        mine = {"num_begun": agreed.num_begun, "changes_s": self.seconds}
        counted = self._face.hand_over(view, givers, mine)
        if view.rank in givers:
            agreed.num_begun, self.seconds = counted["num_begun"], counted["changes_s"]
            self._session.enter(Phase.JOINED)
            self._entrance.tell(Register.say_trains)

    def _lost_in_words(self, lost: Iterable[int], loss: PeerLost | None) -> list[str]:
        """Says who is lost, and why as far as this rank knows."""
        reasons = {} if loss is None else {loss.rank: loss.reason}
        said = []
        for row in self._rows_of(lost):
            named = {r: f"rank {r} " if len(row) > 1 else "" for r in row if r in reasons}
            why = [f" ({name}{reasons[rank]})" for rank, name in named.items()]
            said.append(f"{_listed(row)} lost{''.join(why)}")
        return said

    def _joined_in_words(self, joined: Mapping[int, str]) -> list[str]:
        """Says who has joined, and as which rank each was started."""
        said = []
        for row in self._rows_of(joined):
            started_as = " and ".join(joined[rank] for rank in row if rank in joined)
            said.append(f"{_listed(row)} joined (started as {started_as})")
        return said

    def _rows_of(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Returns the rows that these ranks make up."""
        return list(dict.fromkeys(group_of(rank, self._rows) for rank in ranks))


def _listed(row: Sequence[int]) -> str:
    if len(row) == 1:
        return f"rank {row[0]}"
    return f"replica of ranks {' and '.join(map(str, row))}"


def _forget(register: Register, lost: Iterable[int]) -> None:
    """Removes lost ranks from the register, so that newcomers do not try to reach them."""
    for rank in lost:
        register.forget(rank)
