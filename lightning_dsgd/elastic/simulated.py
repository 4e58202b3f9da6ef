"""A simulated world that goes on after a loss: the agreement (`views`) on virtual time.

Each rank has its own membership, as a real one has, and messages between these take the world's
latency.  So the ranks learn of a change at different times, may be lost in the midst of an
agreement, and newcomers come to whatever there is.

    a rank is killed, or fails     the others suspect it, `detect_s` later; they end with one that
                                   tells that what all train is not finite
    a rank is dropped              they suspect it, and it suspects all of them
    a rank doubts another          it alone suspects that one
    a rank stands still            what comes to it waits; they suspect it if that lasts too long
    the network is cut             ranks suspect those that they cannot reach
    a rank has returned            it takes part in no agreement any more

With `chance` the ranks notice these at different times, and news are under way for different times.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from lightning_dsgd.elastic.ballots import Message
from lightning_dsgd.elastic.membership import Membership
from lightning_dsgd.elastic.views import JOINS, Action, AgreedViews
from lightning_dsgd.simulated.baton import Awaited, Baton
from lightning_dsgd.simulated.faults import Faults, Loss
from lightning_dsgd.simulated.simulation import Fault
from lightning_dsgd.simulated.world import SimulatedWorld
from lightning_dsgd.transport.contract import PeerLost, TransportError, Views, failed


class SurvivingWorld(SimulatedWorld):
    """A simulated world in which a view of the ranks left follows a loss: `Views.next_view`.

    Args:
        world_size: P, at the start
        min_ranks: how many ranks a view must have; None: more than half of the last view's
        groups: ranks none of which can go on without the others of their group
        chance: draws when each rank notices something; None: all at once
        **options: as `SimulatedWorld` takes them
    """

    def __init__(
        self,
        world_size: int,
        *,
        min_ranks: int | None = None,
        groups: Sequence[Sequence[int]] = (),
        chance: random.Random | None = None,
        **options: Any,
    ) -> None:
        super().__init__(world_size, **options)
        self.min_ranks, self.groups, self.chance = min_ranks, groups, chance

    def join(self, at_s: float) -> int:
        """Has a process come and run what all run; returns its number, which no rank has had.

        The process finds `net.is_newcomer`, and must call `net.join`.  Its result is behind the
        results of the first ranks.
        """
        if at_s < 0:
            raise ValueError(f"ranks join at 0 s or later, got at_s={at_s}")
        self._arrivals.append(at_s)
        return self.world_size + len(self._arrivals) - 1

    def doubt(self, rank: int, other: int, at_s: float) -> None:
        """Makes one rank alone take another for lost, which lives.

        The same happens where a message between the two is late, or where the link is cut and this
        end notices first.
        """

        def strike(faults: Any) -> None:
            faults.doubt(rank, other)

        self._script(rank, at_s, strike)

    def script(self, at_s: float, strike: Callable[[SurvivableFaults], None]) -> None:
        """Has something happen at a time, to whichever ranks are there then."""
        self._faults.append((at_s, cast(Fault, strike)))

    def _make_faults(self, baton: Baton) -> SurvivableFaults:
        terms = self.world_size, self.latency_s, self.min_ranks, self.groups, self.chance
        return SurvivableFaults(baton, self.detect_s, self.heartbeat_timeout_s, *terms)


class _NextView(Awaited):
    """The event that a rank is in a view, or in none any more."""

    needs_others = False

    def in_words(self) -> str:
        return "the next view"


class SimulatedViews(AgreedViews):
    """One rank's end of the views of a simulated world.

    Args:
        world: all that goes wrong in the world
        membership: the rank's end of the agreements
    """

    def __init__(self, world: SurvivableFaults, membership: Membership) -> None:
        super().__init__(membership, contextlib.nullcontext(), world.reasons)
        self._world = world
        self._failure: PeerLost | None = None
        self._awaited: _NextView | None = None
        self._tick_at = math.inf

    def survive(self, min_ranks: int | None, groups: Sequence[Sequence[int]] = ()) -> None:
        """Checks that the world has the same `min_ranks` and `groups`."""
        world = self._world
        if list(map(tuple, groups)) != list(map(tuple, world.groups)):
            raise ValueError(
                f"groups must be those of the world, got groups={groups} with "
                f"SurvivingWorld(groups={world.groups})"
            )
        if world.min_ranks != min_ranks:
            raise ValueError(
                f"min_ranks must be that of the world, got min_ranks={min_ranks} with "
                f"SurvivingWorld(min_ranks={world.min_ranks})"
            )

    @property
    def failure(self) -> PeerLost | None:
        return self._failure

    def ask(self, contacts: Sequence[int], within_s: float) -> None:
        """Asks the others to let this newcomer in."""
        self._failure = PeerLost(self.rank, JOINS)
        self._soon(lambda membership, now: membership.ask(now, contacts, within_s))

    def _break_off(self, lost: PeerLost) -> None:
        if self.rank not in self._world.gone:
            self._failure = lost
            self._world.end_waits(self.rank, lost)

    def _resume(self) -> None:
        self._failure = None

    def _await(self, is_there: Callable[[], bool]) -> None:
        if not is_there():
            self._awaited = _NextView()
            try:
                self._world.baton.wait(self._awaited, None, math.inf)
            finally:
                self._awaited = None

    def _notify(self) -> None:
        is_there = self.ended or self._has_next
        if is_there and self._awaited is not None and self._awaited.at_s == math.inf:
            self._world.baton.ready(self._awaited, self._world.baton.time)

    def _soon(self, action: Action) -> None:
        """Has the membership act at once, unless the rank is gone; plans the next look at it."""
        if self.rank in self._world.gone:
            return
        baton, wakes_s = self._world.baton, self._world.still_until.get(self.rank, 0.0)
        if baton.time < wakes_s:
            baton.plan(wakes_s, partial(self._soon, action))
            return
        action(self.membership, baton.time)
        self._suspect_left(baton.time)
        self._act()
        next_at = max(self.membership.next_at, baton.time)
        if next_at < self._tick_at:
            self._tick_at = next_at
            baton.plan(next_at, self._tick)

    def _tick(self) -> None:
        if self._tick_at <= self._world.baton.time:
            self._tick_at = math.inf
            self._soon(Membership.tick)

    def leave(self, rank: int) -> None:
        super().leave(rank)
        self._soon(lambda membership, now: None)

    def _send(self, rank: int, message: Message) -> None:
        self._world.carry(self.rank, rank, message)

    def hear(self, sender: int, message: Message) -> None:
        """Hears news of the agreement."""
        self._soon(lambda membership, now: self._hear(sender, message, now))


class SurvivableFaults(Faults):
    """All that goes wrong in a run that goes on after a loss.

    Args:
        baton: the run's baton
        detect_s: how long after a rank's end the others know of it
        heartbeat_timeout_s: how long after a rank's last sign of life the others give it up
        num_first: how many ranks there are at the start; the others come later
        latency_s: the latency of an agreement's messages
        min_ranks: how many ranks a view must have; None: more than half of the last view's
        groups: ranks none of which can go on without the others of their group
        chance: draws when each rank notices something; None: all at once

    Attributes:
        still_until: until when processes stand still, or have stood
        ambush: a kind of message, and after how many more of them whoever sends one is killed
    """

    def __init__(
        self,
        baton: Baton,
        detect_s: float,
        heartbeat_timeout_s: float,
        num_first: int,
        latency_s: float,
        min_ranks: int | None,
        groups: Sequence[Sequence[int]],
        chance: random.Random | None,
    ) -> None:
        super().__init__(baton, detect_s, heartbeat_timeout_s)
        self.min_ranks, self.groups = min_ranks, groups
        self._chance = chance
        self.still_until: dict[int, float] = {}
        self.ambush = "", 0
        self._ambushed: set[int] = set()
        self._cuts: list[tuple[float, frozenset[int]]] = []
        self._last_news_s: dict[tuple[int, int], float] = {}
        self._latency_s = latency_s
        self._patience_s = heartbeat_timeout_s / 2  # as between processes
        self.gone: set[int] = set()
        """The ranks of which nothing is there any more."""
        self.reasons: dict[int, str] = {}
        self._views: dict[int, SimulatedViews] = {}
        for rank in range(num_first):
            membership = Membership(
                rank, range(num_first), self._patience_s, min_ranks, holds_joins=True, groups=groups
            )
            self._views[rank] = SimulatedViews(self, membership)

    def views_of(self, rank: int) -> Views:
        return self._views[rank]

    def join(self, rank: int, within_s: float) -> None:
        contacts = [r for r in self._views if r not in self.gone and not self.is_cut(rank, r)]
        if not contacts:
            raise TransportError(
                "a newcomer must reach a rank that trains, but none is left; start the job anew"
            )
        membership = Membership(
            rank, (), self._patience_s, self.min_ranks, holds_joins=True, groups=self.groups
        )
        self._views[rank] = SimulatedViews(self, membership)
        self._views[rank].ask(contacts, within_s)

    def doubt(self, rank: int, other: int) -> None:
        """Makes one rank alone take another for lost, which lives."""
        self.reasons.setdefault(other, f"has not answered rank {rank}")
        self._suspect(rank, other, died=False)

    def kill(self, rank: int) -> None:
        super().kill(rank)
        self.gone.add(rank)

    def stop(self, rank: int, seconds: float) -> None:
        """Has a process stand still; the others give it up if it does so for too long."""
        self.delay(rank, seconds)
        self.still_until[rank] = self.baton.threads[rank][0].held_until
        if seconds >= self.heartbeat_timeout_s:
            self._silence(rank, [other for other in self._views if other != rank])

    def cut(self, side: Collection[int], seconds: float) -> None:
        """Lets nothing pass between some ranks and the others, which give each other up."""
        if seconds < self.heartbeat_timeout_s:
            raise ValueError(
                f"a link must be cut for at least {self.heartbeat_timeout_s:g} s, as shorter cuts "
                f"lose nothing, got {seconds:g} s"
            )
        there = [rank for rank in self._views if rank in side]
        others = [rank for rank in self._views if rank not in side]
        self._cuts.append((self.baton.time + seconds, frozenset(side)))
        for rank in there:
            self._silence(rank, others)
        for rank in others:
            self._silence(rank, there)

    def _silence(self, rank: int, others: Sequence[int]) -> None:
        """Has ranks give up one that they do not hear of any more."""
        for other in others:
            self._notice(other, rank, died=False, after_s=self.heartbeat_timeout_s)

    def end(self, rank: int, failure: BaseException | None) -> None:
        self.gone.add(rank)
        now = self.baton.running.clock
        if failure is None:
            self.baton.plan(now + self.detect_s, partial(self._leave, rank))
        elif rank not in self.killed_at:
            # A connection's end comes behind all that was sent on it.
            at_s = now + max(self.detect_s, self._latency_s)
            self.lose(rank, failed(failure), at_s, failure)

    # ---- what is known ----

    def has_lost(self, rank: int) -> bool:
        return self._failure_of(rank) is not None

    def check(self, rank: int, waited_for: str) -> None:
        lost = self._failure_of(rank)
        if lost is not None:
            raise PeerLost(lost.rank, lost.reason, waited_for)

    def _failure_of(self, rank: int) -> PeerLost | None:
        return self._views[rank].failure if rank in self._views else None

    def is_cut(self, rank: int, other: int) -> bool:
        return super().is_cut(rank, other) or any(
            self.baton.time < until_s and (rank in side) != (other in side)
            for until_s, side in self._cuts
        )

    # ---- by the baton, at its time ----

    def end_waits(self, rank: int, lost: PeerLost) -> None:
        """Ends the waits of one rank, as the members change."""
        if lost.rank != rank:
            self.tell(rank, lost)
        self.rouse(self.baton.threads[rank])

    def carry(self, src: int, dst: int, message: Message) -> None:
        """Carries news of the agreement from one rank to another."""
        now = self.baton.time
        kind, left = self.ambush
        if message.kind == kind and left:
            self.ambush = kind, left - 1
        elif message.kind == kind:
            self.ambush = "", 0
            self._ambushed.add(src)
            self.baton.plan(now, partial(self.kill, src))
        if src not in self._ambushed and not self.takes_away(src, dst, now):
            there_s = now + self._latency_s
            if self._chance is not None:
                there_s = now + self._chance.expovariate(1.0) * self._latency_s
                there_s = max(there_s, self._last_news_s.get((src, dst), 0.0))
                self._last_news_s[src, dst] = there_s
            self.baton.plan(there_s, partial(self._deliver, src, dst, message))

    def _notice(self, rank: int, lost: int, *, died: bool, after_s: float = 0.0) -> None:
        """Has a rank suspect another, after a while that `chance` makes longer."""
        if self._chance is None and not after_s:
            self._suspect(rank, lost, died=died)
            return
        at_s = self.baton.time + after_s
        if self._chance is not None:  # behind what the lost rank has sent
            at_s += self._chance.uniform(0.0, self.heartbeat_timeout_s / 20)
            at_s = max(at_s, self._last_news_s.get((lost, rank), 0.0))
        self.baton.plan(at_s, partial(self._suspect, rank, lost, died=died))

    def _deliver(self, src: int, dst: int, message: Message) -> None:
        if dst in self._views and not self.is_cut(src, dst):
            self._views[dst].hear(src, message)

    def _leave(self, rank: int) -> None:
        """Has the others note that a rank has returned, and takes part in no agreement any more."""
        for other, views in list(self._views.items()):
            if other != rank and not self.is_cut(rank, other):
                views.leave(rank)

    def _lose(self, loss: Loss) -> None:
        """Has all others suspect a rank, and the rank suspect them if it may live."""
        rank = loss.rank
        self.reasons.setdefault(rank, loss.reason)
        for other in list(self._views):
            if other != rank and not (loss.died and self.is_cut(rank, other)):
                self._notice(other, rank, died=loss.died)
                if not loss.died:
                    self._notice(rank, other, died=False)

    def _suspect(self, rank: int, lost: int, *, died: bool) -> None:
        if rank in self._views:
            reason = self.reasons.get(lost, "does not answer")
            self._views[rank].lose(lost, reason, died=died)
