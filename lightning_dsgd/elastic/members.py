"""A session that goes on where a rank is lost (`on_loss="continue"`), whatever the face.

Every call of all ranks goes through `Calls.together`, every step of this rank through `Calls.step`
(`elastic/calls.py`): a loss in one of them has the members agree on the next view, and begin anew
in it: see `changes`.

Where several ranks hold a replica together, a lost rank takes its replica out of the view: the
others of it end, once the rest have agreed on a view without them.

A rank may be lost once `begin_to_survive` has come back: until then a loss ends the job, as it does
without.  The Trainer calls it before the first batch; in a loop that its user writes, each rank
calls it before its first step, or where it meets the others before that.

Threads: the training thread alone.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.surviving import SurvivingReplica
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.meeting import Meeting
from lightning_dsgd.session.session import Phase, Session, TrainingT, opened
from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.transport import Transport, TransportError
from lightning_dsgd.transport.contract import LEAST_LIMIT
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.register import Register
from lightning_dsgd.transport.view import View

if TYPE_CHECKING:
    from lightning_dsgd.session.sharding import Sharding


class SurvivingSession(Session[TrainingT], ABC):
    """A session that goes on where a rank is lost; the head of the file tells how.

    Args:
        meeting: the meeting of its ranks
        min_ranks: how many ranks must be left; None: more than half of those before a loss
        *args: the arguments of a session that a loss ends
    """

    replica_type: ClassVar[type[Replica]] = SurvivingReplica
    goes_on: ClassVar[bool] = True
    can_be_joined: ClassVar[bool] = False
    """Whether a rank that is started again can join the others."""

    def __init__(self, meeting: Meeting, min_ranks: int | None, *args: Any) -> None:
        super().__init__(*args)
        self._meeting = meeting
        self._min_ranks = min_ranks
        self._calls: Calls | None = None
        self._num_ranks = 1
        self._members: tuple[int, ...] = (0,)
        self._changes_s = 0.0
        self._at_first: Sharding | None = None
        self._rows: list[tuple[int, ...]] = []
        """The ranks of each replica, where several hold one."""
        self.is_newcomer = False
        """Whether this rank has come to ranks that train, and does not have their state yet."""
        self.is_alone = False
        """Whether this rank makes none of the others' calls: it has left, or not begun."""

    def open(self, net: Transport) -> None:
        assert isinstance(net, Endpoint)
        self.is_alone = self.survives = self.is_newcomer
        self._calls = Calls(net, self._enter_view, is_newcomer=self.is_newcomer)
        self._num_ranks, self._members = self.world_size, self._calls.view.members
        super().open(self._calls.view)

    @property
    def replica(self) -> SurvivingReplica:
        """This rank's replica, which begins anew in every view."""
        assert self.training is not None, "training has begun"
        replica = self.training.replica
        assert isinstance(replica, SurvivingReplica)
        return replica

    @property
    def view_number(self) -> int:
        return self.calls.view.number

    @property
    def calls(self) -> Calls:
        """Makes calls of all ranks, and carries them over a change of the view."""
        return opened(self._calls)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train, by the numbers that they had at the start."""
        return self._members

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first member, which does what rank 0 does."""
        return self.rank == self._members[0] and not self.is_alone

    @property
    def _holds_with_others(self) -> bool:
        """Whether other ranks hold this rank's replica with it."""
        return self.sharding is not None and self.sharding.num_shards > 1

    @property
    def has_changed(self) -> bool:
        """Whether ranks have been lost, or have joined; known also once the network is closed."""
        return self._members != tuple(range(self._num_ranks))

    @abstractmethod
    def _enter_view(self, view: View) -> None:
        """Takes over a view with other members."""

    @abstractmethod
    def _meet_others(self) -> None:
        """Changes the members before a batch, if all are to meet for that."""

    # ---- calls of all ranks ----

    def together(self, call: Callable[[], Any], adopt: Callable[[], None] | None = None) -> Any:
        """Makes a call of all ranks; see `Calls.together`."""
        return self.calls.together(call, adopt)

    def begin_to_survive(self) -> None:
        if self.survives or self.is_alone or self.training is None or self.has_ended:
            return
        self._forgive_others()
        if self.sharding is not None:
            self._at_first, self._rows = self.sharding, self.sharding.rows(self.meetings)
            if self._holds_with_others:
                self.calls.hold_together(self.sharding.row_of(self, self._rows))
        self.net.views.survive(self._min_ranks, self._rows if self._holds_with_others else ())
        register, card = self._meeting.register, self.calls.view.views.card()
        can_be_joined = self.can_be_joined and self._meeting.can_be_joined and not self._rows
        if register is not None and card is not None and can_be_joined:
            register.write_card(self.rank, card)
        if register is not None:
            register.say_trains()
        self.meetings.barrier().wait()
        # All survive now; who is back from here knows that nobody waits outside of a call any more.
        self.together(lambda: self.meetings.barrier().wait())
        if register is not None and self.is_first:
            register.say_survives(can_be_joined=can_be_joined)
        self.survives = True

    def begin_batch(self) -> None:
        self._enter(Phase.TRAINING)  # `break` has left the last batch without its end
        self.begin_to_survive()
        if self.is_alone:
            self.is_alone = False
        else:
            self._meet_others()
        is_begun = False

        def begin() -> None:
            nonlocal is_begun
            if not is_begun:  # else another rank of this replica has not, and makes it again
                super(SurvivingSession, self).begin_batch()
                is_begun = True

        self.calls.step(begin, again=True)

    def before_update(self, optimizer: Optimizer) -> None:
        self.begin_to_survive()
        self.calls.step(partial(super().before_update, optimizer), again=True)

    def after_update(self, optimizer: Optimizer) -> None:
        self.calls.step(partial(super().after_update, optimizer), again=False)

    def follow(self) -> None:
        self.calls.step(super().follow, again=True)

    def check_peers(self) -> None:
        if self.is_alone:
            return
        if self.training is None:
            super().check_peers()
        elif not self._holds_with_others:  # else they ask each other at the end of the next step
            self.calls.step(super().check_peers, again=False)

    def show_consensus(self) -> None:
        training = self.training
        if training is not None:
            self.together(super().show_consensus, self.replica.show_as_shared)

    def end_training(self) -> None:
        if self.training is None or self.phase is Phase.BROKEN:
            return
        self.together(super().end_training, self._end_as_others)
        if self.survives:
            self._tell_register(Register.say_over)
        if self.calls.view.number > 0 and self.is_first:
            missing = self._num_ranks - self.world_size
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
        self.phase = Phase.READY
        self.replica.finish_as_shared()

    def meet(self, what: int = 0) -> bool:
        training = self.training
        if self.is_alone:
            return True
        if training is None or self.phase in (Phase.IN_BATCH, Phase.STOPPING):
            return super().meet(what)
        met: bool = self.together(partial(super().meet, what))
        return met

    def reduce(self, tensor: Tensor, *, is_mean: bool) -> Tensor:
        if self.is_alone:
            return tensor
        total: Tensor = self.together(partial(super().reduce, tensor, is_mean=is_mean))
        return total

    def save(self, *args: Any, **kwargs: Any) -> None:
        self.together(partial(super().save, *args, **kwargs))

    def texts(self, text: str) -> list[str]:
        if self.is_alone:
            return [text]
        texts: list[str] = self.together(partial(super().texts, text))
        return texts

    def gather_figures(self, figures: dict[str, float]) -> list[dict[str, float]]:
        """Returns every rank's figures, by rank; a lost rank has none."""

        def gather() -> list[Any]:
            theirs = super(SurvivingSession, self).gather_figures(figures)
            return [[*self.calls.view.members], theirs]

        # Who takes them over may be in a view with fewer members.
        members, theirs = self.together(gather)
        by_rank: list[dict[str, float]] = [{} for _ in range(max(members) + 1)]
        for rank, each in zip(members, theirs, strict=True):
            by_rank[rank] = each
        return by_rank

    def figures(self) -> dict[str, float]:
        view = self.calls.view
        return super().figures() | {
            "view": float(view.number),
            "num_members": float(view.world_size),
            "view_changes_s": self._changes_s,
        }

    # ---- in the place of torch's collectives ----

    def broadcast(self, value: Any, src: int) -> Any:
        """Returns one rank's value on all ranks: text, numbers, or None.

        The first member gives its value where that rank is lost.
        """
        if not self.is_open or self.phase is Phase.BROKEN or self.is_alone:
            return value
        try:
            text = json.dumps(str(value) if isinstance(value, Path) else value)
        except TypeError as err:
            raise ValueError(
                "what is broadcast must be text, a number, a list or a dict of them, or None, with "
                f'on_loss="continue", got {type(value).__name__}; use on_loss="end"'
            ) from err

        def take() -> str:
            super(SurvivingSession, self).meet()
            members = self.calls.view.members  # not before: the call may be made again
            texts = everyones(self.meetings, text)
            return texts[members.index(src) if src in members else 0]

        return json.loads(self.together(take))

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> list[Tensor]:
        """Returns every member's tensor."""
        if sync_grads:
            raise ValueError(
                "gradients must not travel through what is gathered with "
                'on_loss="continue", got all_gather(..., sync_grads=True); leave sync_grads out, '
                'or use on_loss="end"'
            )
        if self.is_alone:
            return [tensor]

        def gather() -> list[Tensor]:
            super(SurvivingSession, self).meet()
            flat = tensor.detach().reshape(-1).contiguous()
            if flat.nbytes > LEAST_LIMIT:
                self.net.expect_at_most(flat.nbytes)
                self.meetings.barrier().wait()  # all do
            return [x.view(tensor.shape) for x in self.meetings.all_gather(flat).wait()]

        tensors: list[Tensor] = self.together(gather)
        return tensors

    def decide(self, decision: bool, *, is_of_all: bool) -> bool:
        """Returns whether all members vote yes, or any of them, the same on all.

        The votes alone tell: a rank may take over the votes of a view that had more members.
        """
        votes = self.all_gather(torch.tensor(int(decision)))
        return bool(_reduced(votes, "min" if is_of_all else "max"))

    def reduced(self, tensor: Tensor, op: str) -> Tensor:
        """Reduces all members' tensors as Lightning reduces."""
        return _reduced(self.all_gather(tensor), op)

    def barrier(self) -> None:
        """Waits for all members."""

        def meet() -> None:
            super(SurvivingSession, self).meet()
            self.meetings.barrier().wait()

        if self.can_meet and not self.is_alone:
            self.together(meet)

    # ---- the end ----

    def fail(self, exception: BaseException) -> str:
        reason = super().fail(exception)
        if self.survives:
            self._tell_register(lambda register: register.say_trains_no_more(reason))
        return reason

    def _tell_register(self, tell: Callable[[Register], None]) -> None:
        """Tells newcomers and the launcher; tells nobody where the store has ended."""
        register = self._meeting.register
        if register is not None:
            with contextlib.suppress(TransportError):
                tell(register)

    def leave(self) -> None:
        calls, self._calls = self._calls, None
        is_fit = self.training is not None and not self.is_alone
        if calls is not None and self.phase is not Phase.BROKEN and is_fit:
            self._calls = calls
            calls.step(lambda: self._agreed().finish(), again=True)
            calls.leave()
            self._leave_alone(calls.view)
            return
        super().leave()

    def _agreed(self) -> AgreedBatch:
        assert self.training is not None
        return self.training.agreed

    def _leave_alone(self, view: View) -> None:
        training, self.training = self.training, None
        assert training is not None
        for stop in training.stop_lanes():
            with contextlib.suppress(TransportError):
                stop()
        self._calls = self._net = self._meetings = None
        self._enter(Phase.OVER)
        view.close()
        self._cancel_last_resort()


def _reduced(tensors: list[Tensor], op: str) -> Tensor:
    """Reduces all members' tensors as Lightning reduces."""
    stacked = torch.stack(tensors)
    made: dict[str, Callable[[], Tensor]] = {
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: stacked.prod(0),
    }
    if op not in made:
        raise ValueError(
            'reduce_op must be mean, sum, max, min or product with on_loss="continue", got '
            f'{op!r}; use on_loss="end"'
        )
    return made[op]()
