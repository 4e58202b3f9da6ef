"""Sums by torch's own collectives, over gloo: their order, their errors, and what a loss does."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.devices import HOST, until
from lightning_dsgd.transport import PeerLost, Timeout, TransportError, native
from lightning_dsgd.transport.native import NativeCollective
from lightning_dsgd.transport.processes import CPU
from lightning_dsgd.transport.view import View
from tests.support.mpi import MPIJob, MPIWorld, every_mpi
from tests.support.thorough import cases
from tests.support.worlds import NativeWorld
from tests.transport.contract import collectives
from tests.transport.contract.test_in_order import run_in_order
from tests.transport.helpers import died, our_threads, stopped

WORLD = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=60.0)


@cases("world_size", now=[3], later=[2])
def test_the_contract_holds(world_size: int) -> None:
    WORLD.run(world_size, run_in_order)


def sum_by_torch(net: Any) -> str:
    collectives.all_reduce_is_exact_where_sums_are(net)
    collectives.groups_are_independent(net)
    work = net.all_reduce(torch.ones(1))
    assert isinstance(work, NativeCollective)
    work.wait()
    return str(net.engines())


@every_mpi
def test_torch_sums_under_mpiexec_too(python: str, mpi_jobs: Callable[[str], MPIJob]) -> None:
    line = "Messages travel over MPI; gloo makes sums, and carries what partners exchange."
    world = MPIWorld(job=mpi_jobs(python), native_devices=("cpu",))
    assert world.run(3, sum_by_torch) == [line] * 3


class HungGroup:
    """Its abort does not come back."""

    def abort(self) -> None:
        threading.Event().wait(3.0)


def test_aborts_that_hang_are_left_behind_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CLOSE_TIMEOUT_S", 0.5)
    begin = time.monotonic()
    native.abort([HungGroup() for _ in range(8)], HOST)
    assert 0.5 <= time.monotonic() - begin < 2.0


def in_groups(net: Any, device: torch.device = CPU) -> list[float]:
    halves, pairs, me = [[0, 1], [2, 3]], [[0, 2], [1, 3]], net.rank
    half, across = halves[me // 2], View.one_of(net.sub("across"), pairs)
    x, y, z = (torch.tensor([10.0 * me] * 2, device=device) for _ in range(3))
    own = torch.ones(1, device=device)
    of_two = torch.full((3,), float(me), dtype=torch.bfloat16, device=device)
    works = [
        net.all_reduce(x, half),
        across.all_reduce(y),
        net.broadcast(z, half[1], half),
        net.broadcast(of_two, 2),
        across.broadcast(torch.ones(0, device=device), 1),
        net.gather_into(torch.empty(2, device=device), own, [1, 1], half),
    ]
    assert all(isinstance(work, NativeCollective) for work in works)
    for work in works if me % 2 else reversed(works):
        work.wait()
    found = [float(tensor[1]) for tensor in (x, y, z, of_two)]
    assert not isinstance(net.all_reduce(torch.ones(1, device=device), [me]), NativeCollective)
    with pytest.raises(TransportError, match=rf"sum, or take .* of ranks {half[0]}, {half[1]}"):
        net.broadcast(torch.ones(2, device=device), half[me % 2], half).wait()
    with pytest.raises(TransportError, match=r"has 2 of torch.float32 from"):
        (net.broadcast(x, half[0], half) if me % 2 else net.all_reduce(x, half)).wait()
    net.sub("end").barrier().wait()
    return found


def check_groups(ranks: list[list[float]]) -> None:
    for rank, found in enumerate(ranks):
        a, b = (0, 1) if rank < 2 else (2, 3)
        assert found == [10.0 * (a + b), 10.0 * (2 * (rank % 2) + 2), 10.0 * b, 2.0]


def test_groups_sum_and_broadcast() -> None:
    check_groups(WORLD.run(4, in_groups))


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
    world = NativeWorld(timeout_s=60.0, heartbeat_timeout_s=4.0)  # for so long another is blamed
    for text, threads in world.run(3, fail_to_launch):
        assert text.startswith("rank 1 failed: RuntimeError: no such luck")
        assert threads == []
