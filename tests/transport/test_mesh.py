"""A rank that is gone is noticed by all, and named; one that leaves in order leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.transport import ANY, PeerLost
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.worlds import ProcessWorld
from tests.transport.helpers import died, our_threads

EMPTY = torch.empty(0)


def open_files() -> set[str]:
    """The sockets, pipes and polls that this process holds."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{file.name} {os.readlink(file)}")
    return {text for text in found if "socket" in text or "eventpoll" in text}


WAITS: tuple[Callable[[Any, int, int], Any], ...] = (
    lambda net, lost, third: net.recv(EMPTY, lost).wait(),
    lambda net, lost, third: net.recv(EMPTY, third, tag=5).wait(),
    lambda net, lost, third: net.recv(EMPTY, ANY, tag=6).wait(),
    lambda net, lost, third: net.all_reduce(torch.ones(1000)).wait(),
    # In a group that the lost rank is no member of, for a member that does not come.
    lambda net, lost, third: net.all_reduce(torch.ones(9), sorted((net.rank, third))).wait(),
    lambda net, lost, third: net.barrier().wait(),
    lambda net, lost, third: net.spawn_lane(lambda end: end.recv(EMPTY, ANY).wait()).join(),
)
"""How each of the ranks that are left waits."""


def wait_each_in_its_way(net: Any, lost: int, folder: str) -> tuple[int, str, float]:
    survivors = [rank for rank in range(net.world_size) if rank != lost]
    clock = Path(folder, "clock")
    if net.rank == lost:
        for rank in survivors:
            net.recv(EMPTY, rank, tag=4).wait()
        clock.write_text(str(time.monotonic()))
        died(lost)
    net.send(EMPTY, lost, tag=4)
    third = next(rank for rank in survivors if rank != net.rank)
    with pytest.raises(PeerLost) as info:
        WAITS[survivors.index(net.rank)](net, lost, third)
    return info.value.rank, info.value.reason, time.monotonic() - float(clock.read_text())


def test_every_wait_ends_soon_and_names_the_rank_that_is_lost(tmp_path: Path) -> None:
    outcomes = ProcessWorld(heartbeat_timeout_s=40.0).outcomes(
        8, wait_each_in_its_way, 0, str(tmp_path)
    )
    assert outcomes.pop(0).exitcode == -signal.SIGKILL
    for way, outcome in enumerate(outcomes):
        assert outcome.error == "", way
        rank, why, seconds = outcome.result
        assert (rank, why) == (0, "died (its connection ended without a farewell)"), way
        assert seconds < 30.0, way


def fail_because_another_failed(net: Any) -> None:
    if net.rank == 1:
        net.recv(EMPTY, 2).wait()
        raise ValueError("the first cause")
    if net.rank == 2:
        net.send(EMPTY, 1)
        try:
            net.recv(EMPTY, 1).wait()
        except PeerLost as error:
            raise RuntimeError("the second cause") from error
    net.recv(EMPTY, 2).wait()


def test_the_first_cause_is_what_all_are_told() -> None:
    outcomes = ProcessWorld().outcomes(4, fail_because_another_failed)
    assert outcomes[1].error == "ValueError: the first cause"
    assert outcomes[2].error == "RuntimeError: the second cause"
    for rank in (0, 3):
        expected = "PeerLost: rank 1 failed: ValueError: the first cause"
        assert outcomes[rank].error.startswith(expected)


def test_the_first_loss_that_a_rank_hears_of_is_the_one_that_it_goes_by() -> None:
    told: list[PeerLost] = []
    mesh = Mesh(0, 3, 60.0, 20.0)
    mesh.on_lost = told.append
    mesh.lose(2, "died")
    mesh.lose(1, "failed: as rank 2 had died")
    with pytest.raises(PeerLost, match="rank 2 died; noticed in: a wait"):
        mesh.check("a wait")
    assert [lost.rank for lost in told] == [2]
    mesh.lose(0, "failed: as rank 2 had died")
    assert not mesh.has_failed


def die_with_a_child_alive(net: Any, folder: str) -> float:
    """As a rank with DataLoader workers does: they are forked, and outlive it."""
    pid_file = Path(folder, "pid")
    if net.rank == 1:
        for rank in (0, 2):
            net.recv(EMPTY, rank).wait()  # it is open there
        if not (child := os.fork()):
            signal.pause()
        pid_file.write_text(str(child))
        died(1)
    net.send(EMPTY, 1)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died"):
        net.recv(EMPTY, 2 - net.rank).wait()
    seconds = time.monotonic() - begin
    if net.rank == 0:
        child = int(pid_file.read_text())
        os.kill(child, 0)  # still there
        os.kill(child, signal.SIGKILL)
    return seconds


def test_a_dead_ranks_child_does_not_keep_its_connections_open(tmp_path: Path) -> None:
    outcomes = ProcessWorld().outcomes(3, die_with_a_child_alive, str(tmp_path))
    for rank in (0, 2):
        assert outcomes[rank].error == ""
        assert outcomes[rank].result < 10.0


def open_and_close(net: Any) -> None:
    # The outer network has set it, and the inner ones must not set it for good.
    sys.setswitchinterval(0.02)
    for cycle in range(5):
        files, threads = open_files(), our_threads()
        inner = ProcessGroupTransport(timeout_s=20.0)
        lane = inner.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait() and None)
        x = inner.all_reduce(torch.full((cycle,), 1.0)).wait()
        assert x.sum() == cycle * net.world_size
        assert len(our_threads()) == len(threads) + 2
        lane.stop()
        inner.barrier().wait()
        assert sys.getswitchinterval() < 0.001
        inner.close()
        inner.close()
        assert sys.getswitchinterval() == pytest.approx(0.02)
        assert our_threads() == threads
        assert not (left := open_files() - files), left


def test_closing_leaves_no_thread_and_no_socket() -> None:
    ProcessWorld().run(2, open_and_close)
