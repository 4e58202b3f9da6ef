"""A storm in virtual time: the package's own code trains, in a simulated world that goes on.

Each process has what a session has: `Calls`, a replica that begins anew, claimed batches; and the
agreement on views under them.  What a launcher does is here: another process comes to a place whose
process has ended.  One thing is simpler than in a session: that all meet before a batch, so that
newcomers come in and ranks leave, is known to all at once, in place of being agreed on.

A model of few weights stands for a large one.  One step takes about a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.data.claims.claims import NONE, Claims, Epoch
from lightning_dsgd.data.claims.dealing import ClaimDealing
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivableFaults, SurvivingWorld
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.elastic.views import views_of
from lightning_dsgd.simulated import Killed
from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.view import View
from tests.elastic.chaos.record import (
    ALIVE,
    FINISHED,
    JOINS,
    LEFT,
    TAKES_PART,
    Process,
    Record,
)
from tests.elastic.chaos.schedule import Event, Terms

STEP_S: Final = 1.0
AWAY_S: Final = 5.0
_LATENCY_S: Final = 0.02
_TIMEOUT_S: Final = 300.0
_JOIN_WITHIN_S: Final = 120.0
_PORTIONS_PER_RANK: Final = 6
_BATCH, _EPOCH_END = 0, 1


@dataclass
class Job:
    """What all processes of a run know.

    Attributes:
        record: what becomes of them
        holders: the process that has each place, or -1
        meeting: the view whose members meet, and before which of its batches each is yet to come
        num_begun: how many batches each process has begun
        leaving: the processes that were told to leave
    """

    strategy: str
    seed: int
    end_s: float
    record: Record
    holders: list[int]
    meeting: tuple[int, dict[int, int]] = (-1, {})
    num_begun: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)


class Weights(nn.Module):
    """A model of few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1.0, 1.0, 64))


