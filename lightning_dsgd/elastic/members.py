"""The ranks of a training that goes on where one is lost (`on_loss="continue"`), whatever the face.

Every call of all ranks goes through `Calls.together`, every step of this rank through `Calls.step`
(`calls`): a loss in one of them has the members agree on the next view, and begin anew in it: see
`changes`.

Where several ranks hold a replica together, a lost rank takes its replica out of the view: the
others of it end, once the rest have agreed on a view without them.

A rank may be lost once `begin` has come back: until then a loss ends the job, as it does without.
The Trainer calls it before the first batch; in a loop that its user writes, each rank calls it
before its first step, or where it meets the others before that.

Threads: the training thread alone.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.collectives import MembersCollectives
from lightning_dsgd.elastic.entrance import Entrance
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.rows import ShardingInRows
from lightning_dsgd.elastic.suits import check_survival
from lightning_dsgd.elastic.surviving import SurvivingReplica
from lightning_dsgd.elastic.views import views_of
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.ranks import Ranks, T
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.transport import Transport, TransportError, failed
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.view import View

_BOUND = (Phase.OPENING, Phase.READY, Phase.BROKEN, Phase.OVER)
"""The phases in which the loss of this rank ends the job, or has done so."""


class Members(Ranks, ABC):
    """The ranks of a session, which go on where one is lost; the head of the file tells how.

    Args:
        opening: how the ranks have opened their network
        min_ranks: how many ranks must be left; None: more than half of those before a loss
    """

    session: Session[Any]
    go_on: ClassVar[bool] = True
    can_be_joined: ClassVar[bool] = False
    """Whether a rank that is started again can join the others."""

    def __init__(self, opening: Opening, min_ranks: int | None) -> None:
        self._entrance = Entrance(opening)
        self._min_ranks = min_ranks
        self._device = torch.device("cpu")
        self._calls: Calls | None = None
        self._num_ranks = 1
        self._members: tuple[int, ...] = (0,)
        self._changes_s = 0.0
        self._options = ""
        self._at_first: ShardingInRows | None = None
        self._rows: list[tuple[int, ...]] = []
        """The ranks of each replica, where several hold one."""

    # ---- who they are ----

    def belong_to(self, session: Any) -> None:
        super().belong_to(session)
        self.collectives = MembersCollectives(session)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train, by the numbers that they had at the start."""
        return self._members

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first member, which does what rank 0 does."""
        return self.session.rank == self._members[0] and self.session.takes_part

    @property
    def number(self) -> int:
        return self.calls.view.number

    @property
    def has_changed(self) -> bool:
        return self._members != tuple(range(self._num_ranks))

    @property
    def replica(self) -> SurvivingReplica:
        """This rank's replica, which begins anew in every view."""
        assert self.session.training is not None, "training has begun"
        replica = self.session.training.replica
        assert isinstance(replica, SurvivingReplica)
        return replica

    @property
    def calls(self) -> Calls:
        """Makes calls of all ranks, and carries them over a change of the view."""
        return opened(self._calls)

    @property
    def _holds_with_others(self) -> bool:
        """Whether other ranks hold this rank's replica with it."""
        return bool(self.session.sharding.num_shards > 1)

    @abstractmethod
    def _enter_view(self, view: View) -> None:
        """Takes over a view with other members."""

    # ---- setting up ----

    def check(self, algorithm: Algorithm, num_replicas: int, device: torch.device) -> None:
        self._device = device
        size = self.session.world_size
        check_survival(algorithm, size, self._min_ranks, device, num_shards=size // num_replicas)

    def check_alike(self, text: str) -> None:
        self._options = text
        if self.session.takes_part:
            super().check_alike(self._options)

    def check_start(self, method: str) -> None:
        if method != "popen":
            raise ValueError(
                "ranks must not be forked or spawned to go on without a lost one, as their parent "
                f'ends all with one, got start_method="{method}" with on_loss="continue"; run a '
                'script without it, or use on_loss="end"'
            )

    def check_may_load(self, way_out: str) -> None:
        if self.session.phase not in _BOUND:
            raise RuntimeError(
                'with on_loss="continue" a checkpoint must be loaded before the ranks meet for '
                f"anything else, got a load after that; {way_out}"
            )

    def open(self, net: Transport) -> Transport:
        assert isinstance(net, Endpoint)
        session = self.session
        if session.takes_part:
            session.enter(Phase.READY)
        is_newcomer = not session.takes_part
        self._calls = Calls(net, self._enter_view, is_newcomer=is_newcomer, device=self._device)
        self._num_ranks, self._members = session.world_size, self._calls.view.members
        return self._calls.view

    def make_replica(self, *args: Any, **options: Any) -> SurvivingReplica:
        return SurvivingReplica(*args, is_newcomer=not self.session.takes_part, **options)

    # ---- calls of all ranks ----

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

    def begin(self) -> None:
        session = self.session
        session.forgive_others()
        if session.sharding.in_rows:
            sharding = cast(ShardingInRows, session.sharding)
            self._at_first, self._rows = sharding, sharding.rows(session.meetings)
            if self._holds_with_others:
                self.calls.hold_together(sharding.row_of(session, self._rows))
        if session.world_size > 1:  # else nobody can be lost, and nobody reaches this rank
            rows = self._rows if self._holds_with_others else ()
            session.net.views.survive(self._min_ranks, rows)
        register, card = self._entrance.register, views_of(self.calls.view).card()
        can_be_joined = self.can_be_joined and self._entrance.is_open and not self._rows
        can_be_joined = can_be_joined and card is not None
        if register is not None and card is not None and can_be_joined:
            register.write_card(session.rank, card)
        if register is not None:
            register.say_trains()
        session.meetings.barrier().wait()
        # All survive now; who is back from here knows that nobody waits outside of a call any more.
        self.together(self._meet_to_begin)
        if register is not None and self.is_first:
            register.say_survives(can_be_joined=can_be_joined)

    def _meet_to_begin(self) -> None:
        self.session.meetings.barrier().wait()

    def check_peers(self) -> None:
        if self.session.training is None:
            super().check_peers()
        elif self.session.takes_part and not self._holds_with_others:
            # Where ranks hold a replica together, they ask each other at the end of the next step.
            self.step(super().check_peers, again=False)

    def show(self, call: Callable[[], None]) -> None:
        self.together(call, self.replica.show_as_shared)

    def end_training(self, call: Callable[[], None]) -> None:
        self.together(call, self._end_as_others)
        self.tell_register(Register.say_over)
        if self.number > 0 and self.is_first:
            missing = self._num_ranks - self.session.world_size
            more = f"{-missing} ranks more than the {self._num_ranks} at the start"
            fewer = f"{missing} of {self._num_ranks} ranks are missing"
            say(
                f"{more if missing < 0 else fewer} at the end{self._left_undone()}; "
                f"{self._changes_s:.1f} s went into changes of the view"
            )

    def _left_undone(self) -> str:
        """Says what the lost ranks would have done, as the end of a sentence; empty if unknown."""
        return ""

    def _end_as_others(self) -> None:
        self.session.enter(Phase.TRAINED)
        self.replica.finish_as_shared()

    def figures(self) -> dict[str, float]:
        view = self.calls.view
        return {
            "view": float(view.number),
            "num_members": float(view.world_size),
            "view_changes_s": self._changes_s,
        }

    # ---- the end ----

    def forgives(self, error: Exception) -> bool:
        return isinstance(error, TransportError)

    def stop(self) -> None:
        self.tell_register(Register.say_stopped)  # who came later would find nobody

    def fail(self, exception: BaseException) -> None:
        if failed(exception).ends_all and self.session.phase not in _BOUND:
            self.tell_register(Register.say_stopped)  # else the launcher starts ranks again

    def failed(self, reason: str, before: Phase) -> None:
        if before not in _BOUND:
            self.tell_register(lambda register: register.say_trains_no_more(reason))

    def tell_register(self, tell: Callable[[Register], None]) -> None:
        """Tells newcomers and the launcher; tells nobody where the store has ended."""
        register = self._entrance.register
        if register is not None:
            with contextlib.suppress(TransportError):
                tell(register)

    def leave(self) -> None:
        training = self.session.training
        if training is None:
            super().leave()
            return
        self.step(lambda: training.agreed.finish(), again=True)
        self.calls.leave()
