"""Real ranks go on after another one is killed, stopped, or fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.survival import Survival
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.view import View
from tests.support.worlds import ProcessWorld
from tests.transport.helpers import until

WORLD = ProcessWorld(timeout_s=60.0, heartbeat_timeout_s=20.0)
EMPTY = torch.empty(0)
NUM_ROUNDS = 400


def meet(view: View) -> None:
    x = torch.ones(20_000)
    view.all_reduce(x).wait()
    assert int(x[0]) == view.world_size


def count_members(
    net: Any,
    how: dict[int, str],
    at: dict[int, int],
    min_ranks: int | None,
) -> tuple[list[int], tuple[int, ...]]:
    """Sums until the end; how many ranks took part in each sum, and who is left."""
    net.views.survive(min_ranks)
    net.barrier().wait()
    calls = Calls(net, meet)

    def add() -> torch.Tensor:
        x = torch.ones(50_000)
        return calls.view.all_reduce(x).wait()[:1]

    counts = []
    for k in range(NUM_ROUNDS):
        if at.get(net.rank) == k:
            if how[net.rank] == "raise":
                raise ValueError("no such luck")
            os.kill(os.getpid(), getattr(signal, how[net.rank]))
        counts.append(int(calls.together(add)))
    calls.together(lambda: calls.view.sub("end").barrier().wait())
    return counts, calls.view.members


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("SIGKILL", 0),
        pytest.param("SIGKILL", 3, marks=pytest.mark.exhaustive),
        ("raise", 1),
        pytest.param("SIGSTOP", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_go_on(how, lost):
    stopped = [lost] if how == "SIGSTOP" else []
    outcomes = WORLD.outcomes(4, count_members, {lost: how}, {lost: 150}, None, stopped=stopped)
    left = tuple(rank for rank in range(4) if rank != lost)
    for rank in left:
        assert outcomes[rank].error == ""
        counts, members = outcomes[rank].result
        assert members == left
        assert counts == [4] * 150 + [3] * 250
    if how == "raise":
        assert outcomes[lost].error == "ValueError: no such luck"


def test_ranks_are_lost_one_after_the_other_and_the_last_ends():
    how = dict.fromkeys(range(3), "SIGKILL")
    outcomes = WORLD.outcomes(4, count_members, how, {0: 50, 1: 100, 2: 150}, 2)
    assert "min_ranks=2, got 3" in outcomes[3].error
    assert outcomes[3].error.startswith("PeerLost: rank 2 died")


def wait_for_more(net: Any, groups: tuple[tuple[int, ...], ...], folder: str) -> str:
    """Another library's collective fails, on a rank whose partner is lost, and on one beside."""
    ended: list[PeerLost] = []
    net.views.survive(None, groups)
    net.on_lost(ended.append)
    net.barrier().wait()
    if net.rank == 3:
        for rank in range(3):
            net.recv(EMPTY, rank).wait()  # it has left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    net.send(EMPTY, 3)
    try:
        with net.blaming("a collective"):
            raise RuntimeError("connection closed")
    except PeerLost as lost:
        return f"{lost} {len(ended)}"
    except RuntimeError as error:
        Path(folder, f"done-{net.rank}").touch()
        until(lambda: len(list(Path(folder).glob("done-*"))) == 2)  # none leaves the other's wait
        return str(error)


@pytest.mark.exhaustive
def test_an_error_is_blamed_on_a_rank_of_the_same_group_alone(tmp_path):
    world = ProcessWorld(timeout_s=60.0, heartbeat_timeout_s=12.0)  # for so long another is blamed
    outcomes = world.outcomes(4, wait_for_more, ((0, 1), (2, 3)), str(tmp_path))
    assert [outcomes[rank].result for rank in (0, 1)] == ["connection closed"] * 2
    assert "rank 2 cannot go on without rank 3" in outcomes[2].result
    assert outcomes[2].result.endswith("noticed in: a collective 1")


def test_one_of_two_goes_on_alone_where_it_may():
    outcomes = WORLD.outcomes(2, count_members, {0: "SIGKILL"}, {0: 50}, 1)
    assert outcomes[1].result == ([2] * 50 + [1] * 350, (1,))


def refuse(net: Any) -> None:
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        net.views.next_view(PeerLost(0, "is gone"))


def test_until_it_survives_a_network_ends_with_the_first_loss():
    ProcessWorld().run(1, refuse)


def test_a_rank_that_hears_of_a_change_of_members_has_not_failed_itself():
    mesh = Mesh(0, 3, timeout_s=1.0, heartbeat_timeout_s=1.0)
    mesh.policy = Survival(mesh, None)
    mesh.mailboxes.break_off(PeerLost(0, "was told that the members change"))
    assert not mesh.has_failed
    mesh.lose(0, "failed: of its own")
    assert mesh.has_failed
