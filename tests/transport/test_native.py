"""Sums by torch's own collectives, over gloo: their order, their errors, and what a loss does."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.devices import until
from lightning_dsgd.transport import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.native import Native, NativeCollective
from lightning_dsgd.transport.pairs import Pair
from lightning_dsgd.transport.view import View
from tests.support.mpi import MPIJob, MPIWorld, every_mpi
from tests.support.rank import Rank
from tests.support.thorough import cases, tries
from tests.support.worlds import NativeWorld, ProcessWorld
from tests.transport.contract.test_in_order import run_in_order
from tests.transport.helpers import died, our_threads, stopped, train_in_nodes

SCHEDULES = tries(6, fast=2)
WORLD = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=60.0)


@cases("world_size", now=[3], later=[2])
def test_the_contract_holds(world_size: int) -> None:
    WORLD.run(world_size, run_in_order)


def sums_in_groups(net: Any) -> tuple[str, list[list[float]]]:
    return net.engines(), in_groups(net)


@every_mpi
def test_torch_sums_under_mpiexec_too(python: str, mpi_jobs: Callable[[str], MPIJob]) -> None:
    """To the bit as where messages travel over TCP."""
    world = MPIWorld(job=mpi_jobs(python), native_devices=("cpu",))
    makes = (
        "gloo makes the sums of all ranks and of fixed groups, and carries what partners exchange."
    )
    by_mpi, by_tcp = (w.run(4, sums_in_groups) for w in (world, WORLD))
    assert [line for line, _ in by_mpi] == [f"Messages travel over MPI; {makes}"] * 4
    assert [line for line, _ in by_tcp] == [f"Messages travel over TCP; {makes}"] * 4
    assert [found for _, found in by_mpi] == [found for _, found in by_tcp]


def call(net: Any, x: Tensor, group: Any, src: int | None) -> Any:
    return net.all_reduce(x, group) if src is None else net.broadcast(x, src, group)


def in_groups(net: Any) -> list[list[float]]:
    size = net.world_size
    halves = [range(size // 2), range(size // 2, size)]
    pairs = [[rank, rank + size // 2] for rank in range(size // 2)]
    net.fix_groups(halves)
    net.fix_groups([*halves, *pairs])
    half = halves[net.rank // (size // 2)]
    across = View.one_of(net.sub("across"), pairs)
    found = []
    for number in range(5):
        x, y, z = (torch.tensor([float(10 * net.rank + number)] * 7) for _ in range(3))
        works = [
            net.all_reduce(x, half),
            across.all_reduce(y),
            net.broadcast(z, half[1], half),
            net.broadcast(torch.ones(3, dtype=torch.bfloat16), 2),
            across.broadcast(torch.ones(0), 1),
        ]
        assert all(isinstance(work, NativeCollective) for work in works)
        for work in works if net.rank % 2 else reversed(works):
            work.wait()
        found.append([float(x[6]), float(y[6]), float(z[6])])
    assert not isinstance(net.all_reduce(torch.ones(1), [net.rank]), NativeCollective)
    with pytest.raises(TransportError, match=rf"sum, or take .* of ranks {half[0]}, {half[1]}"):
        net.broadcast(torch.ones(2), half[net.rank % 2], half).wait()
    src = half[0] if net.rank % 2 else None
    with pytest.raises(TransportError, match=r"has 2 of torch.float32 from"):
        call(net, torch.ones(2), half, src).wait()
    net.sub("end").barrier().wait()
    return found


def test_groups_that_are_fixed_sum_and_broadcast() -> None:
    for rank, found in enumerate(WORLD.run(4, in_groups)):
        a, b = (0, 1) if rank < 2 else (2, 3)
        for number, (of_half, across, taken) in enumerate(found):
            assert of_half == 10 * (a + b) + 2 * number
            assert across == 10 * (2 * (rank % 2) + 2) + 2 * number
            assert taken == 10 * b + number


def die_in_a_group(net: Any) -> str:
    net.fix_groups([[0, 1], [2, 3]])
    group = [0, 1] if net.rank < 2 else [2, 3]
    net.all_reduce(torch.ones(10), group).wait()
    if net.rank == 3:
        for other in range(3):
            net.recv(torch.empty(0), other).wait()
        died(3)
    work = net.all_reduce(torch.ones(10), group)
    if net.rank < 2:
        work.wait()
        work = net.recv(torch.ones(1), 3)
    net.send(torch.empty(0), 3)
    with pytest.raises(PeerLost) as info:
        work.wait()
    net.fail("has nothing left to do")
    return str(info.value)


def test_a_lost_rank_ends_the_waits_of_its_group() -> None:
    outcomes = WORLD.outcomes(4, die_in_a_group)
    assert "noticed in: all_reduce number 1 of ranks 2, 3" in outcomes[2].result
    assert all(outcomes[rank].result.startswith("rank 3 died") for rank in range(3))


def hierarchical(net: Any, name: str) -> tuple[list[float], int, int]:
    num_native, begin = 0, Native.begin

    def count(self: Native, *args: Any) -> Any:
        nonlocal num_native
        work = begin(self, *args)
        num_native += len(args[2].members) < net.world_size
        return work

    with mock.patch.object(Native, "begin", count):
        x = torch.arange(11.0)
        train_in_nodes(net, x, name, num_steps=6)
        sent: int = net.counters.bytes_sent
    return x.tolist(), sent, num_native


@pytest.mark.parametrize("name", ["wagma:wait_avoiding=false", "sgp"])
def test_nodes_talk_in_groups_that_are_fixed(name: str) -> None:
    plain = ProcessWorld(timeout_s=60.0, heartbeat_timeout_s=60.0).run(4, hierarchical, name)
    native = WORLD.run(4, hierarchical, name)
    for (x, sent, none), (y, counted, some) in zip(plain, native, strict=True):
        assert x == y
        assert counted == pytest.approx(sent, abs=8)  # parts of 11 elements are not equally long
        assert none == 0
        assert some >= 12


# ---- order ----


def pairs_in_random_order(net: Any, seed: int, kill_after_s: float | None) -> str:
    """Exchanges or pushes, and sums, of three threads, each in an order of its own."""
    me, size, lost = net.rank, net.world_size, seed % net.world_size
    if kill_after_s is not None and me == lost:
        threading.Timer(kill_after_s, died, [me]).start()

    def sent(src: int, to: int, number: int) -> Tensor:
        return torch.full(((src + number) % 3 * 700,), 100.0 * src + 10 * to + number)

    def run(end: Any, thread: int) -> None:
        common, own = (random.Random(f"{seed} {thread} {who}") for who in ("all", me))
        for number in range(5):
            edges = {tuple(common.sample(range(size), 2)) for _ in range(2 * size)}
            swaps = {tuple(sorted(edge)) for edge in edges} if common.random() < 0.5 else set()
            begun: list[tuple[Tensor | None, Any]] = []
            for a, b in own.sample(sorted(swaps or edges), len(swaps or edges)):
                time.sleep(own.choice((0.0, 0.001, 0.02)) * own.random())
                if me not in (a, b):
                    continue
                peer = b if a == me else a
                mine, theirs = sent(me, peer, number), sent(peer, me, number)
                if swaps:
                    begun.append((theirs, end.exchange(mine, peer)))
                elif me == a:
                    begun.append((None, end.push(mine, peer)))
                else:
                    begun.append((theirs, end.pull(mine, peer)))
            assert all(isinstance(work, Pair) for _, work in begun)
            total = end.all_reduce(torch.full((500,), float(me)))
            for expected, work in own.sample(begun, len(begun)):
                got = work.wait()
                assert expected is None or got.equal(expected), (thread, number)
            assert total.wait().eq(sum(range(size))).all()

    with contextlib.ExitStack() as joining:
        for thread in (1, 2):
            joining.callback(net.spawn_lane(partial(run, thread=thread)).join)
        run(net.sub("own"), 0)
    if kill_after_s is not None:
        net.recv(torch.empty(0), lost).wait()
    return "through"


def average_at_random(net: Any, seed: int, kill_after_s: float | None) -> str:
    """WAGMA with late ranks: what they have added up is in the mean, before and after a resume."""
    chance = random.Random(f"{seed} {net.rank}")
    if kill_after_s is not None and net.rank == seed % net.world_size:
        threading.Timer(kill_after_s, died, [net.rank]).start()
    spec = f"wagma:sync_period=5:grace_s=0:overlap={seed % 2 == 1}"
    rank, added = Rank(net, make_algorithm(spec), torch.zeros(1000).double()), 0.0
    for part in range(2):
        for _ in range(8 + chance.randrange(8)):
            update = chance.random()
            time.sleep(chance.choice((0.0, 0.02)) * chance.random())
            rank.step(update)
            added += update
        means = torch.tensor([added, float(rank.settle().mean())]).double()
        means = torch.stack(net.all_gather(means).wait()).mean(0)
        torch.testing.assert_close(means[0], means[1])
        rank.resume(make_algorithm(spec), f"part {part}")
    assert net.counters.sent["gloo"].bytes > net.counters.sent["TCP"].bytes
    if kill_after_s is not None:
        net.recv(torch.empty(0), seed % net.world_size).wait()
    return "through"


IN_RANDOM_ORDER = [pairs_in_random_order, average_at_random]


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("calls", IN_RANDOM_ORDER)
def test_calls_in_any_order_of_any_threads_are_right(seed: int, calls: Any) -> None:
    assert WORLD.run(2 + seed % 3, calls, seed, None) == ["through"] * (2 + seed % 3)


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("calls", IN_RANDOM_ORDER)
def test_all_others_name_a_rank_that_is_killed_at_any_time(seed: int, calls: Any) -> None:
    world_size = 2 + seed % 3
    kill_after_s = 0.3 * random.Random(seed).random()
    outcomes = WORLD.outcomes(world_size, calls, seed, kill_after_s)
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


@cases("how, what", now=[(died, "died")], later=[(stopped, "has not")])
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
    waited = "rank 2 has waited 0.2 s for all to call all_reduce number 0 of all ranks"
    assert re.fullmatch(waited + "; it knows of calls of ranks 2(, 3)?", errors[2][0])
    for of_rank in errors:
        assert of_rank[-1] == (
            "all must sum, or take from one rank, as many elements of one dtype in "
            "all_reduce number 1 of all ranks, but rank 0 has 2 of torch.float32 to sum, rank 3 "
            "has 2 of torch.int32 to sum"
        )


def sum_without_one(net: Any) -> str:
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
    """Rank 1 has its sum and has left before rank 0's starter comes back from torch."""
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
    fails = mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("no such luck"))
    with fails if net.rank == 1 else contextlib.nullcontext(), pytest.raises(PeerLost) as info:
        net.all_reduce(torch.ones(2)).wait()
    net.close()
    return str(info.value), our_threads()


def test_a_failed_launch_ends_all_and_leaves_nothing() -> None:
    world = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=8.0)  # for so long another is blamed
    for text, threads in world.run(3, fail_to_launch):
        assert text.startswith("rank 1 failed: RuntimeError: no such luck")
        assert threads == []
