"""How the members of the Trainer's training change: besides what every face does, ranks join.

What the Trainer does where the view changes, besides what `elastic.changes` does:

    the samplers         from the next epoch on that no member has begun, they divide the data
                         among the members
    the first member     saves, logs and shows progress

**Joining.**  A process that is started later, and finds that training goes on (`register`), is a
newcomer.  It builds its model and optimizers, and then asks the members to let it in:

    the first member   hears of it, and asks that all meet before the same batch (`stopping`)
    all members        before that batch: serve the others until all are there, tell each other
                       which batch they are at, and learn from the first whom it has heard of
    all members        have the view changed to one with the newcomers (`Calls.admit`)
    all of that view   who is new, and whether its model is the same; the members average their
                       weights, and the first one gives them, and its own state, to each newcomer
                       (`handover`); all tell each other how many calls they have come back from
    the newcomer       has Lightning restore that state, alone, and begins with that batch

Before a batch a rank is in no evaluation, save or epoch's end, and at the same batch all have made
the same calls: so the newcomer makes the calls that the others make from there on.

Why nobody waits for ever, whoever is lost:

- The newcomer, before the view with it: it is in no view; if it is committed, it is lost in it.
- The newcomer later: as any member.
- The first member, before it has given its state: the change begins again, and the next member,
  which is before the same batch, gives its own.  For no member comes back from a change before each
  newcomer has taken part in its last exchange, for which it needs the state.
- Any rank, while the members meet: the meeting is over, on all (`Calls.once`), without newcomers.
  They ask again.
- A newcomer whose model differs ends, with an error, and is lost to the others.

Threads: the training thread alone.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.elastic import handover
from lightning_dsgd.elastic.changes import ChangingMembers
from lightning_dsgd.elastic.entrance import NewcomerTransport, make_group_of_one
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.suits import check_survival
from lightning_dsgd.elastic.views import views_of
from lightning_dsgd.session.ending import ended_by
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.sessions import TrainerSession
from lightning_dsgd.transport import Transport, TransportError
from lightning_dsgd.transport.view import View


class _Told(NamedTuple):
    """Holds what a member says of itself when a view begins; as JSON on the wire."""

    is_new: bool
    alike: list[str]
    """Texts that must be the same on all ranks."""
    started_as: str
    divided_for: int
    divides_for: list[int]
    """The epochs for which the member divides the data."""


class TrainerMembers(ChangingMembers):
    """The ranks of a Trainer's training, which others join; the head of the file tells how.

    Args:
        opening: how the ranks have opened their network
        min_ranks: how many ranks must be left; None: more than half of those before a loss
        max_ranks: how many ranks there may be; None: as many as at the start
    """

    session: TrainerSession
    can_be_joined: ClassVar[bool] = True

    def __init__(
        self, opening: Opening, min_ranks: int | None, max_ranks: int | None = None
    ) -> None:
        super().__init__(opening, min_ranks)
        self._max_ranks = max_ranks
        self._trainer: Any = None
        self._num_unread = 0
        self._versions: list[Any] = []
        self._told: list[_Told] = []
        self._divided_for = 0
        """The last epoch for which this rank has divided the data, or left the shares alone."""
        self._divides_for: set[int] = set()
        """The epochs for which all members divide the data among them."""
        self._division: tuple[int, int] | None = None
        """The number of shares, and this rank's share; None: as at the start.

        Where several ranks hold a replica together, each replica has a share.
        """
        self._state: dict[str, Any] = {}
        """What the others gave this newcomer."""

    # ---- setting up ----

    def check(self, algorithm: Algorithm, num_replicas: int, device: torch.device) -> None:
        self._device = device
        size = self.session.world_size
        limits = self._min_ranks, device, self._max_ranks
        check_survival(algorithm, size, *limits, num_shards=size // num_replicas)

    def check_unchanged(self) -> None:
        if self.has_changed:
            raise ValueError(
                "a Trainer must not be used again once ranks were lost or have joined, as the "
                f"ranks of its start must all be there, got the ranks {self.members} and "
                f"{self._num_ranks} at the start; start the job anew"
            )

    def find_training(self, address: tuple[str, int], calls: str | None = None) -> None:
        session = self.session
        if self._entrance.find_training(address):
            if calls != "fit":
                raise ValueError(
                    "a process that joins a training must call trainer.fit first, got "
                    f"trainer.{calls}; leave that out, or start the job anew"
                )
            session.enter(Phase.NEWCOMER)
            make_group_of_one()
        elif session.rank >= session.world_size:
            raise ValueError(
                f"rank {session.rank} was started to join a training of {session.world_size} "
                "ranks, which must go on meanwhile, but it has ended; start a new job from its "
                "checkpoint"
            )

    def open_network(self, open_network: Callable[[], Transport]) -> Transport:
        if self.session.takes_part:
            return open_network()
        net = self._entrance.come_later(self.session.world_size, self._device)
        self.session.rank = net.rank
        return net

    def join(self) -> dict[str, Any] | None:
        if self.session.takes_part:
            return None
        net = self.calls.net
        assert isinstance(net, NewcomerTransport)
        self._entrance.ask_to_join(net, self._num_ranks, self._min_ranks)
        self.calls.join()
        return self._state

    @property
    def _is_new(self) -> bool:
        """Whether this rank has come to ranks that train, and does not have their state yet."""
        return self.session.phase is Phase.NEWCOMER

    # ---- a view ----

    def _begin_anew(self, view: View, lost: list[int]) -> None:
        self._told = told = self._told_of(view)
        new = [rank for rank, each in enumerate(told) if each.is_new]
        old = [rank for rank, each in enumerate(told) if not each.is_new]
        if view.rank == 0:
            self._forget(lost)
        open_epoch = 1 + max(told[rank].divided_for for rank in old)
        self._divides_for = {epoch for each in told for epoch in each.divides_for} | {open_epoch}
        among = View(view.sub("old"), old, view.number) if new and view.rank in old else None
        self._change_replica(view, among, old[0] if new else -1)

    def _begun_anew(self, view: View, lost: list[int]) -> None:
        assert self.session.training is not None
        trainer, told = self.session.training.trainer, self._told
        new = [rank for rank, each in enumerate(told) if each.is_new]
        if new:
            self._hand_over(view.sub("state"), self._first_of_old(), new)
        if self.session.takes_part and self._has_shares:
            self._num_unread += len(lost) * _num_left(trainer)
        if view.rank == 0 and self.session.rank != 0 and handover.logs_nothing():
            handover.take_over_logs(trainer, self._versions, f"view_{view.number}")

    def _first_of_old(self) -> int:
        """Returns the first of the view's ranks that is no newcomer."""
        return next(rank for rank, each in enumerate(self._told) if not each.is_new)

    def _changes(self, lost: list[int]) -> str:
        view = self.calls.view
        if view.rank != self._first_of_old():
            return ""
        new = [rank for rank, each in enumerate(self._told) if each.is_new]
        joined = [
            f"rank {view.members[r]} joined (started as {self._told[r].started_as})" for r in new
        ]
        return ", ".join([*self._in_words(lost), *joined]) or "the same ranks"

    def _told_of(self, view: View) -> list[_Told]:
        """Returns what each member says of itself.

        Raises:
            ValueError: on a newcomer that has another model or other options
        """
        mine = [self._options, self.replica.description()]
        started_as, epochs = os.environ.get("RANK", ""), sorted(self._divides_for)
        own = _Told(self._is_new, mine, started_as, self._divided_for, epochs)
        told = [
            _Told(*json.loads(theirs))
            for theirs in everyones(view.sub("newcomers"), json.dumps(own))
        ]
        first = next((each for each in told if not each.is_new), None)
        if first is None:
            raise TransportError("a rank that has trained must be left, got newcomers only")
        for here, there in zip(mine, first.alike, strict=True):
            if self._is_new and here != there:
                raise ValueError(
                    f"a newcomer must have the strategy and the model of the others, got {here} "
                    f"here and {there} there; start it with the same script and arguments"
                )
        return told

    def _hand_over(self, net: Transport, giver: int, newcomers: list[int]) -> None:
        """Gives newcomers a member's state, or takes that state on a newcomer."""
        training = self.session.training
        assert training is not None
        claiming = training.claiming
        if net.rank == giver:
            session = {
                "num_begun": training.agreed.num_begun,
                "versions": self._versions,
                "num_unread": self._num_unread,
                "changes_s": self._changes_s,
                "divided_for": self._divided_for,
                "division": self._division and self._division[0],
                "loaders": handover.loaders_of(training.trainer),
                "claimed": None if claiming is None else claiming.counts(),
            }
            handover.give(net, newcomers, training.trainer, session)
        elif self._is_new:
            self._state = handover.take(net, giver)
            session = self._state["session"]
            training.agreed.num_begun = session["num_begun"]
            self._versions, self._num_unread = session["versions"], session["num_unread"]
            self._changes_s = session["changes_s"]
            self._divided_for = session["divided_for"]
            if session["division"]:  # else the share of the rank that it was started as
                self._division = session["division"], net.rank % session["division"]
            if claiming is not None:
                claiming.take_counts(session["claimed"])
            self.session.enter(Phase.JOINED)
            self.tell_register(Register.say_trains)

    def _wants_to_meet(self, agreed: AgreedBatch) -> bool:
        training = self.session.training
        assert training is not None
        sees_newcomers = self.is_first and not training.is_uneven and bool(self._newcomers())
        return sees_newcomers or super()._wants_to_meet(agreed)

    def _place(self) -> Any:
        training = self.session.training
        assert training is not None
        if training.claiming is not None:
            return [training.trainer.current_epoch]
        return handover.position(training.trainer)

    def _newcomers(self) -> list[int]:
        view = self.calls.view
        room = max(0, (self._max_ranks or self._num_ranks) - view.world_size)
        return [*views_of(view).newcomers()[:room]]

    def _forget(self, lost: list[int]) -> None:
        """Removes lost ranks from the register, so that newcomers do not try to reach them."""

        def forget(register: Register) -> None:
            for rank in lost:
                register.forget(rank)

        self.tell_register(forget)

    def _end_departed(self) -> NoReturn:
        self._interrupt(" and has left; the others go on")

    def check_stays(self) -> None:
        """Lets a rank that has left go on: the Trainer ends by what `_end_departed` raises."""

    def _end_after_last(self) -> None:
        # It is lost to the others, whose callbacks may still ask all ranks for something.
        self._interrupt()

    def _interrupt(self, end: str = "") -> NoReturn:
        begin = f"rank {self.session.rank} received"
        kind = seams.interruption(self._trainer, signal.SIGTERM)
        raise ended_by(signal.SIGTERM, kind, begin, end)

    # ---- the data ----

    def begin(self) -> None:
        training = self.session.training
        assert training is not None
        self._trainer = training.trainer
        if self.session.takes_part:
            self._divided_for = training.trainer.current_epoch
            versions = json.dumps(handover.log_versions(training.trainer))
            self._versions = json.loads(self.session.text_of_rank_0(versions))
            super().begin()
        else:
            handover.have_loaders_as(training.trainer, self._state["session"]["loaders"])
            self.session.forgive_others()

    def end_epoch(self) -> None:
        training = self.session.training
        if training is None or not self.session.takes_part:
            return
        self._divided_for = training.trainer.current_epoch + 1
        if self._has_shares and self._divided_for in self._divides_for:
            training.agreed.num_begun = self.together(self._most_begun)
            view = self.calls.view
            now: Any = self.session.sharding
            if not now.in_rows:
                self._division = view.world_size, view.rank
            else:
                self._division = now.num_replicas, now.members.index(view.rank)
            handover.make_loaders_again(training.trainer)

    @property
    def _has_shares(self) -> bool:
        """Whether each rank reads a share of the data, which a lost rank leaves unread."""
        training = self.session.training
        assert training is not None
        return training.claiming is None and training.balancing is None

    def _left_undone(self) -> str:
        if self.session.training is not None and self.session.training.balancing is not None:
            return ""  # the others have computed all
        return f": about {self._num_unread} batches of lost ranks were left in their epochs"

    def _most_begun(self) -> int:
        """Returns the most batches that any rank has begun; from now on all ranks count so many."""
        self.session.meet()
        texts = everyones(self.session.meetings, str(self._agreed.num_begun))
        return max(int(text) for text in texts)

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        """Returns a sampler's arguments for this rank's share of the data, once it is another."""
        num_shares, share = self._division or (first["num_replicas"], first["rank"])
        if self._at_first is not None and self._division:
            # A share is that of a replica, which each of its ranks has a part of, or all.
            size = first["num_replicas"] // self._at_first.num_replicas
            num_shares, share = num_shares * size, share * size + first["rank"] % size
        # Who has come besides the first ranks reads what one of them reads, in its first epoch.
        return first | {"num_replicas": num_shares, "rank": share % num_shares}


def _num_left(trainer: Any) -> int:
    """Returns how many batches of this epoch this rank has not read, about as many as another."""
    num_batches = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    is_finite = num_batches != float("inf")
    return max(0, int(num_batches) - int(done)) if is_finite else 0
