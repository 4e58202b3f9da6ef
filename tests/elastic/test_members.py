"""What all members do together around a loss, on ranks of a simulated world."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd import FabricStrategy
from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic import changes, handover
from lightning_dsgd.elastic.entrance import Entrance
from lightning_dsgd.elastic.face import LoopFace
from lightning_dsgd.elastic.members import Members
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.trainer import TrainerFace
from lightning_dsgd.fabric.collectives import FabricSession
from lightning_dsgd.lab.callbacks import gathered
from lightning_dsgd.session.ending import NOTICE_WITHIN_S
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.session.phases import FOLLOWING, Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.simulated import Killed
from lightning_dsgd.trainer.children import Processes
from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.trainer.sessions import TrainerSession
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.view import View

CHOSEN = choose("a test", Options, {"timeout_s": 10.0, "heartbeat_timeout_s": 10.0})


class NoReplica(changes.Changes):
    """Begins nothing anew but the session."""

    def enter(self, view: View, *loss: Any) -> None:
        everyones(view.sub("begin"), "")
        self._session.take(view)
        self._session.world_size, self.members = view.world_size, view.members


class Untrained(Members):
    """Train nothing; count the results that they have taken over from others."""

    num_taken_over = 0

    def belong_to(self, session: Any) -> None:
        super().belong_to(session)
        self._changes = NoReplica(session, self._face, self._entrance)

    def together(self, call: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        made_in = -1

        def note() -> Any:
            nonlocal made_in
            made_in = self.calls.view.number
            return call()

        result = super().together(note, *args, **kwargs)
        self.num_taken_over += made_in != self.calls.view.number
        return result


class JoinedLoop(LoopFace):
    """A loop that others may join."""

    can_be_joined = True


def entered(net: Any, session: Session[Any]) -> Any:
    """The ranks of a session that has a network now."""
    session._last_resort = SimpleNamespace(await_notice=lambda lost: None)  # type: ignore[assignment]
    session.rank, session.world_size = net.rank, net.world_size
    session.open(net)
    return session.ranks


def members(net: Any, opening: Opening | None = None) -> Untrained:
    """The ranks of a session that no face leads."""
    made = Untrained(opening or Opening(CHOSEN, print), JoinedLoop, None)
    return entered(net, Session(made))


# ---- where the members are written down ----
def train_with(net: Any, opening: Opening) -> None:
    ranks = members(net, opening)
    ranks.begin()
    ranks.calls.leave()


def test_a_launcher_learns_of_a_training_whose_process_group_the_script_has_made(monkeypatch):
    keeper = Register("127.0.0.1", 0, 10.0, serves=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(keeper.port))
    SurvivingWorld(2).run(train_with, Opening(CHOSEN, print))
    assert keeper.survives()
    assert not keeper.can_be_joined()  # it would wait in that process group


# ---- who takes the others' state ----
def introduced(net: Any) -> dict[int, str]:
    session: Any = SimpleNamespace(takes_part=net.rank < 2, training=SimpleNamespace(claiming=None))
    face = TrainerFace(session)
    if net.rank == 2:
        face.hand_over(View(net, range(4), 1), {2: 0}, {})
    return face.introduce(View(net, range(4), 2), [])


def test_a_newcomer_that_has_a_state_takes_it_anew_with_one_that_has_none(monkeypatch):
    shares = {"num_unread": 0, "divided_for": 1, "num_shares": None, "num_replicas_at_first": None}
    session = {"versions": [], "shares": shares, "counted": {}}
    monkeypatch.setattr(handover, "take", lambda net, giver: {"session": session})
    monkeypatch.setenv("RANK", "5")
    assert SurvivingWorld(4).run(introduced) == [{2: "5", 3: "5"}] * 4


# ---- from when on a rank may be lost ----
def lose_one_that_survives(net: Any, lost: int) -> tuple[int, ...]:
    ranks = members(net)
    net.compute(float(net.rank == lost))  # the last to come needs to wait least
    ranks.begin()
    if net.rank == lost:
        net.fail("failed: at once")
        return ()
    ranks.session.barrier()
    ranks.calls.leave()
    return ranks.members


@pytest.mark.parametrize("lost", range(4))
def test_a_rank_may_be_lost_once_it_has_begun_to_survive(lost):
    world = SurvivingWorld(4, latency_s=0.05, detect_s=0.0, strict=False)
    left = tuple(rank for rank in range(4) if rank != lost)
    outcomes = world.outcomes(lose_one_that_survives, lost)
    assert [outcomes[rank] for rank in left] == [left] * 3


# ---- results that are taken over from a view with more members ----
def fabrics(net: Any) -> FabricStrategy:
    strategy = FabricStrategy("local_sgd", on_loss="continue")
    strategy.session = FabricSession(Processes(), Untrained(strategy._opening, LoopFace, None))
    entered(net, strategy.session)
    strategy._loop = SimpleNamespace(meet_all=lambda what: None, num_steps=0)  # type: ignore[assignment]
    return strategy


def trainers(net: Any) -> Any:
    strategy = strategy_of("local_sgd", on_loss="continue")
    strategy.session = TrainerSession(Processes(), Untrained(strategy._opening, TrainerFace, None))
    entered(net, strategy.session)
    return strategy


FACES = pytest.mark.parametrize("face", [fabrics, trainers])


def call_again_and_again(net: Any, face: Callable[[Any], Any]) -> tuple[list[Any], int]:
    """A decision, the figures of all, and what rank 2 says, in each of 25 rounds."""
    strategy = face(net)
    ranks, given = strategy.session.ranks, []
    while len(given) < 25:
        net.compute(0.01 * (1 + net.rank))
        decided = strategy.reduce_boolean_decision(True)
        figures = gathered(ranks.session, {"rank": net.rank})
        given.append((decided, figures, ranks.collectives.broadcast([net.rank], 2, lambda: None)))
    ranks.calls.leave()
    return given, ranks.num_taken_over


@FACES
def test_all_are_given_the_same_around_a_loss(face):
    """At many moments.  A broadcast of a lost rank's gives the value of the first that is left."""
    num_taken_over, tellers = 0, set()
    for seed in range(20):
        chance = random.Random(seed)
        world = SurvivingWorld(4, latency_s=0.05, detect_s=0.0, strict=False)
        lost = chance.randrange(4)
        world.kill(lost, 0.2 + chance.random() * 0.4)
        outcomes = world.outcomes(call_again_and_again, face)
        assert isinstance(outcomes.pop(lost), Killed)
        for outcome in outcomes:
            assert isinstance(outcome, tuple), outcome
        num_taken_over += sum(taken_over for _, taken_over in outcomes)
        first, *others = (given for given, _ in outcomes)
        assert all(given == first for given in others)
        for decided, all_figures, _ in first:
            assert decided is True
            assert all(each in ({}, {"rank": rank}) for rank, each in enumerate(all_figures))
            assert all_figures.count({}) <= 1
        told = [rank for *_, (rank,) in first]
        assert told == sorted(told, reverse=True)
        tellers |= {*told}
        assert lost == 2 or set(told) == {2}
    assert tellers == {2, 0}
    assert num_taken_over > 5


