"""What leads the members' training, and what they ask of it where they change.

    Face        what the members ask
    LoopFace    a loop in plain PyTorch or Fabric: nobody can join it
    TrainerFace, in `trainer`: Lightning's Trainer, which others join

Threads: the training thread.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Protocol

from lightning_dsgd.elastic.entrance import refuse_newcomer
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.transport.view import View

HAS_LEFT: Final = " and has left; the others go on"


class Face(Protocol):
    """What leads the training of one rank."""

    can_be_joined: ClassVar[bool]
    """Whether a rank that is started again can join the others."""

    # ---- newcomers ----

    def check_newcomer(self, calls: str | None) -> None:
        """Raises unless this process can join others, which train already.

        Args:
            calls: which function of the Trainer's was called
        """

    def introduce(self, view: View, alike: list[str]) -> dict[int, str]:
        """Returns who of a view takes the others' state, and as which rank each was started.

        All ranks of the view call it, and tell each other what they need to know of their data.

        Args:
            view: the view
            alike: texts that must be the same on all ranks

        Raises:
            ValueError: on a newcomer whose texts differ
            TransportError: if all ranks of the view would take it
        """

    def hand_over(
        self, view: View, givers: Mapping[int, int], counted: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Gives newcomers a member's state; returns `counted`, on a newcomer its giver's.

        Args:
            view: the view
            givers: for each newcomer, the rank that gives it its state
            counted: what this rank has counted in its training
        """

    def taken(self) -> dict[str, Any] | None:
        """Returns the state that this newcomer has taken; None on all other ranks."""

    def place(self) -> list[int]:
        """Returns this rank's place in the data; empty: nobody can join before this batch."""

    # ---- the data ----

    def begin(self) -> None:
        """Notes that this rank begins to train."""

    def end_epoch(self) -> None:
        """Notes that this rank has done its batches of an epoch."""

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        """Returns a sampler's arguments for this rank's share of the data.

        Args:
            first: the arguments for its share at the start
        """

    def left_undone(self) -> str:
        """Says what lost ranks would have done, as the end of a sentence; empty if unknown."""

    # ---- a view, and the end ----

    def go_on(self, view: View, lost: Collection[int]) -> None:
        """Goes on in a view in which the replica has begun anew.

        Args:
            view: the view
            lost: the ranks that are lost since the view before
        """

    def check_stays(self) -> None:
        """Raises what this rank ends with if it has left the others, as it was told to."""

    def end_after_last(self) -> None:
        """Ends a rank that got SIGTERM with no batch left before which all could meet."""


class LoopFace:
    """Leads a loop in plain PyTorch or Fabric, whose place in its data nobody else knows.

    Args:
        session: the session of this rank
    """

    can_be_joined: ClassVar[bool] = False

    def __init__(self, session: Session[Any]) -> None:
        self._session = session

    def check_newcomer(self, calls: str | None) -> None:
        refuse_newcomer()

    def introduce(self, view: View, alike: list[str]) -> dict[int, str]:
        return {}

    def hand_over(
        self, view: View, givers: Mapping[int, int], counted: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return counted

    def taken(self) -> dict[str, Any] | None:
        return None

    def place(self) -> list[int]:
        return []

    def begin(self) -> None:
        pass

    def end_epoch(self) -> None:
        pass

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        return first

    def left_undone(self) -> str:
        return ""

    def go_on(self, view: View, lost: Collection[int]) -> None:
        if view.rank == 0:
            self._session.become_first()

    def check_stays(self) -> None:
        """Raises at each call after this rank has left: a loop may have caught what ended it."""
        session = self._session
        if session.phase is Phase.LEFT:
            session.end_by(signal.SIGTERM, f"rank {session.rank} received", HAS_LEFT)

    def end_after_last(self) -> None:
        """Ends this rank, which leaves the network together with the others."""
        session = self._session
        session.enter(Phase.STOPPING)
        session.quiet_observer()
        session.end_by(signal.SIGTERM, f"rank {session.rank} received")
