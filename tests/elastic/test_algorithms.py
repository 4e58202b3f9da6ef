"""Every algorithm where ranks are lost and others come, at any moment, in the simulated world."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.transport.view import View
from tests.algorithms.table import LR, ROUNDED_NOW, SYNC, TABLE, Row, start_at, target, wagma
from tests.support.thorough import times

LATER = pytest.mark.exhaustive
SCALED = {
    "wagma_scaled": wagma(":scale_steps=true"),
    "local_sgd_scaled": Row(f"local_sgd:{SYNC}:scale_steps=true"),
}
"""Who drives these scales their steps."""
ROWS = {**TABLE, **SCALED}
NOW = [name for name, row in ROWS.items() if not row.is_rounded or name == ROUNDED_NOW]


class Vector(nn.Module):
    """Weights that are the flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(start_at(0, 0.0))


def survive(net: Any, row: Row, num_steps: int) -> tuple[tuple[int, ...], Tensor, list[Any]]:
    """Trains, shows the consensus, and ends, whoever is lost or comes meanwhile."""
    module, goal = Vector(), target(net.rank)
    optimizer = torch.optim.SGD(module.parameters(), LR)
    begun = [-1 if net.is_newcomer else 0]

    def begin(view: View) -> None:
        told = [int(k) for k in everyones(view.sub("begun"), str(begun[0]))]
        old = [rank for rank, k in enumerate(told) if k >= 0]
        replica.change_view(Circle(view.sub("replica"), {*range(len(told))}.difference(old)))
        if begun[0] < 0:
            begun[0] = max(told)  # some may still be in the call that lets it in

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    inside = calls.view.sub("replica")
    replica = SurvivingReplica(inside, module, [optimizer], row.make(), is_newcomer=net.is_newcomer)
    shown: list[Any] = []
    if net.is_newcomer:
        net.join(within_s=60.0)
        calls.join()
    while begun[0] < num_steps:
        k = begun[0]
        net.compute(0.1 + 0.3 * ((k * 7 + net.rank * 3) % 5 == 0))
        module.x.grad = None
        (module.x - goal).square().sum().div(2).backward()
        calls.step(lambda: replica.before_update(optimizer), again=True)
        optimizer.step()
        calls.step(lambda: replica.after_update(optimizer), again=False)
        if k % 10 == 9:
            calls.together(replica.show_consensus, replica.show_as_shared)
            newcomers = sum(1 << n for n in calls.view.views.newcomers())
            mine = torch.tensor([k, newcomers])
            shown.append(calls.together(lambda mine=mine: calls.view.all_gather(mine).wait()))
            replica.show_own()
        begun[0] = k + 1
        newcomers = int(shown[-1][0][1]) if k % 10 == 9 else 0
        if newcomers:
            calls.admit([n for n in range(newcomers.bit_length()) if newcomers >> n & 1])
    calls.together(replica.finish, replica.finish_as_shared)
    calls.leave()
    return calls.view.members, module.x.detach(), shown


def play(row: Row, world_size: int, seed: int, num_lost: int, num_came: int = 0) -> None:
    """Ranks are lost at any time of some steps, evaluations, and the end; others come before."""
    chance = random.Random(seed)
    world = SurvivingWorld(world_size, latency_s=0.01, bandwidth_bytes_s=3e5, detect_s=0.003)
    lost = chance.sample(range(world_size), num_lost)
    for rank in lost:
        world.kill(rank, chance.uniform(0.05, 8.0))
    first_s = chance.uniform(0.0, 1.0)
    for _ in range(num_came):
        world.join(first_s + chance.choice([0.0, 0.1]))
    outcomes = world.outcomes(survive, row, 20)
    what = f"{seed}: {num_came} come, ranks {lost} of {world_size} are lost"
    ends = {rank: end for rank, end in enumerate(outcomes) if rank not in lost}
    for end in ends.values():
        assert not isinstance(end, BaseException), f"{what}: {end!r}"
        members, x, shown = end
        assert ends.keys() <= set(members), what
        assert torch.isfinite(x).all(), what
        assert torch.equal(x, next(iter(ends.values()))[1]), what
        steps = [{int(each[0]) for each in theirs} for theirs in shown]
        assert steps == [{9}, {19}][-len(steps) :], what
        assert num_came or len(steps) == 2, what


@pytest.mark.parametrize("name", NOW)
def test_a_rank_is_lost_while_two_come_and_the_others_go_on(name: str) -> None:
    play(ROWS[name], 4, 0, 1)
    play(ROWS[name], 4, 1, 1, num_came=2)


@LATER
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ROWS)
def test_ranks_are_lost_and_come_at_any_moment(name: str) -> None:
    for seed in times(4):
        play(ROWS[name], 3 + seed % 4, 1000 + seed, 1)
        play(ROWS[name], 5, 100_000 + seed, 2)
        play(ROWS[name], 3 + seed % 3, 500 + seed, 1, num_came=2)