# ---- a signal meanwhile ----
class Interrupted(AgreedBatch):
    """Two signals come while it goes on in another view."""

    def in_view(self, net: Any, *, has_stopped: bool) -> AgreedBatch:
        made = super().in_view(net, has_stopped=has_stopped)
        self.leaves, self.requested = True, signal.SIGINT  # as a handler does
        return made


def test_a_signal_that_comes_while_the_view_changes_is_not_lost():
    def change(net: Any) -> tuple[bool, int]:
        session = Session[Any]()
        agreed: AgreedBatch = Interrupted(net.sub("stop"))
        replica = SimpleNamespace(description=str, change_view=lambda net: None)
        session.training = SimpleNamespace(
            agreed=agreed, replica=replica, claiming=None, balancing=None
        )
        entrance = Entrance(Opening(CHOSEN, print))
        changing = changes.Changes(session, LoopFace(session), entrance)
        changing.enter(View(net, (0,), 1), None, 0.0)
        agreed = session.training.agreed
        agreed.finish()
        agreed.close()
        return agreed.leaves, agreed.signum

    assert SurvivingWorld(1).run(change) == [(True, signal.SIGINT)]


# ---- after this rank has left ----
def test_fabric_ends_a_rank_that_has_left_where_it_calls_something():
    strategy = FabricStrategy("local_sgd", on_loss="continue")
    strategy.session.rank, strategy.session._phase = 1, Phase.LEFT
    for call in (
        lambda: strategy.barrier(),
        lambda: strategy.broadcast(1),
        lambda: strategy.all_reduce(torch.ones(1)),
        lambda: strategy.save_checkpoint("/dev/null/nowhere", {}),
        lambda: strategy.consensus().__enter__(),
        lambda: strategy.finish(),
    ):
        with pytest.raises(SystemExit, match="rank 1 received SIGTERM and has left"):
            call()


