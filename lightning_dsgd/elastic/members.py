"""The ranks of a training that goes on where one is lost (`on_loss="continue"`), whatever the face.

What happens on the other ranks when a rank is lost, in order:

    its connections end, or it is silent         `survival` (`simulated`): each wait of this rank
                                                 raises `PeerLost`
    who goes on?                                 `membership`: the members agree on the next view
    a call or a step has raised `PeerLost`       `calls`: waits for that view (`Calls.change_view`)
    this rank begins anew in the view            `changes`: the session, the replica (`surviving`),
                                                 the agreed batch, what is dealt, the first member;
                                                 what a Trainer does besides: `trainer`
    who has come back from the call already?     `calls`: the call is made again, or its result is
                                                 taken over; a step is made again, or left
    the call returns                             nobody above `Members` has noticed

Another loss on the way begins the same again, with the view after that: it is caught in `calls`.
How ranks come and leave, before a batch, is in `turnover`; they change the view by `calls` too.

`Members` is what the session and its face ask.  It has one object for each of these:

    Calls                every call of all ranks, every step of this rank
    Changes              what begins anew where the view changes
    Turnover             who comes and who leaves, before a batch
    Face                 what only the Trainer, or only a loop of the user's, does: `face`
    Entrance             the register, which tells those outside
    MembersCollectives   in the place of torch's: `collectives`

Where several ranks hold a replica together, a lost rank takes its replica out of the view: the
others of it end, once the rest have agreed on a view without them.  They come again together, as
newcomers: see `rows`.

A rank may be lost once `begin` has come back: until then a loss ends the job, as it does without.
The Trainer calls it before the first batch; in a loop that its user writes, each rank calls it
before its first step, or where it meets the others before that.

Threads: the training thread; a signal handler calls `request_end`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.elastic.calls import Alone, Calls
from lightning_dsgd.elastic.changes import Changes, replica_of
from lightning_dsgd.elastic.collectives import MembersCollectives
from lightning_dsgd.elastic.entrance import Entrance
from lightning_dsgd.elastic.face import Face
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.rows import Row, ShardingInRows, consecutive
from lightning_dsgd.elastic.suits import check_survival
from lightning_dsgd.elastic.surviving import SurvivingReplica
from lightning_dsgd.elastic.turnover import Turnover
from lightning_dsgd.elastic.views import views_of
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.ranks import Ranks, T
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.transport import Transport, TransportError, failed
from lightning_dsgd.transport.endpoint import Endpoint

_BOUND = (Phase.OPENING, Phase.READY, Phase.BROKEN, Phase.OVER)
"""The phases in which the loss of this rank ends the job, or has done so."""


class Members(Ranks):
    """The ranks of a session, which go on where one is lost; the head of the file tells how.

    Args:
        opening: how the ranks have opened their network
        face_of: makes what leads the training of a session
        min_ranks: how many ranks must be left; None: more than half of those before a loss
        max_ranks: how many ranks there may be; None: as many as at the start
    """

    session: Session[Any]
    go_on: ClassVar[bool] = True

    def __init__(
        self,
        opening: Opening,
        face_of: Callable[[Any], Face],
        min_ranks: int | None,
        max_ranks: int | None = None,
    ) -> None:
        self._entrance = Entrance(opening)
        self._face_of = face_of
        self._min_ranks = min_ranks
        self._max_ranks = max_ranks
        self._num_ranks = 1
        """The number of ranks at the start."""
        self._device = torch.device("cpu")
        self._calls: Calls | None = None
        self._turnover: Turnover | None = None

    def belong_to(self, session: Any) -> None:
        self.session = session
        self.collectives = MembersCollectives(session)
        self._face = self._face_of(session)
        self._changes = Changes(session, self._face, self._entrance)

    # ---- who they are ----

    @property
    def number(self) -> int:
        return self.calls.view.number

    @property
    def members(self) -> tuple[int, ...]:
        return self._changes.members

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first member, which does what rank 0 does."""
        return self.session.rank == self.members[0] and self.session.takes_part

    @property
    def can_be_joined(self) -> bool:
        return self._face.can_be_joined

    @property
    def has_changed(self) -> bool:
        return self.members != tuple(range(self._num_ranks))

    @property
    def calls(self) -> Calls:
        """Makes calls of all ranks, and carries them over a change of the view."""
        return opened(self._calls)

    @property
    def _holds_with_others(self) -> bool:
        """Whether other ranks hold this rank's replica with it."""
        return self.session.sharding.num_shards > 1

    # ---- setting up ----

    def check(self, algorithm: Algorithm, num_replicas: int, device: torch.device) -> None:
        self._device = device
        size = self.session.world_size
        limits = self._min_ranks, device, self._max_ranks
        check_survival(algorithm, size, *limits, num_shards=size // num_replicas)

    def check_alike(self, text: str) -> None:
        self._changes.options = text
        if self.session.takes_part:
            super().check_alike(text)

    def check_start(self, method: str) -> None:
        if method != "popen":
            raise ValueError(
                "ranks must not be forked or spawned to go on without a lost one, as their parent "
                f'ends all with one, got start_method="{method}" with on_loss="continue"; run a '
                'script without it, or use on_loss="end"'
            )

    def check_unchanged(self) -> None:
        if self.has_changed:
            raise ValueError(
                "a Trainer must not be used again once ranks were lost or have joined, as the "
                f"ranks of its start must all be there, got the ranks {self.members} and "
                f"{self._num_ranks} at the start; start the job anew"
            )

    def check_may_load(self, way_out: str) -> None:
        if self.session.phase not in _BOUND:
            raise RuntimeError(
                'with on_loss="continue" a checkpoint must be loaded before the ranks meet for '
                f"anything else, got a load after that; {way_out}"
            )

    def find_training(
        self, address: tuple[str, int], calls: str | None = None, num_shards: int = 1
    ) -> None:
        session = self.session
        if self._entrance.find_training(address):
            self._face.check_newcomer(calls)
            session.enter(Phase.NEWCOMER)
            self._entrance.gather(session.rank, session.world_size, num_shards)
        elif session.rank >= session.world_size:
            raise ValueError(
                f"rank {session.rank} was started to join a training of {session.world_size} "
                "ranks, which must go on meanwhile, but it has ended; start a new job from its "
                "checkpoint"
            )

    def in_row(self, work: Callable[[], T], what: str) -> T:
        return self._entrance.in_row(work, what)

    def open_network(self, open_network: Callable[[], Transport]) -> Transport:
        if self.session.takes_part:
            return open_network()
        net = self._entrance.come_later(self._device)
        self.session.rank = net.rank
        return net

    def open(self, net: Transport) -> Transport:
        session, changes = self.session, self._changes
        is_newcomer = not session.takes_part
        if not is_newcomer:
            session.enter(Phase.READY)
        self._calls = calls = Calls(
            cast(Endpoint, net),  # which every network is
            lambda view: changes.enter(view, calls.lost, calls.changing_since),
            is_newcomer=is_newcomer,
            device=self._device,
        )
        self._num_ranks, changes.members = session.world_size, calls.view.members
        self._turnover = Turnover(
            session,
            self._face,
            calls,
            self._entrance,
            self._min_ranks,
            self._max_ranks or self._num_ranks,
        )
        return calls.view

    def make_replica(self, *args: Any, **options: Any) -> SurvivingReplica:
        return SurvivingReplica(*args, is_newcomer=not self.session.takes_part, **options)

    def join(self) -> dict[str, Any] | None:
        if not self.session.takes_part:
            self._ask_to_join()
            self.calls.join()
        return self._face.taken()

    def _ask_to_join(self) -> None:
        """Asks to be let in, together with those that hold this newcomer's replica with it."""
        session, size = self.session, self._num_ranks
        groups: Sequence[tuple[int, ...]] = ()
        row: Row = Alone()
        if session.sharding.in_rows:
            sharding = cast(ShardingInRows, session.sharding)
            rows = consecutive(size, session.sharding.num_shards)
            self._changes.hold_in_rows(sharding, rows)
            if self._holds_with_others:
                groups, row = rows, sharding.row_of(session, None)
                self.calls.hold_together(row)
        self._entrance.ask_to_join(size, self._min_ranks, groups, row.meet)

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        return self._face.share(first)

    # ---- training ----

    def begin(self) -> None:
        session = self.session
        self._face.begin()
        session.forgive_others()
        if not session.takes_part:
            return  # a newcomer may be lost since it has asked to join
        groups = self._groups()
        if session.world_size > 1:  # else nobody can be lost, and nobody reaches this rank
            session.net.views.survive(self._min_ranks, groups)
        can_be_joined = self._say_trains()
        session.meetings.barrier().wait()
        # All survive now; who is back from here knows that nobody waits outside of a call any more.
        self.together(lambda: session.meetings.barrier().wait())
        if self._entrance.register is not None and self.is_first:
            num_shards = session.sharding.num_shards
            self._entrance.register.say_survives(can_be_joined=can_be_joined, num_shards=num_shards)

    def _groups(self) -> Sequence[tuple[int, ...]]:
        """Returns the ranks that are lost together, and has them change views together."""
        session = self.session
        if not session.sharding.in_rows:
            return ()
        sharding = cast(ShardingInRows, session.sharding)
        rows = sharding.rows(session.meetings)
        self._changes.hold_in_rows(sharding, rows)
        if not self._holds_with_others:
            return ()
        self.calls.hold_together(sharding.row_of(session, rows))
        return rows

    def _say_trains(self) -> bool:
        """Writes into the register that this rank trains; returns whether others can join."""
        register, card = self._entrance.register, views_of(self.calls.view).card()
        if register is None:
            return False
        can_be_joined = self.can_be_joined and self._entrance.is_open and card is not None
        if can_be_joined and card is not None:
            register.write_card(self.session.rank, card)
        register.say_trains()
        return can_be_joined

    def before_batch(self) -> None:
        """Lets others come and leave, if all members are to meet before this batch."""
        session = self.session
        is_apart = not session.takes_part
        super().before_batch()
        if not (is_apart or session.training is None or session.has_ended):
            opened(self._turnover).before_batch()

    def end_epoch(self) -> None:
        self._face.end_epoch()

    def together(
        self,
        call: Callable[[], T],
        adopt: Callable[[], None] | None = None,
        *,
        apart: Any = None,
    ) -> T:
        self.check_stays()
        result: T = self.calls.together(call, adopt) if self.session.takes_part else apart
        return result

    def step(self, call: Callable[[], None], *, again: bool) -> None:
        self.calls.step(call, again=again)

    def show(self, call: Callable[[], None]) -> None:
        self.together(call, replica_of(self.session).show_as_shared)

    def end_training(self, call: Callable[[], None]) -> None:
        self.together(call, self._end_as_others)
        self._entrance.tell(Register.say_over)
        if self.number > 0 and self.is_first:
            missing = self._num_ranks - self.session.world_size
            more = f"{-missing} ranks more than the {self._num_ranks} at the start"
            fewer = f"{missing} of {self._num_ranks} ranks are missing"
            say(
                f"{more if missing < 0 else fewer} at the end{self._face.left_undone()}; "
                f"{self._changes.seconds:.1f} s went into changes of the view"
            )

    def _end_as_others(self) -> None:
        self.session.enter(Phase.TRAINED)
        replica_of(self.session).finish_as_shared()

    def end_leaver(self) -> None:
        session, training = self.session, self.session.training
        if training is not None and training.agreed.leaves and not session.has_ended:
            self._entrance.tell(Register.say_left)
            self._face.end_after_last()

    def check_peers(self) -> None:
        if self.session.training is None:
            super().check_peers()
        elif self.session.takes_part and not self._holds_with_others:
            # Where ranks hold a replica together, they ask each other at the end of the next step.
            self.step(super().check_peers, again=False)

    def figures(self) -> dict[str, float]:
        view = self.calls.view
        return {
            "view": float(view.number),
            "num_members": float(view.world_size),
            "view_changes_s": self._changes.seconds,
        }

    # ---- the end ----

    def forgives(self, error: Exception) -> bool:
        return isinstance(error, TransportError)

    def check_stays(self) -> None:
        self._face.check_stays()

    def request_end(self, signum: int) -> None:
        training = self.session.training
        if training is None:
            return
        if self._holds_with_others or training.is_uneven:
            self.session.request_stop(signum)  # this rank cannot leave alone
        else:
            training.agreed.leaves = True

    def stop(self) -> None:
        self._entrance.tell(Register.say_stopped)  # who came later would find nobody

    def fail(self, exception: BaseException) -> None:
        if failed(exception).ends_all and self.session.phase not in _BOUND:
            self._entrance.tell(Register.say_stopped)  # else the launcher starts ranks again

    def failed(self, reason: str, before: Phase) -> None:
        if before not in _BOUND:
            self._entrance.tell(lambda register: register.say_trains_no_more(reason))

    def leave(self) -> None:
        training = self.session.training
        if training is None:
            super().leave()
            return
        self.step(lambda: training.agreed.finish(), again=True)
        self.calls.leave()
