"""Who is lost, and by what: scripted faults, failures, and ranks that have left.

All of this belongs to the holder of the baton.  The first loss is the one that counts; but where
the ranks go on after a loss, they agree on a view without that rank: see `views`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_dsgd.transport.contract import PeerLost, failed
from lightning_dsgd.transport.simulated.baton import Baton, Thread
from lightning_dsgd.transport.simulated.views import Views


@dataclass
class _Loss:
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
        self._baton = baton
        self._loss: _Loss | None = None
        self.views: Views | None = None
        self._killed_at: dict[int, float] = {}
        self._dropped: set[int] = set()
        self._closed_at: dict[int, float] = {}
        self._callbacks: dict[int, Callable[[PeerLost], None]] = {}

    def go_on(
        self,
        num_first: int,
        latency_s: float,
        min_ranks: int | None,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Has a view follow each loss.

        Args:
            num_first: how many ranks there are at the start
            latency_s: the latency of an agreement's messages
            min_ranks: how many ranks a view must have; None: more than half of the last view's
            groups: ranks none of which can go on without the others of their group
        """
        self.views = Views(
            self._baton,
            num_first,
            self.heartbeat_timeout_s / 2,  # as between processes
            latency_s,
            min_ranks,
            self.takes_away,
            self._is_cut,
            self._on_change,
            groups,
        )

    # ---- scripted ----

    def kill(self, rank: int) -> None:
        """Ends all of the rank's threads; the others know `detect_s` later."""
        baton = self._baton
        if not baton.threads[rank][0].ended:
            self._killed_at[rank] = baton.time
            reason = f"was killed at {baton.time:.9g} s"
            baton.doom(baton.threads[rank], f"rank {rank} {reason}")
            if self.views is not None:
                self.views.end(rank)
            self.lose(rank, reason, baton.time + self.detect_s)

    def delay(self, rank: int, seconds: float) -> None:
        """Moves the rank's clocks on by so many seconds."""
        self._baton.delay(rank, seconds)

    def drop(self, rank: int) -> None:
        """Lets all messages to and from the rank vanish, those on their way and later ones."""
        self._dropped.add(rank)
        after_s = self.heartbeat_timeout_s
        reason = f"stopped answering: not heard of for {after_s:g} s"
        self._plan(_Loss(rank, reason, None, died=False), self._baton.time + after_s)

    def doubt(self, rank: int, other: int) -> None:
        """Makes one rank alone take another for lost, which lives."""
        if self.views is not None:
            self.views.doubt(rank, other)

    # ---- what the ranks do ----

    def close(self, rank: int) -> None:
        """Notes that a rank closes its network, as nobody needs it any more."""
        self._closed_at.setdefault(rank, self._baton.running.clock)

    def lose(self, rank: int, reason: str, at_s: float, cause: BaseException | None = None) -> None:
        """Lets all know from then on that the rank is lost, if no other is lost before."""
        self._plan(_Loss(rank, reason, cause), at_s)

    def end(self, rank: int, failure: BaseException | None) -> None:
        """Notes that a rank's training thread has ended, so that the others go on without it."""
        views = self.views
        if views is None:
            return
        views.end(rank)
        at_s = self._baton.running.clock + self.detect_s
        if failure is None:
            self._baton.plan(at_s, partial(views.leave, rank))
        elif rank not in self._killed_at:
            at_s = max(at_s, views.all_arrive_at(self._baton.running.clock))
            self.lose(rank, failed(failure), at_s, failure)

    def on_lost(self, rank: int, callback: Callable[[PeerLost], None]) -> None:
        """Has `callback` called when this rank loses another."""
        self._callbacks[rank] = callback
        self._tell(rank)

    # ---- what is known ----

    def has_lost(self, rank: int) -> bool:
        """Returns whether this rank has lost another, and is not in a view that followed."""
        if self.views is not None:
            return self.views.failure(rank) is not None
        return self._loss is not None

    def check(self, rank: int, waited_for: str) -> None:
        """Raises `PeerLost` on this rank, if a rank is lost."""
        if self.views is not None:
            lost = self.views.failure(rank)
            if lost is not None:
                raise PeerLost(lost.rank, lost.reason, waited_for)
        elif self._loss is not None:
            raise self._lost_to(rank, self._loss, waited_for) from self._loss.cause

    def why_left(self, rank: int) -> str:
        """Returns how the rank has left; an empty text if it has not."""
        training = self._baton.threads[rank][0]
        if training.ended:
            return f"has left (it returned at {training.clock:.9g} s)"
        if rank in self._closed_at:
            return f"has left (it closed its network at {self._closed_at[rank]:.9g} s)"
        return ""

    def takes_away(self, src: int, dst: int, start_s: float) -> bool:
        """Returns whether a message that leaves then does not arrive."""
        return self._is_cut(src, dst) or start_s > self._killed_at.get(src, math.inf)

    def _is_cut(self, rank: int, other: int) -> bool:
        return rank in self._dropped or other in self._dropped

    # ---- by the baton, at its time ----

    def _plan(self, loss: _Loss, at_s: float) -> None:
        self._baton.plan(at_s, partial(self._lose, loss))

    def _lose(self, loss: _Loss) -> None:
        if self.views is not None:
            self.views.lose(loss.rank, loss.reason, died=loss.died)
            return
        if self._loss is not None:
            return
        self._loss = loss
        for rank in list(self._callbacks):
            self._tell(rank)
        self._rouse(self._baton.all_threads())

    def _on_change(self, rank: int, lost: PeerLost) -> None:
        """Ends the waits of one rank, as the members change."""
        if rank in self._callbacks and lost.rank != rank:
            self._callbacks[rank](lost)
        self._rouse(self._baton.threads[rank])

    def _rouse(self, threads: Iterable[Thread]) -> None:
        for thread in threads:
            if thread.waits_for is not None and thread.waits_for.needs_others:
                self._baton.rouse(thread)

    def _tell(self, rank: int) -> None:
        if self._loss is not None:
            lost = self._lost_to(rank, self._loss)
            if lost.rank != rank:
                self._callbacks[rank](lost)

    def _lost_to(self, rank: int, loss: _Loss, waited_for: str = "") -> PeerLost:
        lost = loss.rank
        if lost == rank and lost in self._dropped and len(self._baton.threads) > 1:
            lost = 0 if rank else 1  # whoever is cut off has lost the others
        return PeerLost(lost, loss.reason, waited_for)
