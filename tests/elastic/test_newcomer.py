"""A process comes to ranks that have been summing for a while, and becomes a member."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.entrance import NewcomerTransport
from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.doomed import write_whole
from tests.support.launched import until
from tests.support.thorough import cases
from tests.support.worlds import StartWorld

WORLD = StartWorld()
WITHIN_S = 60.0


def sum_ones(calls: Calls, folder: Path, dies_at: int = -1) -> list[int]:
    """How many ranks took part in each sum; between two, all let in whom the first one knows."""
    counts: list[int] = []
    is_over = False

    def add() -> list[int]:
        x = torch.zeros(20_000)
        x[0] = 1
        if calls.view.rank == 0:
            x[1] = sum(1 << n for n in calls.view.views.newcomers())
            x[2] = len(counts) >= 300 and calls.view.members == (0, 1, 3)
        total = calls.view.all_reduce(x).wait()
        return [int(total[0]), int(total[1]), int(total[2])]

    while not is_over:
        if len(counts) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count, newcomers, is_over = calls.together(add)
        counts.append(count)
        if newcomers:
            calls.admit([n for n in range(32) if newcomers >> n & 1])
        if len(counts) == 20:
            write_whole(Path(folder, "begun"), "")
    calls.leave()
    return counts


def begin(view: Any) -> None:
    view.sub("begin").barrier().wait()


def member(folder: str, dies: str) -> Any:
    rank = int(os.environ["RANK"])
    if rank == 3:
        return newcomer(folder, dies)
    store = dist.FileStore(str(Path(folder, "store")), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    net = ProcessGroupTransport(40.0, 20.0, native_devices=())
    net.views.survive(None)
    net.barrier().wait()
    write_whole(Path(folder, f"card_{rank}"), json.dumps(net.views.card()))
    calls = Calls(net, begin)
    calls.together(lambda: begin(calls.view))
    if rank == 2 and dies == "reached":
        threading.Thread(target=die_once_reached, args=[Path(folder)], daemon=True).start()
    counts = sum_ones(calls, Path(folder), 10 if rank == 2 and dies == "before" else -1)
    net.close()
    return counts, calls.view.members


def die_once_reached(folder: Path) -> None:
    until((folder / "reached").exists)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_first_contact(net: Any, folder: Path) -> None:
    """Has the first rank that is reached die, and this one hear of that before it reaches more."""
    connections, reaches = net.mesh.connections, net.mesh.connections.reaches

    def reach(rank: int) -> bool:
        is_reached = bool(reaches(rank))
        if not (folder / "reached").exists():
            write_whole(folder / "reached", "")
            until(lambda: connections.made_to(rank).sock.fileno() < 0)
        return is_reached

    connections.reaches = reach


def newcomer(folder: str, dies: str) -> Any:
    until(Path(folder, "begun").exists)
    cards: dict[int, tuple[str, int]] = {}
    told: list[PeerLost] = []
    net = NewcomerTransport(3, 40.0, 20.0)
    for file in sorted(Path(folder).glob("card_*"), reverse=True):
        host, port, secret = json.loads(file.read_text())
        cards[int(file.name.removeprefix("card_"))] = host, port
    net.listen()
    net.on_lost(told.append)
    if dies == "reached":
        lose_first_contact(net, Path(folder))
    net.join(cards, bytes.fromhex(secret), None, WITHIN_S)
    calls = Calls(net, begin, is_newcomer=True)
    calls.join()
    counts = sum_ones(calls, Path(folder))
    net.close()
    assert not told, "a loss of another rank would end this process, though it is let in"
    return counts, calls.view.members


@cases("dies", now=["before"], later=["reached"])
def test_a_newcomer_takes_the_place_of_a_lost_rank(dies, tmp_path):
    """Who is lost may be the first whom the newcomer has reached."""
    outcomes = WORLD.outcomes(4, member, str(tmp_path), dies)
    assert [o.error for o in outcomes] == ["", "", "died", ""]
    for rank in (0, 1, 3):
        counts, members = outcomes[rank].result
        assert members == (0, 1, 3)
        assert counts[-1] == 3


def test_nobody_can_be_joined_where_nobody_listens():
    net = NewcomerTransport(3, timeout_s=5.0, heartbeat_timeout_s=1.0)
    net.listen()
    with pytest.raises(TransportError, match=r"none of \[0\] answers"):
        net.join({0: ("127.0.0.1", 1)}, b"secret", None, 5.0)
