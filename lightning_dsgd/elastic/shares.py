"""Which share of the data each rank of a Trainer reads, as ranks are lost and join.

From the next epoch on that no member has begun, the samplers divide the data among the members.
The members tell each other for which epoch each has divided the data last, in the first exchange
of a view (`trainer.TrainerFace.introduce`).  So all of them know the same epochs for which to
divide it, and do so where each of them ends the epoch before.

Where ranks claim their batches, or share the micro-batches of a step, nobody has a share.

Threads: the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic import handover
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.trainer.sessions import TrainerSession, TrainerTraining


class Shares:
    """Divides the data of one rank's training.

    Attributes:
        divided_for: the last epoch for which this rank has divided the data, or left the shares
            alone
        divides_for: the epochs for which all members divide the data among them

    Args:
        session: the session of this rank
    """

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
        self.divided_for = 0
        self.divides_for: set[int] = set()
        self._num_unread = 0
        self._division: tuple[int, int] | None = None
        """The number of shares, and this rank's share; None: as at the start.

        Where several ranks hold a replica together, each replica has a share.
        """
        self._num_replicas_at_first: int | None = None
        """The number of replicas at the start, where several ranks hold one; else None."""

    @property
    def _training(self) -> TrainerTraining:
        return opened(self._session.training)

    @property
    def _are_divided(self) -> bool:
        """Whether each rank reads a share of the data, which a lost rank leaves unread."""
        return self._training.claiming is None and self._training.balancing is None

    def begin(self) -> None:
        """Notes that all ranks begin to train."""
        self.divided_for = self._training.trainer.current_epoch
        sharding: Any = self._session.sharding
        if sharding.in_rows:
            self._num_replicas_at_first = sharding.num_replicas

    def divide_after(self, divided_for: Iterable[int], divides_for: Iterable[list[int]]) -> None:
        """Divides the data anew for the next epoch that no member has begun.

        Args:
            divided_for: the attribute of each member that is no newcomer
            divides_for: the attribute of each member
        """
        open_epoch = 1 + max(divided_for)
        self.divides_for = {epoch for each in divides_for for epoch in each} | {open_epoch}

    def lose(self, num_lost: int) -> None:
        """Counts the batches that lost ranks leave unread, about as many as this rank has."""
        if self._are_divided:
            self._num_unread += num_lost * _num_left(self._training.trainer)

    def left_undone(self) -> str:
        """Says how much lost ranks have left unread, as the end of a sentence."""
        if self._training.balancing is not None:
            return ""  # the others have computed all
        return f": about {self._num_unread} batches of lost ranks were left in their epochs"

    def end_epoch(self) -> None:
        """Divides the data for the next epoch, if all members do."""
        session, training = self._session, self._training
        self.divided_for = training.trainer.current_epoch + 1
        if not (self._are_divided and self.divided_for in self.divides_for):
            return
        training.agreed.num_begun = session.ranks.together(self._most_begun)
        self._division = self._division_now()
        handover.make_loaders_again(training.trainer)

    def _division_now(self) -> tuple[int, int]:
        """Returns how many members, or replicas, there are, and which of them this one is."""
        session = self._session
        now: Any = session.sharding
        if now.in_rows:
            return now.num_replicas, now.members.index(session.net.rank)
        return session.world_size, session.net.rank

    def _most_begun(self) -> int:
        """Returns the most batches that any rank has begun; from now on all ranks count so many."""
        self._session.meet()
        texts = everyones(self._session.meetings, str(self._training.agreed.num_begun))
        return max(int(text) for text in texts)

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        """Returns a sampler's arguments for this rank's share, once it is another than `first`."""
        num_shares, share = self._division or (first["num_replicas"], first["rank"])
        if self._num_replicas_at_first is not None and self._division:
            # A share is that of a replica, which each of its ranks has a part of, or all.
            size = first["num_replicas"] // self._num_replicas_at_first
            num_shares, share = num_shares * size, share * size + first["rank"] % size
        # A newcomer besides the first ranks reads what one of them reads, in its first epoch.
        return first | {"num_replicas": num_shares, "rank": share % num_shares}

    # ---- for newcomers ----

    def state(self) -> dict[str, Any]:
        """Returns what a newcomer needs to know of the shares."""
        return {
            "num_unread": self._num_unread,
            "divided_for": self.divided_for,
            "num_shares": None if self._division is None else self._division[0],
            "num_replicas_at_first": self._num_replicas_at_first,
        }

    def take_state(self, state: dict[str, Any]) -> None:
        """Takes over a member's `state` on a newcomer."""
        self._num_unread, self.divided_for = state["num_unread"], state["divided_for"]
        self._num_replicas_at_first = state["num_replicas_at_first"]
        num_shares = state["num_shares"]
        if num_shares:  # else the share of the rank that it was started as
            self._division = num_shares, self._division_now()[1] % num_shares


def _num_left(trainer: Any) -> int:
    """Returns how many batches of this epoch this rank has not read, about as many as another."""
    num_batches = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    is_finite = num_batches != float("inf")
    return max(0, int(num_batches) - int(done)) if is_finite else 0
