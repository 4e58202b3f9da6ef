"""Who is lost, and by what: scripted faults, failures, and ranks that have left.

All of this belongs to the holder of the baton.  The first loss is the one that counts.  The wing
`elastic` has faults after which the ranks agree on a view without that rank, and go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from lightning_dsgd.simulated.baton import Baton, Thread
from lightning_dsgd.transport.contract import PeerLost, TransportError, Views


@dataclass
class Loss:
    """The loss of a rank: why, by which error of its own, and whether its process has ended."""

    rank: int
    reason: str
    cause: BaseException | None
    died: bool = True


class Faults:
    """All that goes wrong in one run: scripted faults, failures, and ranks that leave.

    Args:
        baton: the run's baton
        detect_s: how long after a rank's end the others know of it
        heartbeat_timeout_s: how long after a rank's last sign of life the others give it up
    """

    def __init__(self, baton: Baton, detect_s: float, heartbeat_timeout_s: float) -> None:
        self.detect_s = detect_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.baton = baton
        self._loss: Loss | None = None
        self.killed_at: dict[int, float] = {}
        self._dropped: set[int] = set()
        self._closed_at: dict[int, float] = {}
        self._callbacks: dict[int, Callable[[PeerLost], None]] = {}

    def views_of(self, rank: int) -> Views:
        """Returns what a rank knows of who trains: here, its first loss is its last."""
        return Views()

    def join(self, rank: int, within_s: float) -> None:
        """Has a newcomer ask all that are there to let it in; `next_view` gives its first view."""
        raise TransportError("ranks join a SurvivingWorld alone")

    # ---- scripted ----

    def kill(self, rank: int) -> None:
        """Ends all of the rank's threads; the others know `detect_s` later."""
        baton = self.baton
        if not baton.threads[rank][0].ended:
            self.killed_at[rank] = baton.time
            reason = f"was killed at {baton.time:.9g} s"
            baton.doom(baton.threads[rank], f"rank {rank} {reason}")
            self.lose(rank, reason, baton.time + self.detect_s)

    def delay(self, rank: int, seconds: float) -> None:
        """Moves the rank's clocks on by so many seconds."""
        self.baton.delay(rank, seconds)

    def drop(self, rank: int) -> None:
        """Lets all messages to and from the rank vanish, those on their way and later ones."""
        self._dropped.add(rank)
        after_s = self.heartbeat_timeout_s
        reason = f"stopped answering: not heard of for {after_s:g} s"
        self._plan(Loss(rank, reason, None, died=False), self.baton.time + after_s)

    # ---- what the ranks do ----

    def close(self, rank: int) -> None:
        """Notes that a rank closes its network, as nobody needs it any more."""
        self._closed_at.setdefault(rank, self.baton.running.clock)

    def lose(self, rank: int, reason: str, at_s: float, cause: BaseException | None = None) -> None:
        """Lets all know from then on that the rank is lost, if no other is lost before."""
        self._plan(Loss(rank, reason, cause), at_s)

    def end(self, rank: int, failure: BaseException | None) -> None:
        """Notes that a rank's training thread has ended, so that those that can go on do so."""

    def on_lost(self, rank: int, callback: Callable[[PeerLost], None]) -> None:
        """Has `callback` called when this rank loses another."""
        self._callbacks[rank] = callback
        self._tell_loss(rank)

    # ---- what is known ----

    def has_lost(self, rank: int) -> bool:
        """Returns whether this rank has lost another, and is not in a view that followed."""
        return self._loss is not None

    def check(self, rank: int, waited_for: str) -> None:
        """Raises `PeerLost` on this rank, if a rank is lost."""
        if self._loss is not None:
            raise self._lost_to(rank, self._loss, waited_for) from self._loss.cause

    def why_left(self, rank: int) -> str:
        """Returns how the rank has left; an empty text if it has not."""
        training = self.baton.threads[rank][0]
        if training.ended:
            return f"has left (it returned at {training.clock:.9g} s)"
        if rank in self._closed_at:
            return f"has left (it closed its network at {self._closed_at[rank]:.9g} s)"
        return ""

    def takes_away(self, src: int, dst: int, start_s: float) -> bool:
        """Returns whether a message that leaves then does not arrive."""
        return self.is_cut(src, dst) or start_s > self.killed_at.get(src, math.inf)

    def is_cut(self, rank: int, other: int) -> bool:
        """Returns whether nothing passes between two ranks, not even that one has ended."""
        return rank in self._dropped or other in self._dropped

    # ---- by the baton, at its time ----

    def _plan(self, loss: Loss, at_s: float) -> None:
        self.baton.plan(at_s, partial(self._lose, loss))

    def _lose(self, loss: Loss) -> None:
        if self._loss is not None:
            return
        self._loss = loss
        for rank in list(self._callbacks):
            self._tell_loss(rank)
        self.rouse(self.baton.all_threads())

    def tell(self, rank: int, lost: PeerLost) -> None:
        """Calls whoever on a rank wants to hear of losses."""
        if rank in self._callbacks:
            self._callbacks[rank](lost)

    def rouse(self, threads: Iterable[Thread]) -> None:
        """Has threads look whether their wait has ended."""
        for thread in threads:
            if thread.waits_for is not None and thread.waits_for.needs_others:
                self.baton.rouse(thread)

    def _tell_loss(self, rank: int) -> None:
        if self._loss is not None:
            lost = self._lost_to(rank, self._loss)
            if lost.rank != rank:
                self.tell(rank, lost)

    def _lost_to(self, rank: int, loss: Loss, waited_for: str = "") -> PeerLost:
        lost = loss.rank
        if lost == rank and lost in self._dropped and len(self.baton.threads) > 1:
            lost = 0 if rank else 1  # whoever is cut off has lost the others
        return PeerLost(lost, loss.reason, waited_for)
