"""Sums by torch's own collectives, over gloo: their order, their errors, and what a loss does.

Functions that run on every rank come before the tests that run them.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import until
from lightning_dsgd.transport import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.native import SUMMED
from lightning_dsgd.transport.tickets import Sum
from tests.support.thorough import tries
from tests.support.worlds import NativeWorld
from tests.transport.contract.test_in_order import run_in_order
from tests.transport.helpers import died, our_threads, stopped
from tests.transport.test_tickets import carry_out, contribution, draw_plans, reordered

SCHEDULES = tries(12, fast=2)
WORLD = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=60.0)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_the_contract_holds(world_size: int) -> None:
    WORLD.run(world_size, run_in_order)


def sums(net: Any) -> list[Tensor]:
    assert net._sums is not None
    sums = []
    for dtype in [*sorted(SUMMED, key=str), torch.int16]:  # the last, by messages
        x = torch.arange(1000).remainder(7).to(dtype) * (net.rank + 1)
        work = net.all_reduce(x)
        assert work.wait() is work.wait() is x
        assert work.done()
        sums.append(x)
    everyone = net.all_reduce(torch.ones(3), range(3)).wait()
    pair = net.sub("apart").all_reduce(torch.ones(3), [0, 1]).wait() if net.rank < 2 else everyone
    assert [everyone.tolist(), pair.tolist()[:1]] == [[3.0] * 3, [2.0 if net.rank < 2 else 3.0]]
    return sums


def test_all_dtypes_are_summed() -> None:
    for of_rank in WORLD.run(3, sums):
        for x in of_rank:
            assert torch.equal(x, torch.arange(1000).remainder(7).to(x.dtype) * 6), x.dtype


# ---- order ----


def in_random_order(net: Any, seed: int, kill_after_s: float | None) -> str:
    """Threads that sum on channels of their own; one rank dies at a random time."""
    chance = random.Random(f"{seed} {net.rank}")
    plans = reordered(draw_plans(random.Random(seed)), chance)
    if kill_after_s is not None and net.rank == seed % net.world_size:
        threading.Timer(kill_after_s, died, [net.rank]).start()

    def run(end: Any, plan: list[list[int]]) -> None:
        own = random.Random(chance.random())

        def pause() -> None:
            time.sleep(own.choice((0.0, 0.001, 0.02)) * own.random())

        def begin(key: Sum) -> Any:
            channel, _ = key
            x = torch.full((1000 * (channel + 1),), contribution(net.rank, *key))
            return ends[end.path, channel].all_reduce(x)

        carry_out(plan, begin, pause, own, net.world_size)

    def in_lane(end: Any, plan: list[list[int]]) -> None:
        for channel in {channel for channels in plan for channel in channels}:
            ends[end.path, channel] = end.sub(str(channel))
        run(end, plan)

    ends: dict[tuple[str, int], Any] = {}
    with contextlib.ExitStack() as joining:
        for plan in plans[1:]:
            joining.callback(net.spawn_lane(partial(in_lane, plan=plan)).join)
        in_lane(net.sub("own"), plans[0])
    if kill_after_s is not None:
        net.recv(torch.empty(0), seed % net.world_size).wait()
    return "through"


@pytest.mark.parametrize("seed", SCHEDULES)
def test_sums_in_any_order_of_any_threads_are_right(seed: int) -> None:
    assert WORLD.run(2 + seed % 3, in_random_order, seed, None) == ["through"] * (2 + seed % 3)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_all_others_name_a_rank_that_is_killed_at_any_time(seed: int) -> None:
    world_size = 2 + seed % 3
    kill_after_s = 0.3 * random.Random(seed).random()
    outcomes = WORLD.outcomes(world_size, in_random_order, seed, kill_after_s)
    for rank, outcome in enumerate(outcomes):
        lost = seed % world_size
        # Which is noticed at once, and not by a time-out or a heartbeat.
        wanted = "died" if rank == lost else f"PeerLost: rank {lost} died"
        assert outcome.error.startswith(wanted), (rank, outcome.error)


# ---- what ends a wait ----


def die_in_a_sum(net: Any, how: Any) -> list[str]:
    net.all_reduce(torch.ones(10)).wait()
    if net.rank == 1:
        for other in (0, 2):
            net.recv(torch.empty(0), other).wait()
        how(1)
    begun, errors = net.sub("begun").all_reduce(torch.ones(10)), []

    def serve(end: Any) -> None:
        end.all_reduce(torch.ones(10)).wait()

    lane, work = net.spawn_lane(serve), net.all_reduce(torch.ones(10))
    net.send(torch.empty(0), 1)
    for wait in (work.wait, begun.wait, lane.join, net.check):
        with pytest.raises(PeerLost) as info:
            wait()
        errors.append(str(info.value))
    with pytest.raises(PeerLost):
        net.all_reduce(torch.ones(1))
    net.fail("has nothing left to do")
    assert our_threads() == []
    return errors


@pytest.mark.parametrize(
    ("how", "what"),
    [(died, "died"), pytest.param(stopped, "has not", marks=pytest.mark.exhaustive)],
)
def test_a_lost_rank_ends_all_waits(how: Any, what: str) -> None:
    world = NativeWorld(timeout_s=100.0, heartbeat_timeout_s=60.0 if how is died else 15.0)
    outcomes = world.outcomes(3, die_in_a_sum, how, stopped=[1] if how is stopped else [])
    for rank in (0, 2):
        first, begun, *_ = outcomes[rank].result
        assert first.startswith(f"rank 1 {what}")
        assert "noticed in: all_reduce number 1 of all ranks" in first
        assert "all_reduce number 0 of all ranks [begun]" in begun


def wait_in_vain(net: Any) -> list[str]:
    work = net.all_reduce(torch.ones(2)) if net.rank != 1 else None
    errors = []
    if work is not None:
        with pytest.raises(Timeout) as info:
            work.wait(0.2)
        errors.append(str(info.value))
    net.sub("meet").barrier().wait()
    if work is None:
        work = net.all_reduce(torch.ones(2))
    assert work.wait().tolist() == [4.0, 4.0]  # a wait that took too long may be repeated
    x = torch.ones(2 + (net.rank == 2), dtype=torch.int32 if net.rank == 3 else torch.float32)
    with pytest.raises(TransportError) as refused:
        net.all_reduce(x).wait()
    errors.append(str(refused.value))
    assert net.all_reduce(torch.ones(1)).wait().item() == 4.0
    return errors


def test_errors_say_who_and_what() -> None:
    errors = WORLD.run(4, wait_in_vain)
    waited = "rank 2 has waited 0.2 s for all ranks to call all_reduce number 0 of all ranks"
    assert re.fullmatch(waited + "; it knows of calls of ranks 2(, 3)?", errors[2][0])
    for of_rank in errors:
        assert of_rank[-1] == (
            "all ranks must sum as many elements of one dtype in all_reduce number 1 of all ranks, "
            "but rank 0 has 2 of torch.float32, rank 3 has 2 of torch.int32"
        )


def sum_without_one(net: Any) -> str:
    """Rank 1 has left."""
    if net.rank == 1:
        return ""
    with pytest.raises(PeerLost) as info:
        net.all_reduce(torch.ones(2)).wait()
    return str(info.value)


def test_a_rank_that_has_left_is_named_at_once() -> None:
    """The later one of the others may meet two that have."""
    errors = WORLD.run(3, sum_without_one)
    left = (
        r"rank %s has left \(its training is over\); noticed in: all_reduce number 0 of all ranks"
    )
    assert re.fullmatch(left % "1", errors[0]) or re.fullmatch(left % "1", errors[2])
    assert all(re.fullmatch(left % r"\d", errors[rank]) for rank in (0, 2))


def sum_and_leave(net: Any) -> float:
    """Rank 1 has its sum and has left before rank 0's launcher comes back from torch."""
    real = dist.all_reduce

    def late(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        assert until(lambda: 1 in net.mesh.mailboxes.left, 60.0, lambda: None)
        return work

    with mock.patch.object(dist, "all_reduce", late if net.rank == 0 else real):
        return float(net.all_reduce(torch.ones(2)).wait().sum())


def test_a_rank_may_leave_once_it_has_the_sum() -> None:
    assert WORLD.run(2, sum_and_leave) == [4.0, 4.0]


def fail_to_launch(net: Any) -> tuple[str, list[str]]:
    """On rank 1 torch's collective raises."""
    fails = mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("no such luck"))
    with fails if net.rank == 1 else contextlib.nullcontext(), pytest.raises(PeerLost) as info:
        net.all_reduce(torch.ones(2)).wait()
    net.close()
    return str(info.value), our_threads()


def test_a_failed_launch_ends_all_and_leaves_nothing() -> None:
    world = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=20.0)  # for so long another is blamed
    for text, threads in world.run(3, fail_to_launch):
        assert text.startswith("rank 1 failed: RuntimeError: no such luck")
        assert threads == []


def stop_a_lane_that_sums(net: Any) -> bool:
    def serve(end: Any) -> None:
        end.all_reduce(torch.ones(2)).wait()
        if net.rank == 0:
            end.all_reduce(torch.ones(2)).wait()  # which rank 1 does not call

    lane = net.spawn_lane(serve)
    if net.rank == 1:
        lane.join()
    net.barrier().wait()
    lane.stop()
    return bool(net.all_reduce(torch.ones(1)).wait() == 2)


def test_a_lane_that_waits_for_a_sum_can_be_stopped() -> None:
    assert WORLD.run(2, stop_a_lane_that_sums) == [True, True]
