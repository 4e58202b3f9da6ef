"""What Lightning's Trainer does where its ranks change; others join it.

    what ranks tell each other where a view begins     who is new, and whether its model is the same
    what a member gives a newcomer                     its state before a batch (`handover`)
    which share of the data each rank reads            `shares`
    the first member                                   saves, logs and shows progress

How a newcomer is let in is in `turnover`.

Threads: the training thread.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic import handover
from lightning_dsgd.elastic.shares import Shares
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.trainer.sessions import TrainerSession, TrainerTraining
from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.view import View

IN_NONE: Final = -1


def takers(took_in: Sequence[int | None]) -> list[int]:
    """Returns which ranks of a view take the state of the others, the same on all of them.

    Newcomers have the state once all of them took it in one view, and so from one replica.  Before
    that no rank comes back from the change of the view (`calls`): so all others are still before
    the batch with which newcomers begin, and if any newcomer lacks the state, all take it anew.

    Args:
        took_in: for each rank the view in which it took the state, or `IN_NONE`; None on a rank
            that trains
    """
    newcomers = {rank: number for rank, number in enumerate(took_in) if number is not None}
    have_it = len({*newcomers.values()}) == 1 and IN_NONE not in newcomers.values()
    return [] if have_it else [*newcomers]


class _Told(NamedTuple):
    """Holds what a member says of itself when a view begins; as JSON on the wire."""

    took_in: int | None
    alike: list[str]
    """Texts that must be the same on all ranks."""
    started_as: str
    divided_for: int
    divides_for: list[int]


class TrainerFace:
    """Leads a Trainer's training, which others join; see `face.Face`.

    Args:
        session: the session of this rank
    """

    can_be_joined: ClassVar[bool] = True

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
        self._shares = Shares(session)
        self._versions: list[Any] = []
        """The versions under which rank 0's loggers write."""
        self._taken: dict[str, Any] | None = None
        self._took_in = IN_NONE
        """The view in which this newcomer took the others' state; see `takers`."""

    @property
    def _training(self) -> TrainerTraining:
        return opened(self._session.training)

    # ---- newcomers ----

    def check_newcomer(self, calls: str | None) -> None:
        if calls != "fit":
            raise ValueError(
                "a process that joins a training must call trainer.fit first, got "
                f"trainer.{calls}; leave that out, or start the job anew"
            )

    def introduce(self, view: View, alike: list[str]) -> dict[int, str]:
        shares = self._shares
        own = _Told(
            None if self._session.takes_part else self._took_in,
            alike,
            os.environ.get("RANK", ""),
            shares.divided_for,
            sorted(shares.divides_for),
        )
        texts = everyones(view.sub("newcomers"), json.dumps(own))
        told = [_Told(*json.loads(text)) for text in texts]
        new = takers([each.took_in for each in told])
        old = [each for rank, each in enumerate(told) if rank not in new]
        if not old:
            raise TransportError("a rank that has trained must be left, got newcomers only")
        for here, there in zip(alike, old[0].alike, strict=True):
            if view.rank in new and here != there:
                raise ValueError(
                    f"a newcomer must have the strategy and the model of the others, got {here} "
                    f"here and {there} there; start it with the same script and arguments"
                )
        shares.divide_after((each.divided_for for each in old), (each.divides_for for each in told))
        return {rank: told[rank].started_as for rank in new}

    def hand_over(
        self, view: View, givers: Mapping[int, int], counted: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        training, net = self._training, view.sub("state")
        claiming = training.claiming
        takers = [newcomer for newcomer, giver in givers.items() if giver == net.rank]
        if takers:
            session = {
                "counted": dict(counted),
                "versions": self._versions,
                "shares": self._shares.state(),
                "loaders": handover.loaders_of(training.trainer),
                "claimed": None if claiming is None else claiming.counts(),
            }
            handover.give(net, takers, training.trainer, session)
        elif net.rank in givers:
            self._taken = handover.take(net, givers[net.rank])
            self._took_in = view.number
            session = self._taken["session"]
            self._versions = session["versions"]
            self._shares.take_state(session["shares"])
            if claiming is not None:
                claiming.take_counts(session["claimed"])
            counted = session["counted"]
        return counted

    def taken(self) -> dict[str, Any] | None:
        return self._taken

    def place(self) -> list[int]:
        training = self._training
        if training.claiming is not None:
            return [training.trainer.current_epoch]
        return handover.position(training.trainer)

    # ---- the data ----

    def begin(self) -> None:
        session, trainer = self._session, self._training.trainer
        if self._taken is None:
            self._shares.begin()
            versions = json.dumps(handover.log_versions(trainer))
            self._versions = json.loads(session.text_of_rank_0(versions))
        else:
            handover.have_loaders_as(trainer, self._taken["session"]["loaders"])

    def end_epoch(self) -> None:
        if self._session.training is not None and self._session.takes_part:
            self._shares.end_epoch()

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        return self._shares.share(first)

    def left_undone(self) -> str:
        return self._shares.left_undone()

    # ---- a view, and the end ----

    def go_on(self, view: View, lost: Collection[int]) -> None:
        session = self._session
        if session.takes_part:
            self._shares.lose(len(lost))
        if view.rank == 0 and session.rank != 0 and handover.logs_nothing():
            trainer, suffix = self._training.trainer, f"view_{view.number}"
            handover.take_over_logs(trainer, self._versions, suffix)

    def check_stays(self) -> None:
        """Lets a rank that has left go on: the Trainer ends it by what it has raised."""

    def end_after_last(self) -> None:
        """Ends this rank, which is lost to the others: their callbacks may still ask all ranks."""
        session = self._session
        session.end_by(signal.SIGTERM, f"rank {session.rank} received")
