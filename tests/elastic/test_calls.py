"""Calls of all ranks in random schedules: ranks are lost, doubted, cut off, and join, or all."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.simulated import Killed
from lightning_dsgd.transport import PeerLost, TransportError, processes
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.view import View
from tests.support.thorough import times
from tests.support.worlds import ProcessWorld

END_S = 12.0
"""From when on the ranks end; all that happens to them begins before."""
WHY_ENDED = (
    "must go on with more than half",
    "taken for lost",
    "could not join",
    "could not agree on view",
    "must reach a rank that trains",
)

Views = dict[int, tuple[int, ...]]


def exchange(view: View, what: list[int]) -> list[list[int]]:
    """What every member says; whoever says it is in the same view."""
    x = torch.tensor([view.number, *what])
    told = [each.tolist() for each in view.all_gather(x).wait()]
    assert [number for number, *_ in told] == [view.number] * view.world_size
    return [rest for _, *rest in told]


def take_part(net: Any, seed: int, views: Views) -> list[list[int]]:
    """Who has taken part in each call, and whom the first one has heard of; to the end."""
    chance = random.Random(f"rank/{seed}/{net.rank}")
    history: list[list[int]] = []

    def begin(view: View) -> None:
        assert views.setdefault(view.number, view.members) == view.members
        told = exchange(view.sub("begin"), [net.rank])
        assert tuple(rank for (rank,) in told) == view.members

    def call() -> list[int]:
        view = calls.view
        newcomers = sum(1 << n for n in view.views.newcomers()) if view.rank == 0 else 0
        told = exchange(view, [net.rank, newcomers, int(net.now() > END_S)])
        return [sum(1 << rank for rank, *_ in told), *told[0][1:]]

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    if net.is_newcomer:
        net.join(within_s=60.0)
        calls.join()
    while not history or not history[-1][2]:
        net.compute(chance.choice([0.01, 0.1, 0.5]))
        history.append(calls.together(call))
        newcomers = history[-1][1]
        if newcomers:
            calls.admit([n for n in range(newcomers.bit_length()) if newcomers >> n & 1])
    calls.leave()
    return history


def make(chance: random.Random, *, may_end: bool) -> tuple[SurvivingWorld, set[int], set[int]]:
    """A world, those that are killed in it, and those that are cut off.

    Unless the others may end, so few are lost that more than half are left whenever it happens.
    """
    num_first = chance.choice([2, 3, 3, 4, 5, 6, 7])
    world = SurvivingWorld(
        num_first,
        latency_s=chance.choice([0.0, 0.001, 0.05]),
        detect_s=chance.choice([0.003, 0.2]),
        heartbeat_timeout_s=2.0,
        min_ranks=chance.choice([None, 1]),
        strict=False,
    )
    at_s, moments = 0.0, []
    for _ in range(chance.randrange(1, 6)):
        at_s += chance.choice([0.0, 0.0, 0.001, 0.1, 1.0, 2.0])
        moments.append(0.05 + at_s)
    for moment in moments:
        for _ in range(chance.choice([0, 1, 1, 2])):
            world.join(moment)
    num_all = num_first + len(world._arrivals)
    num_lost = chance.randrange((num_all if may_end else (num_first - 1) // 2) + 1)
    lost = chance.sample(range(num_all), num_lost)
    dropped = {rank for rank in lost if may_end and chance.random() < 0.3}
    for rank in lost:
        begin_s = 0.0 if rank < num_first else world._arrivals[rank - num_first]
        moment = max(begin_s, chance.choice(moments)) + chance.choice([0.0, 0.002, 0.2, 1.0])
        (world.drop if rank in dropped else world.kill)(rank, moment)
    if may_end and chance.random() < 0.5:
        rank, other = chance.sample(range(num_first), 2)
        world.doubt(rank, other, chance.choice(moments))  # which lives
    return world, set(lost) - dropped, dropped


def run(seed: int, *, may_end: bool) -> Views:
    """One schedule; gives the views that there were."""
    world, killed, dropped = make(random.Random(seed), may_end=may_end)
    views: Views = {0: tuple(range(world.world_size))}
    outcomes = world.outcomes(take_part, seed, views)
    ended = [o for o in outcomes if isinstance(o, list)]
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, list):
            shared = min(len(outcome), len(ended[0]))
            assert outcome[-shared:] == ended[0][-shared:], seed
        elif isinstance(outcome, Killed):
            assert rank in killed, seed
        else:
            assert isinstance(outcome, (PeerLost, TransportError)), (seed, outcome)
            assert any(why in str(outcome) for why in WHY_ENDED), (seed, outcome)
            is_late = rank >= world.world_size and not any(rank in v for v in views.values())
            assert may_end or is_late, (seed, rank, outcome)
    for number in sorted(views)[1:]:
        if number - 1 in views:
            check_step(views[number - 1], views[number], dropped)
    return views


def check_step(before: tuple[int, ...], members: tuple[int, ...], dropped: set[int]) -> None:
    """Nobody has gone on without more than half of the others.

    But for one of two, whose only other has ended, or has left at the end: and is not just silent.
    """
    lost = set(before) - set(members)
    may_be_alone = len(before) == 2 and not lost & dropped
    assert 2 * len(lost) < len(before) or may_be_alone, (before, members)


def test_ranks_come_and_are_lost_and_all_agree() -> None:
    num_grown = 0
    for seed in range(50):
        views = run(seed, may_end=seed % 2 == 1)
        num_grown += any(max(view) >= len(views[0]) for view in views.values())
    assert num_grown > 20


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_ranks_come_and_are_lost_in_thousands_of_schedules() -> None:
    """Ten thousand with TIMES=20."""
    for seed in times(500):
        run(10_000 + seed, may_end=seed % 2 == 1)


def meet_in_steps(net: Any, again: bool) -> list[int]:
    """In which views a step is made of which one rank is lost."""
    calls, made = Calls(net, lambda view: None), list[int]()

    def step() -> None:
        made.append(calls.view.number)
        calls.view.sub("step").barrier().wait()

    if net.rank == 2:
        net.compute(60.0)  # it is killed in the midst of that
    calls.step(step, again=again)
    calls.leave()
    return made


def test_a_step_is_made_again_after_a_loss_only_where_it_must_be() -> None:
    for again, views in ((True, [0, 1]), (False, [0])):
        world = SurvivingWorld(3, strict=False)
        world.kill(2, 1.0)
        assert world.outcomes(meet_in_steps, again)[:2] == [views, views]


def call_within_a_call(net: Any) -> list[int]:
    """In which views the outer of two calls is made of which one rank is lost."""
    calls, made = Calls(net, lambda view: None), list[int]()

    def outer() -> None:
        made.append(calls.view.number)
        calls.together(lambda: calls.view.sub("inner").barrier().wait())

    if net.rank == 2:
        net.compute(60.0)  # it is killed in the midst of that
    calls.together(outer)
    calls.leave()
    return made


def test_a_call_within_a_call_is_made_again_with_it() -> None:
    world = SurvivingWorld(3, strict=False)
    world.kill(2, 1.0)
    assert world.outcomes(call_within_a_call)[:2] == [[0, 1], [0, 1]]


def close_by_a_view(net: Any) -> int:
    """How many functions are left to be called when the process ends."""
    left: list[Any] = []

    def unregister(function: Any) -> None:
        left[:] = [other for other in left if other != function]

    processes.atexit = SimpleNamespace(register=left.append, unregister=unregister)  # type: ignore[attr-defined]
    other = ProcessGroupTransport(timeout_s=60.0)
    assert len(left) == 1
    View(other.sub("all"), range(net.world_size), 0).close()
    return len(left)


def test_a_network_that_a_view_has_closed_is_forgotten() -> None:
    """Else each training's network would stay until the process ends, with all that it knows."""
    assert ProcessWorld().run(2, close_by_a_view) == [0, 0]
