"""What all members do together around a loss, on ranks of a simulated world."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd import STRATEGIES, FabricStrategy
from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.in_fabric import ChangingFabricSession
from lightning_dsgd.elastic.joining import ChangingTrainerSession
from lightning_dsgd.elastic.members import SurvivingSession
from lightning_dsgd.session.meeting import Meeting
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.session.session import Phase
from lightning_dsgd.trainer.processes import Processes
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.register import Register
from lightning_dsgd.transport.simulated import Killed, SimulatedWorld
from lightning_dsgd.transport.view import View

CHOSEN = choose("a test", Options, {"timeout_s": 10.0, "heartbeat_timeout_s": 10.0})


class Untrained(SurvivingSession[Any]):
    """Trains nothing; counts the results that it has taken over from others."""

    num_taken_over = 0

    def enter(self, net: Any) -> None:
        self.rank, self.world_size = net.rank, net.world_size
        self.open(net)

    def _enter_view(self, view: View) -> None:
        everyones(view.sub("begin"), "")
        self._net, self._meetings = view, view.sub("meetings")
        self.world_size, self._members = view.world_size, view.members

    def _meet_others(self) -> None:
        pass

    def _await_notice(self, lost: PeerLost) -> None:
        pass

    def together(self, call: Callable[[], Any], adopt: Callable[[], None] | None = None) -> Any:
        made_in = -1

        def note() -> Any:
            nonlocal made_in
            made_in = self.calls.view.number
            return call()

        result = super().together(note, adopt)
        self.num_taken_over += made_in != self.calls.view.number
        return result


class Members(Untrained):
    can_be_joined = True

    def __init__(self, net: Any, meeting: Meeting | None = None) -> None:
        super().__init__(meeting or Meeting(CHOSEN, print), None)
        self.enter(net)


# ---- where the members are written down ----


def train_with(net: Any, meeting: Meeting) -> None:
    session = Members(net, meeting)
    session.training = SimpleNamespace()
    session.begin_to_survive()
    session.calls.leave()


def test_a_launcher_learns_of_a_training_whose_process_group_the_script_has_made(monkeypatch):
    keeper = Register("127.0.0.1", 0, 10.0, serves=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(keeper.port))
    SimulatedWorld(2, goes_on=True).run(train_with, Meeting(CHOSEN, print))
    assert keeper.survives()
    assert not keeper.can_be_joined()  # it would wait in that process group


# ---- from when on a rank may be lost ----


def lose_one_that_survives(net: Any, lost: int) -> tuple[int, ...]:
    session = Members(net)
    session.training = SimpleNamespace()
    net.compute(float(net.rank == lost))  # the last to come needs to wait least
    session.begin_to_survive()
    if net.rank == lost:
        net.fail("failed: at once")
        return ()
    session.training = None
    session.barrier()
    session.calls.leave()
    return session.members


@pytest.mark.parametrize("lost", range(4))
def test_a_rank_may_be_lost_once_it_has_begun_to_survive(lost):
    world = SimulatedWorld(4, latency_s=0.05, detect_s=0.0, goes_on=True, strict=False)
    left = tuple(rank for rank in range(4) if rank != lost)
    outcomes = world.outcomes(lose_one_that_survives, lost)
    assert [outcomes[rank] for rank in left] == [left] * 3


# ---- results that are taken over from a view with more members ----


def call_again_and_again(net: Any, make: Callable[[Any], Any]) -> tuple[list[Any], int]:
    session, call = make(net)
    given = []
    while len(given) < 25:
        net.compute(0.01 * (1 + net.rank))
        given.append(call())
    session.calls.leave()
    return given, session.num_taken_over


def of_all_that_are_left(make: Callable[[Any], Any], num_kills: int = 20) -> Iterator[list[Any]]:
    """For each of the calls, and each of many moments of a loss, what the ranks left were given."""
    num_taken_over = 0
    for seed in range(num_kills):
        chance = random.Random(seed)
        world = SimulatedWorld(4, latency_s=0.05, detect_s=0.0, goes_on=True, strict=False)
        lost = chance.randrange(4)
        world.kill(lost, 0.2 + chance.random() * 0.1)
        outcomes = world.outcomes(call_again_and_again, make)
        assert isinstance(outcomes.pop(lost), Killed)
        for outcome in outcomes:
            assert isinstance(outcome, tuple), outcome
        num_taken_over += sum(taken_over for _, taken_over in outcomes)
        yield from map(list, zip(*(given for given, _ in outcomes), strict=True))
    assert num_taken_over > 5


class UntrainedFabric(Untrained, ChangingFabricSession):
    """Of Fabric."""


class UntrainedTrainer(Untrained, ChangingTrainerSession):
    """Of the Trainer."""


def fabrics(net: Any) -> FabricStrategy:
    strategy = FabricStrategy("local_sgd", on_loss="continue")
    strategy.session = session = UntrainedFabric(strategy._meeting, None, Processes())
    session.enter(net)
    strategy._loop = SimpleNamespace(together=lambda what: None, num_steps=0)  # type: ignore[assignment]
    return strategy


def trainers(net: Any) -> Any:
    strategy = STRATEGIES["local_sgd"](on_loss="continue")
    strategy.session = UntrainedTrainer(Processes(), strategy._meeting, None, None)
    strategy.session.enter(net)
    return strategy


FACES = pytest.mark.parametrize("face", [fabrics, trainers])


@FACES
def test_all_decide_the_same_around_a_loss(face):
    def decisions(net: Any) -> tuple[Untrained, Callable[[], bool]]:
        strategy = face(net)
        return strategy.session, lambda: strategy.reduce_boolean_decision(True)

    assert all(decided == [True] * 3 for decided in of_all_that_are_left(decisions))


def figures_of_all(net: Any) -> tuple[Members, Callable[[], Any]]:
    session = Members(net)
    return session, lambda: session.gather_figures({"rank": net.rank})


def test_figures_of_all_are_the_same_on_all_around_a_loss():
    for given in of_all_that_are_left(figures_of_all):
        assert given == [given[0]] * 3
        assert all(figures in ({}, {"rank": rank}) for rank, figures in enumerate(given[0]))
        assert given[0].count({}) <= 1


def what_rank_2_says(net: Any) -> tuple[Members, Callable[[], Any]]:
    session = Members(net)
    return session, lambda: session.broadcast([net.rank], 2)


def test_a_broadcast_gives_the_value_of_its_rank_or_if_lost_of_the_first_around_a_loss():
    given = [*of_all_that_are_left(what_rank_2_says)]
    assert all(each == [each[0]] * 3 for each in given)
    assert {each[0][0] for each in given} == {2, 0}
    # Those whose rank 2 is not lost: all of its 25 values; nobody else's.
    worlds = [given[i : i + 25] for i in range(0, len(given), 25)]
    for world in worlds:
        values = [each[0][0] for each in world]
        assert values == sorted(values, reverse=True)
        assert set(values) in ({2}, {2, 0})


# ---- after this rank has left ----


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy: strategy.barrier(),
        lambda strategy: strategy.broadcast(1),
        lambda strategy: strategy.all_gather(torch.ones(1)),
        lambda strategy: strategy.all_reduce(torch.ones(1)),
        lambda strategy: strategy.all_reduce("no tensor"),
        lambda strategy: strategy.reduce_boolean_decision(True),
        lambda strategy: strategy.save_checkpoint("/dev/null/nowhere", {}),
        lambda strategy: strategy.consensus().__enter__(),
        lambda strategy: strategy.finish(),
    ],
)
def test_fabric_ends_a_rank_that_has_left_where_it_calls_something(call):
    strategy = FabricStrategy("local_sgd", on_loss="continue")
    strategy.session._farewell = "rank 1 received SIGTERM and has left"
    with pytest.raises(SystemExit, match="rank 1 received SIGTERM and has left"):
        call(strategy)


# ---- the last resort ----


class Hanging(Untrained):
    """Ends its process where its training does not notice a loss."""

    _await_notice = SurvivingSession._await_notice


class Timers:
    """In the place of timers: what they do, and whether they still would."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, seconds: float, action: Callable[[], None]) -> Any:
        timer = SimpleNamespace(action=action, is_due=False)
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

    monkeypatch.setattr("lightning_dsgd.session.session.threading.Timer", made)
    monkeypatch.setattr("lightning_dsgd.session.session.os._exit", end)
    return made