class _WatchedCalls(Calls):
    """Calls that note when this rank is between views."""

    def __init__(self, *args: Any, note: Callable[[str, int], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._note = note

    def change_view(self, lost: PeerLost) -> bool:
        if self.view.number or self._num_done >= 0:  # no newcomer
            self._note(ALIVE, self.view.number)
        has_taken_over = super().change_view(lost)
        self._note(TAKES_PART, self.view.number)
        return has_taken_over


class Member:
    """One process of the job: what a session does for it, in brief.

    Args:
        net: of all ranks
        job: that all share
        process: what becomes of it
    """

    def __init__(self, net: Any, job: Job, process: Process) -> None:
        self.net, self.job, self.process = net, job, process
        self.chance = random.Random(f"{job.seed}/{net.rank}")
        self.module = Weights()
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.05)
        self.is_new = net.is_newcomer
        self.epoch = 0
        self.calls = _WatchedCalls(net, self.enter, is_newcomer=self.is_new, note=self.note)
        self.replica = SurvivingReplica(
            self.calls.view.sub("replica"),
            self.module,
            [self.optimizer],
            make_algorithm(job.strategy),
            Conditions(claims_batches=True),
            is_newcomer=self.is_new,
        )
        self.dealing: ClaimDealing | None = None

    def note(self, state: str, number: int) -> None:
        """Notes that another state begins."""
        self.process.enter(self.net.now(), state, number)

    def run(self) -> None:
        """Trains until the end, or until this rank leaves."""
        if self.is_new:
            self.note(JOINS, 0)
            self.net.join(within_s=_JOIN_WITHIN_S)
            self.calls.join()
        else:
            self.dealing = ClaimDealing(self.calls.view.sub("claims"))
            self.note_view(self.calls.view)
            self.note(TAKES_PART, 0)
        try:
            while self.train_epoch():
                self.epoch += 1
        except _Leaves:
            self.close()
            self.process.how = LEFT
            return
        self.calls.together(self.replica.finish, self.replica.finish_as_shared)
        self.calls.leave()
        self.close()
        self.job.record.ends[self.net.rank] = self.digest()
        self.job.record.num_epochs = max(self.job.record.num_epochs, self.epoch + 1)
        self.process.how = FINISHED

    def close(self) -> None:
        """Ends the threads beside the training, which may have met a loss since."""
        self.replica.stop_lanes()
        with contextlib.suppress(TransportError):
            self.claims.close()

    @property
    def claims(self) -> ClaimDealing:
        """This rank's end of the claims."""
        assert self.dealing is not None, "a rank that trains claims"
        return self.dealing

    def digest(self) -> str:
        """Returns a text that is equal for weights that are equal to the bit."""
        return hashlib.sha256(str(self.module.x.tolist()).encode()).hexdigest()[:12]

    # ---- training ----

    def train_epoch(self) -> bool:
        """Trains in one epoch until nothing is left of it; returns whether another follows."""
        epoch = Epoch(self.epoch, self.job.record.num_portions, 0)
        self.do(lambda: self.claims.begin_epoch(epoch))
        while True:
            position = self.claims.num_begun
            while self.do(partial(self.secure, position)):
                if self.do(partial(self.begin, position)):
                    self.before_batch()
                    self.train(position)
                position += 1
            self.calls.together(lambda: self.meet(_EPOCH_END))
            left, is_over = self.calls.together(self.count_left)
            if not left:
                return not is_over

    def secure(self, position: int) -> bool:
        """Claims a portion in whatever view this rank is; returns whether there is one."""
        return self.claims.secure(position, is_urgent=True)

    def begin(self, position: int) -> bool:
        """Begins a portion in whatever view this rank is, unless it was given back."""
        return self.claims.begin(position)

    def do(self, call: Callable[[], Any]) -> Any:
        """Returns what a step of this rank returns, made again where the view changes."""
        made: list[Any] = []
        self.calls.step(lambda: made.append(call()), again=True)
        return made[-1]

    def train(self, position: int) -> None:
        """Makes a step on a portion."""
        portion = self.claims.portion(position)
        if portion == NONE:  # it went back to the others while this rank met them
            return
        self.net.compute(STEP_S * self.chance.uniform(0.8, 1.2))
        goal = torch.sin(torch.arange(64.0) * (1 + portion))
        self.module.x.grad = self.module.x.detach() - goal
        self.calls.step(lambda: self.replica.before_update(self.optimizer), again=True)
        self.optimizer.step()
        self.calls.step(lambda: self.replica.after_update(self.optimizer), again=False)
        self.process.trained.append((self.epoch, portion))
        self.claims.end()

    def count_left(self) -> list[int]:
        """Returns how many portions nobody has, and whether the time is up, the same on all."""
        mine = torch.tensor([self.claims.num_free(), int(self.net.now() > self.job.end_s)])
        left, is_over = self.calls.view.sub("left").all_reduce(mine).wait().tolist()
        return [left, is_over]

    # ---- where all meet ----

    def before_batch(self) -> None:
        """Lets others come and leave, if all are to meet before this batch."""
        job, view, rank = self.job, self.calls.view, self.net.rank
        job.num_begun[rank] = job.num_begun.get(rank, 0) + 1
        wants = rank in job.leaving or (view.rank == 0 and bool(self.newcomers()))
        number, before = job.meeting
        if number != view.number:
            before = {}
        if wants and rank not in before:
            before = {member: 1 + job.num_begun.get(member, 0) for member in view.members}
            job.meeting = view.number, before
        if job.num_begun[rank] < before.get(rank, math.inf):
            return
        del before[rank]  # so that it may ask again, where nothing comes of this meeting
        found = self.calls.once(self.find_changes)
        if found is not None:
            newcomers, leavers = found
            if leavers:
                self.dismiss(leavers)
            elif newcomers:
                self.calls.admit(newcomers)

    def meet(self, what: int) -> bool:
        """Serves ranks that still train until all are here; returns whether all came for this.

        As `Session.meet` does: who is at the end of the epoch waits on while others are not.
        """
        while True:
            self.replica.settle()
            votes, asked = torch.zeros(2, dtype=torch.int64), self.job.meeting[1]
            votes[what] = 1
            self.calls.view.sub("meetings").all_reduce(votes).wait()
            if votes[_BATCH] and what != _BATCH:  # who has missed them is asked anew
                asked.pop(self.net.rank, None)
            is_of_all = int(votes[what]) == self.calls.view.world_size
            if is_of_all or what == _BATCH:
                return is_of_all

    def newcomers(self) -> list[int]:
        """Returns the ranks that wait to be let in, as many as there is room for."""
        room = max(0, len(self.job.holders) - self.calls.view.world_size)
        return [*views_of(self.calls.view).newcomers()[:room]]

    def find_changes(self) -> tuple[list[int], list[int]]:
        """Returns who comes and who leaves, the same on all."""
        if not self.meet(_BATCH):
            return [], []
        view, leaves = self.calls.view, self.net.rank in self.job.leaving
        text = json.dumps([self.epoch, self.newcomers(), leaves])
        told = [json.loads(theirs) for theirs in everyones(view.sub("changes"), text)]
        leavers = [view.members[r] for r, each in enumerate(told) if each[2]]
        if leavers and 2 * (view.world_size - len(leavers)) > view.world_size:
            self.replica.average()
            self.claims.share(view.sub("trained"))
            return [], leavers
        is_at_one_place = all(each[0] == self.epoch for each in told)
        return (told[0][1] if is_at_one_place else []), []

    def dismiss(self, leavers: list[int]) -> None:
        """Goes on without those that leave; a rank that leaves raises."""
        if self.net.rank not in leavers:
            self.calls.dismiss(leavers)
            return
        with contextlib.suppress(PeerLost):
            self.calls.dismiss(leavers)
        raise _Leaves

    # ---- a view ----

    def enter(self, view: View) -> None:
        """Begins anew among the members; newcomers get what the others have."""
        mine = json.dumps([self.is_new, self.epoch])
        told = [json.loads(theirs) for theirs in everyones(view.sub("new"), mine)]
        old = [rank for rank, (is_new, _) in enumerate(told) if not is_new]
        if not old:
            raise TransportError("a rank that has trained must be left, got newcomers only")
        new = {*range(len(told))}.difference(old)
        self.replica.change_view(Circle(view.sub("replica"), new))
        if self.is_new:
            self.epoch, self.is_new = told[old[0]][1], False
        digest = self.digest()
        net = view.sub("claims")
        if self.dealing is None:
            self.dealing = ClaimDealing(net, Claims(net.rank, net.world_size))
        else:
            self.dealing = self.dealing.in_view(net)
        self.note_view(view, digest)

    def note_view(self, view: View, digest: str = "") -> None:
        """Notes that this rank is in a view."""
        entered = self.net.now(), view.number, tuple(view.members), digest or self.digest()
        self.process.views.append(entered)


class _Leaves(Exception):
    """Ends a rank that was told to leave, and has left."""


def _run(net: Any, job: Job) -> None:
    """One process, from its start to its end."""
    process = Process(net.rank, _place(net, job), net.now())
    job.record.processes[net.rank] = process
    if process.place < 0:
        return
    job.holders[process.place] = net.rank
    try:
        Member(net, job, process).run()
    finally:
        job.holders[process.place] = -1
        process.end_s = net.now()


def _place(net: Any, job: Job) -> int:
    """Returns the place that a process has; a newcomer waits until one is free, as a launcher."""
    if not net.is_newcomer:
        return int(net.rank)
    while -1 not in job.holders:
        if net.now() > job.end_s:
            return -1
        net.compute(1.0)
    return job.holders.index(-1)


# ---- what goes wrong ----


def _strike(event: Event, job: Job, faults: SurvivableFaults) -> None:
    """Has an event befall those that are in its places now."""
    there = [job.holders[place] for place in event.places]
    ranks = [rank for rank in there if rank >= 0 and rank in job.record.processes]
    begun = [rank for rank in ranks if rank not in faults.gone]
    job.record.events.append((event, tuple(begun)))
    now, patience_s = faults.baton.time, faults.heartbeat_timeout_s / 2
    if event.kind == "loss" and event.at:
        faults.ambush = event.at, event.after
    for rank in begun:
        if event.kind == "loss":
            _lose(rank, job, faults)
        elif event.kind == "stop":
            faults.stop(rank, event.seconds)
            if faults.still_until[rank] - now > patience_s / 2:
                _mark(rank, job, now)
        elif event.kind == "leave":
            job.leaving.add(rank)
    if event.kind == "cut" and begun:
        faults.cut(begun, event.seconds)
        for rank in begun:
            _mark(rank, job, now)
    elif event.kind == "doubt" and len(begun) == 2:
        faults.doubt(*begun)
        for rank in begun:
            _mark(rank, job, now)


def _mark(rank: int, job: Job, now: float) -> None:
    process = job.record.processes[rank]
    if process.struck_s is None:
        process.struck_s = now


def _lose(rank: int, job: Job, faults: SurvivableFaults) -> None:
    _mark(rank, job, faults.baton.time)
    faults.kill(rank)


def play(seed: int, terms: Terms, events: list[Event], strategy: str) -> Record:
    """Plays a schedule, and returns what became of the job."""
    limit_s = 20 * terms.heartbeat_s / 2
    record = Record(_PORTIONS_PER_RANK * terms.ranks, limit_s + terms.heartbeat_s)
    job = Job(strategy, seed, terms.seconds, record, list(range(terms.ranks)))
    world = SurvivingWorld(
        terms.ranks,
        latency_s=_LATENCY_S,
        detect_s=0.05,
        heartbeat_timeout_s=terms.heartbeat_s,
        timeout_s=_TIMEOUT_S,
        strict=False,
        chance=random.Random(f"{seed}/news"),
    )
    for event in events:
        world.script(event.at_s, partial(_strike, event, job))
        for _ in range(event.num_away):
            world.join(event.at_s + event.seconds + AWAY_S)
    num_all = terms.ranks + sum(event.num_away for event in events)
    last_s = terms.seconds + 2 * _TIMEOUT_S
    for rank in range(num_all):
        world.kill(rank, last_s)
    outcomes = world.outcomes(_run, job)
    for rank, outcome in enumerate(outcomes):
        process = record.processes.get(rank)
        if process is None:
            continue
        if isinstance(outcome, Killed):
            is_stuck = process.end_s >= last_s
            process.is_dead = not is_stuck
            process.how = "still there, and waits" if is_stuck else str(outcome)
            if process.struck_s is None:
                process.struck_s = process.end_s
        elif isinstance(outcome, BaseException):
            process.how = f"{type(outcome).__name__}: {outcome}"
    return record
