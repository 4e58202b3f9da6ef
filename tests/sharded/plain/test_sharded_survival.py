"""Replicas in shards go on without one that has lost a rank: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_dsgd as dsgd
from lightning_dsgd import decentralized
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.sharded import together
from lightning_dsgd.transport import PeerLost
from tests.elastic.test_plain import Places
from tests.sharded.plain.test_sharded import (
    ALGORITHMS,
    Network,
    batches,
    loss_of,
    make,
    make_mesh,
    whole,
)
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome

exhaustive = pytest.mark.exhaustive
WORLD = FitWorld(timeout_s=60.0)
NUM_EPOCHS = 4
NUM_BATCHES = 8
SURVIVES = {"timeout_s": 60.0, "heartbeat_timeout_s": 20.0, "on_loss": "continue"}


def has_lost(lost: int) -> bool:
    """Whether this rank knows of a loss, once the ranks of its row have asked each other."""
    session: Any = SimpleNamespace(net=SimpleNamespace(timeout_s=60.0))
    row = together.ProcessRow(session, [(0, 1), (2, 3)])
    return row.has_lost(PeerLost(lost, "died") if dist.get_rank() == 1 else None)


def test_a_loss_that_one_rank_has_met_is_known_to_all_of_its_replica() -> None:
    assert WORLD.run(4, has_lost, 2) == [True, True, False, False]


def algorithm_of(name: str) -> Any:
    """With a group of two, wagma cannot go on in one replica."""
    return dsgd.WAGMA() if name == "wagma" else ALGORITHMS[name]()


def come_to(places: Places, name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(value: Any) -> Any:
        places.at(name)
        return call(value)

    return called


def train_in(name: str, folder: str, places: Places, uneven: int) -> dict[str, Any]:
    mesh = make_mesh()
    model, optimizer = make(mesh)
    together.gathered = come_to(places, "gather", together.gathered)
    rank, number = dist.get_rank(), mesh["replica"].get_local_rank()
    sums = []
    try:
        with decentralized(
            *(model, optimizer, algorithm_of(name)), replicas=mesh["replica"], **SURVIVES
        ) as replica:
            for epoch in range(NUM_EPOCHS):
                own = batches(NUM_BATCHES + uneven * number, 100 * epoch + rank)
                for x, y in replica.batches(own):
                    places.at("batch")
                    optimizer.zero_grad()
                    ((model(x) - y) ** 2).mean().backward()
                    places.at("backward")
                    optimizer.step()
                with replica.consensus():
                    places.at("evaluation")
                    shown, loss = whole(model), loss_of(model)
                    sums.append(replica.mean(1.0) * replica.world_size)
                places.at("save")
                replica.save(Path(folder, f"saved_{epoch}.pt"), epoch=epoch)
            members, is_first = replica.members, replica.is_first
            metrics = replica.metrics()
    except PeerLost:
        Path(folder, f"ended_{rank}").touch()
        raise
    return {
        "weights": whole(model),
        "shown": shown,
        "loss": loss,
        "sums": sums,
        "members": members,
        "is_first": is_first,
        "num_members": metrics["num_members"],
        "view": metrics["view"],
    }


def train(name: str, folder: str, lost: int, doomed: str, uneven: int) -> dict[str, Any]:
    """The same, where a rank is killed at some place."""

    class Dated(Places):
        def at(self, place: str) -> None:
            if f"{place} {self._counts.get(place, 0) + 1}" == self._doomed:
                Path(folder, "killed").touch()
            super().at(place)

    places = Dated(doomed if dist.get_rank() == lost else "")
    return train_in(name, folder, places, uneven)


def check_left(outcomes: list[Outcome], lost: int, folder: Path) -> None:
    """The replica that is whole has trained to the end; the other rank names who is lost."""
    left = (2, 3) if lost < 2 else (0, 1)
    results = [outcomes[rank].result for rank in left]
    assert [outcomes[rank].error for rank in left] == ["", ""]
    for rank, result in zip(left, results, strict=True):
        assert torch.equal(result["weights"], results[0]["weights"])
        assert torch.equal(result["shown"], results[0]["shown"])
        assert bool(result["weights"].isfinite().all())
        assert result["members"] == left
        assert result["num_members"] == 2
        assert result["is_first"] == (rank == left[0])
        assert result["view"] == 1.0
        assert result["sums"][0] in (2.0, 4.0)
        assert result["sums"][-1] == 2.0
    for epoch in range(NUM_EPOCHS):  # what was gathered before the loss is not written after it
        saved = torch.load(folder / f"saved_{epoch}.pt", weights_only=True)
        assert saved["extras"]["epoch"] == epoch
        assert saved["state_dict"].keys() == Network().state_dict().keys()
    mark = record.save_of(saved)
    assert mark is not None
    assert (mark.num_shards, mark.world_size) == (2, 2)


@cases(
    "name, lost, doomed, uneven",
    now=[("local_sgd", 0, "backward 13", 0), ("local_sgd", 0, "gather 2", 0)],
    later=[("wagma", 3, "batch 11", 3), ("local_sgd", 2, "save 2", 3)],
)
def test_a_rank_is_killed_and_the_other_replica_trains_to_the_end(
    name: str, lost: int, doomed: str, uneven: int, tmp_path: Path
) -> None:
    """At any other moment: in a simulated world, tests/elastic/test_rows.py."""
    outcomes = WORLD.outcomes(4, train, name, str(tmp_path), lost, doomed, uneven)
    check_left(outcomes, lost, tmp_path)
    partner = lost ^ 1
    killed, ended = (tmp_path / name for name in ("killed", f"ended_{partner}"))
    assert ended.stat().st_mtime - killed.stat().st_mtime < 40.0
    assert outcomes[partner].error.startswith(f"PeerLost: rank {lost} ")
    why = f"rank {partner} cannot go on without rank {lost}, which held shards of its replica"
    assert why in outcomes[partner].error


def train_until_rank_1_gets(signum: int, folder: str) -> Any:
    class Signalled(Places):
        def at(self, place: str) -> None:
            super().at(place)
            if place == "batch" and self._counts["batch"] == 10 and dist.get_rank() == 1:
                os.kill(os.getpid(), signum)

    return train_in("local_sgd", folder, Signalled(""), 0)


@exhaustive
def test_a_rank_whose_partner_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    args = signal.SIGSTOP, str(tmp_path)
    outcomes = WORLD.outcomes(4, train_until_rank_1_gets, *args, stopped=[1])
    assert outcomes[0].error == "died"  # in a collective of gloo's, which waits for the other
    assert outcomes[0].exitcode == 1
    assert [outcomes[rank].error for rank in (2, 3)] == ["", ""]
    assert [outcomes[rank].result["members"] for rank in (2, 3)] == [(2, 3)] * 2


@exhaustive
def test_sigterm_to_one_rank_stops_all_after_the_same_batch(tmp_path: Path) -> None:
    """The other replica too, which could go on without this one."""
    args = signal.SIGTERM, str(tmp_path)
    ends = [outcome.error for outcome in WORLD.outcomes(4, train_until_rank_1_gets, *args)]
    num_batches = ends[0].split()[-2]
    for rank, end in enumerate(ends):
        stopped = f"all ranks stopped, rank {rank} after {num_batches} batches"
        assert end == f"SystemExit: rank 1 received SIGTERM; {stopped}"
