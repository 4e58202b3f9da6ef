"""Replicas in shards go on without one that has lost a rank: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_dsgd as dsgd
from lightning_dsgd import decentralized
from lightning_dsgd.session import record
from lightning_dsgd.sharded import together
from lightning_dsgd.transport import PeerLost
from tests.elastic.test_plain import Begun, Places
from tests.sharded.plain.test_sharded import (
    ALGORITHMS,
    Network,
    batches,
    loss_of,
    make,
    make_mesh,
    whole,
)
from tests.support.killed import NUM_RANKS, kill_at_random
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome

exhaustive = pytest.mark.exhaustive
WORLD = FitWorld(timeout_s=60.0)
NUM_EPOCHS = 4
NUM_BATCHES = 8
SURVIVES = {"timeout_s": 60.0, "heartbeat_timeout_s": 20.0, "on_loss": "continue"}


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
                replica.save(Path(folder, "saved.pt"), epoch=epoch)
            places.at("end")
            members, is_first = replica.members, replica.is_first
            metrics = replica.metrics()
    except PeerLost:
        Path(folder, f"ended_{rank}").touch()
        raise
    Path(folder, f"done_{rank}").touch()
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


def train_until_killed(name: str, folder: str, lost: int, after_s: float) -> dict[str, Any]:
    return train_in(name, folder, Begun(lost, after_s), 2)


def check_left(
    outcomes: list[Outcome], lost: list[int], folder: Path, *, may_be_done: bool = False
) -> None:
    """Replicas that are whole have trained to the end, together; the others name who is lost.

    A rank may be lost after the last figures, when all is done: then these count it.  Then the
    others of its replica may be through with training, if `may_be_done`: what fails is `whole`.
    """
    broken = {rank // 2 for rank in lost}
    left = [o for rank, o in enumerate(outcomes) if rank // 2 not in broken]
    assert [outcome.error for outcome in left] == [""] * len(left)
    for outcome in left:
        assert torch.equal(outcome.result["weights"], left[0].result["weights"])
        assert torch.equal(outcome.result["shown"], left[0].result["shown"])
        assert bool(outcome.result["weights"].isfinite().all())
        assert outcome.result["members"] == left[0].result["members"]
        assert outcome.result["num_members"] == len(outcome.result["members"])
    for rank, outcome in enumerate(outcomes):
        if rank // 2 in broken and rank not in lost and outcome.error:
            [dead] = [r for r in lost if r // 2 == rank // 2]
            why = f"rank {rank} cannot go on without rank {dead}, which held shards of its replica"
            is_done = may_be_done and Path(folder, f"done_{rank}").exists()
            assert why in outcome.error or is_done, outcome.error
    saved = torch.load(folder / "saved.pt", weights_only=True)
    assert saved["extras"]["epoch"] == NUM_EPOCHS - 1
    assert saved["state_dict"].keys() == Network().state_dict().keys()
    mark = record.save_of(saved)
    assert mark is not None
    assert mark.num_shards == 2
    assert len(outcomes) >= mark.world_size >= len(left)


@cases(
    "name, lost, doomed, uneven",
    now=[("local_sgd", 0, "backward 13", 0)],
    later=[
        ("wagma", 3, "batch 11", 3),
        ("local_sgd", 1, "evaluation 2", 0),
        ("local_sgd", 2, "save 2", 3),
        ("local_sgd", 0, "gather 2", 0),
        ("sgp", 1, "end 1", 0),
    ],
)
def test_a_rank_is_killed_and_the_other_replica_trains_to_the_end(
    name: str, lost: int, doomed: str, uneven: int, tmp_path: Path
) -> None:
    outcomes = WORLD.outcomes(4, train, name, str(tmp_path), lost, doomed, uneven)
    check_left(outcomes, [lost], tmp_path, may_be_done=doomed == "end 1")
    left = (2, 3) if lost < 2 else (0, 1)
    for rank in left:
        result = outcomes[rank].result
        assert result["members"] == left or doomed == "end 1"
        assert result["is_first"] == (rank == result["members"][0])
        assert result["view"] == float(result["members"] == left)
        assert result["sums"][0] in (2.0, 4.0)
        assert result["sums"][-1] == 2.0 or doomed == "end 1"
    partner = lost ^ 1
    if doomed != "end 1":
        killed, ended = (tmp_path / name for name in ("killed", f"ended_{partner}"))
        assert ended.stat().st_mtime - killed.stat().st_mtime < 40.0
        assert outcomes[partner].error.startswith(f"PeerLost: rank {lost} ")


@exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["wagma", "popsgd"])
def test_any_rank_is_killed_at_any_time(name: str, tmp_path: Path) -> None:
    assert NUM_RANKS == 4
    for outcomes, lost, folder in kill_at_random(
        WORLD, train_until_killed, name, tmp_path, latest_s=1.0
    ):
        check_left(outcomes, lost, folder, may_be_done=True)


def train_beside_one_that_stops(folder: str, stopped: int) -> Any:
    class Stops(Places):
        def at(self, place: str) -> None:
            super().at(place)
            if place == "batch" and self._counts["batch"] == 10 and dist.get_rank() == stopped:
                os.kill(os.getpid(), signal.SIGSTOP)

    return train_in("local_sgd", folder, Stops(""), 0)


@exhaustive
def test_a_rank_whose_partner_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    args = str(tmp_path), 1
    outcomes = WORLD.outcomes(4, train_beside_one_that_stops, *args, stopped=[1])
    assert outcomes[0].error == "died"  # in a collective of gloo's, which waits for the other
    assert outcomes[0].exitcode == 1
    assert [outcomes[rank].error for rank in (2, 3)] == ["", ""]
    assert [outcomes[rank].result["members"] for rank in (2, 3)] == [(2, 3)] * 2


def stop(folder: str) -> str:
    mesh = make_mesh()
    model, optimizer = make(mesh)
    with decentralized(
        *(model, optimizer, dsgd.LocalSGD(3)), replicas=mesh["replica"], **SURVIVES
    ) as replica:
        try:
            for number, (x, y) in enumerate(replica.batches(batches(1000, replica.rank))):
                if number == 20 and replica.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
        except SystemExit as end:
            replica.save(Path(folder, "stopped.pt"), why=str(end))
            raise
    return "not stopped"


@exhaustive
def test_sigterm_to_one_rank_stops_all_after_the_same_batch(tmp_path: Path) -> None:
    errors = [o.error for o in WORLD.outcomes(4, stop, str(tmp_path))]
    assert all("rank 1 received SIGTERM; all ranks stopped" in error for error in errors), errors
    assert "rank 1" in torch.load(tmp_path / "stopped.pt", weights_only=True)["extras"]["why"]
