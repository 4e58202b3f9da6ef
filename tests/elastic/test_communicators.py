"""Communicators of gloo's are made anew among the ranks that are left, and with those that come."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd import devices
from lightning_dsgd.elastic import communicators
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.communicators import Sums, SurvivingTransport
from lightning_dsgd.transport import processes
from tests.support.worlds import StartWorld, share_a_gpu

WORLD = StartWorld()
NUM_SUMS = 120


def die(how: str) -> None:
    os.kill(os.getpid(), getattr(signal, how))


def doomed(how: str, where: str) -> None:
    """Has this process end in the 50th sum, once the others are in it, or as it connects again."""
    calls = [0, 0]
    launch, made = Sums.launch, communicators._store

    def launches(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 50 and where == "sum":
            die(how)
        launch(*args)

    def connects(*args: Any, **kwargs: Any) -> Any:
        calls[1] += 1
        if calls[1] == 2 and where == "connecting":
            die(how)
        return made(*args, **kwargs)

    Sums.launch = launches  # type: ignore[method-assign]
    communicators._store = connects


def surviving(num_ranks: int, folder: str, device: Any = processes.CPU) -> SurvivingTransport:
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    net = SurvivingTransport(60.0, 4.0, native_devices=(), device=device)
    net.views.survive(None)
    net.barrier().wait()
    return net


def sum_of_messages(num_ranks: int, folder: str) -> Any:
    """Rank 0 has no store, so that the sums of its view are messages."""
    has_none, said = os.environ["RANK"] == "0", list[str]()
    store = mock.Mock(side_effect=OSError("no port")) if has_none else communicators._store
    with (
        mock.patch.dict(devices.COLLECTIVES, {"cpu": "gloo"}),
        mock.patch.multiple(communicators, _store=store, say=said.append),
    ):
        net = surviving(num_ranks, folder)
        calls = Calls(net, lambda _: None)
        view = calls.view
        communicators.renew(view, net)
        total = view.all_reduce(torch.ones(1000)).wait()
        sums = net.views.sums
        calls.leave()
        net.close()
    return float(total[0]), sums, said


def test_sums_are_messages_where_one_has_no_communicator(tmp_path):
    results = WORLD.run(3, sum_of_messages, 3, str(tmp_path))
    assert [(total, sums) for total, sums, _ in results] == [(3.0, None)] * 3
    why = "rank 0 has no store: failed: OSError: no port"
    assert f"view 0: sums are made of messages, as {why}" in results[0][2][0]
    assert [len(said) for *_, said in results] == [1, 0, 0]


def sum_and_lose(num_ranks: int, folder: str, ends: dict[int, tuple[str, str]], kind: str) -> Any:
    rank, device = int(os.environ["RANK"]), torch.device(kind)
    if kind != "cpu":
        share_a_gpu(rank)
        devices.port_of(device).enter()
    if rank in ends:
        doomed(*ends[rank])
    gc.disable()
    with mock.patch.dict(devices.COLLECTIVES, {"cpu": "gloo"}):
        net = surviving(num_ranks, folder, device)

        def begin(view: Any) -> None:
            communicators.renew(view, net)
            view.sub("begin").barrier().wait()

        calls = Calls(net, begin)

        def add() -> list[float]:
            x = torch.arange(200_000.0, device=device) + rank
            y = calls.view.all_reduce(x).wait()
            z = calls.view.broadcast(torch.full((5,), float(rank), device=device), 1).wait()
            return [float(y[0]), float(y[-1]), float(z[4])]

        calls.together(lambda: begin(calls.view))
        first = weakref.ref(net.views.sums._groups[0])
        sums = [calls.together(add) for _ in range(NUM_SUMS)]
        sent = net.counters.sent[devices.library_for(device)].messages
        calls.leave()
        net.close()
    is_left = first() is not None  # with its threads and files
    assert is_left == bool(communicators._left_behind)
    return sums, calls.view.members, sent


def expected(members: tuple[int, ...]) -> list[float]:
    first = float(sum(members))
    return [first, first + len(members) * 199_999, float(members[1])]


KILLED = {0: ("SIGKILL", "sum"), 3: ("SIGKILL", "connecting")}
STOPPED = {4: ("SIGSTOP", "sum"), 0: ("SIGSTOP", "connecting")}


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        (KILLED, "cpu"),
        pytest.param(STOPPED, "cpu", marks=pytest.mark.exhaustive),
        pytest.param(KILLED, "cuda:0", marks=pytest.mark.gpu("cuda")),
    ],
)
def test_the_others_go_on_with_sums_by_the_library(ends, kind, tmp_path):
    stopped = [rank for rank, (how, _) in ends.items() if how == "SIGSTOP"]
    outcomes = WORLD.outcomes(5, sum_and_lose, 5, str(tmp_path), ends, kind, stopped=stopped)
    left = tuple(rank for rank in range(5) if rank not in ends)
    for rank in left:
        assert outcomes[rank].error == ""
        sums, members, sent = outcomes[rank].result
        assert members == left
        num_before = sums.index(expected(left))
        assert sums == [expected((0, 1, 2, 3, 4))] * num_before + [expected(left)] * (
            NUM_SUMS - num_before
        )
        assert 20 < num_before < 30
        assert sent > 2 * NUM_SUMS