# ---- the last resort ----
class Timers:
    """In the place of timers: what they do, and whether they still would."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, seconds: float, action: Callable[..., None], args: Any) -> Any:
        timer = SimpleNamespace(seconds=seconds, action=partial(action, *args), is_due=False)
        timer.start = lambda: setattr(timer, "is_due", True)
        timer.cancel = lambda: setattr(timer, "is_due", False)
        self.made.append(timer)
        return timer

    def pass_by(self) -> None:
        for timer in self.made:
            if timer.is_due:
                timer.action()


@pytest.fixture
def timers(monkeypatch) -> Timers:
    made = Timers()

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("lightning_dsgd.session.ending.threading.Timer", made)
    monkeypatch.setattr("lightning_dsgd.session.ending.os._exit", end)
    return made


def hanging() -> Session[Any]:
    """A session whose training thread does nothing, as one that hangs in a library."""
    session = Session[Any](Untrained(Opening(CHOSEN, print), LoopFace, None))
    session._net = SimpleNamespace(ends_with_peers=False)  # type: ignore[assignment]
    session.training, session._phase = SimpleNamespace(stop_lanes=lambda: ()), Phase.TRAINING
    return session


@pytest.mark.parametrize("is_before", [False, True])
def test_a_rank_that_has_left_is_not_ended_for_a_loss(timers, is_before):
    session, lost = hanging(), PeerLost(1, "died")
    if is_before:
        session._last_resort.await_notice(lost)
    session._net.close = lambda: session._last_resort.await_notice(lost)  # type: ignore[union-attr]
    session.depart()
    timers.pass_by()


def test_a_rank_is_ended_for_a_loss_that_training_does_not_notice_also_in_another_view(timers):
    session = hanging()
    session._last_resort.await_notice(PeerLost(1, "died"))
    session._net = SimpleNamespace(ends_with_peers=False)  # type: ignore[assignment]
    with pytest.raises(SystemExit, match="1"):
        timers.pass_by()
    assert [timer.seconds for timer in timers.made] == [NOTICE_WITHIN_S]
    session.enter(Phase.BROKEN)
    timers.pass_by()


# ---- where a session stands ----
@pytest.mark.parametrize("before", Phase)
def test_a_change_that_is_not_in_the_table_raises_and_names_both_phases(before):
    for after in Phase:
        session = Session[Any]()
        session._phase = before
        if after is before or not FOLLOWING[before]:
            session.enter(after)
            assert session.phase is before
        elif after in FOLLOWING[before]:
            session.enter(after)
            assert session.phase is after
        else:
            with pytest.raises(AssertionError, match=f"that is {before.name} .* got {after.name}"):
                session.enter(after)


# ---- what is refused ----
@FACES
def test_gradients_through_what_is_gathered_are_refused(face):
    def gather(net: Any) -> None:
        with pytest.raises(ValueError, match=r"got all_gather\(\.\.\., sync_grads=True\); leave"):
            face(net).all_gather(torch.ones(1), sync_grads=True)

    SurvivingWorld(2).run(gather)