def hanging() -> Hanging:
    session = Hanging(Meeting(CHOSEN, print), None)
    session._net = SimpleNamespace(ends_with_peers=False)
    session.training = SimpleNamespace(stop_lanes=lambda: ())
    return session


@pytest.mark.parametrize("is_before", [False, True])
def test_a_rank_that_has_left_is_not_ended_for_a_loss(timers, is_before):
    session, lost = hanging(), PeerLost(1, "died")
    if is_before:
        session._await_notice(lost)
    session._leave_alone(SimpleNamespace(close=lambda: session._await_notice(lost)))
    timers.pass_by()


def test_a_rank_is_ended_for_a_loss_that_training_does_not_notice_also_in_another_view(timers):
    session = hanging()
    session._await_notice(PeerLost(1, "died"))
    session._net = SimpleNamespace(ends_with_peers=False)
    with pytest.raises(SystemExit, match="1"):
        timers.pass_by()
    session.phase = Phase.BROKEN
    timers.pass_by()


# ---- before a batch ----


def begin_batch_after_break(net: Any) -> list[Phase]:
    session, phases = Members(net), list[Phase]()
    agreed = SimpleNamespace(may_begin_batch=lambda: True)
    session.training, session.survives = SimpleNamespace(agreed=agreed), True
    session.phase = Phase.IN_BATCH
    session._meet_others = lambda: phases.append(session.phase)  # type: ignore[method-assign]
    session.begin_batch()
    return [*phases, session.phase]


def test_ranks_can_meet_before_a_batch_whose_last_one_was_left_by_break():
    both = SimulatedWorld(2, goes_on=True).run(begin_batch_after_break)
    assert both == [[Phase.TRAINING, Phase.IN_BATCH]] * 2


# ---- what is refused ----


@FACES
def test_gradients_through_what_is_gathered_are_refused(face):
    def gather(net: Any) -> None:
        with pytest.raises(ValueError, match=r"got all_gather\(\.\.\., sync_grads=True\); leave"):
            face(net).all_gather(torch.ones(1), sync_grads=True)

    SimulatedWorld(2, goes_on=True).run(gather)
