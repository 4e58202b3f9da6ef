"""A plain loop goes on without a rank that is lost: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_dsgd as dsgd
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.session.checkpoint import record
from tests.plain.test_training import loader_of, make, replica_of, same, steps
from tests.support.killed import kill_after, kill_at_random
from tests.support.models import Regression, weights
from tests.support.thorough import cases, some
from tests.support.worlds import FitWorld

exhaustive = pytest.mark.exhaustive
WORLD = FitWorld(timeout_s=60.0)
NUM_EPOCHS = 4
# With their default density this small model diverges at this rate, also where nobody is lost.
SPARSE = ("oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussian_topk")
PERIODS = {"local_sgd": {"sync_period": 4}, **{name: {"density": 0.5} for name in SPARSE}}
SURVIVES = {"timeout_s": 60.0, "heartbeat_timeout_s": 20.0, "on_loss": "continue"}


LOSS_UNTRAINED = 10.0
"""The target's variance."""
CALM_LR = 0.01
"""With which every algorithm learns from these few batches, also from those of one rank alone."""


def loss_of(model: Regression) -> float:
    with torch.no_grad():
        return float(torch.stack([model.loss(batch) for batch in loader_of(100)]).mean())


def make_calm() -> tuple[Regression, torch.optim.Optimizer]:
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = CALM_LR
    return model, optimizer


def algorithm_of(name: str) -> Any:
    return ALGORITHMS[name](**PERIODS.get(name, {}))


class Places:
    """Names each place of the loop that a rank comes to, and is killed at one of them."""

    def __init__(self, doomed: str) -> None:
        self._doomed, self._counts = doomed, dict[str, int]()

    def at(self, place: str) -> None:
        """Of a place that it comes to again, the number of the time belongs to its name."""
        self._counts[place] = self._counts.get(place, 0) + 1
        if f"{place} {self._counts[place]}" == self._doomed:
            os.kill(os.getpid(), signal.SIGKILL)


class Begun(Places):
    """Where a rank comes to its first batch, it is killed so long after that."""

    def __init__(self, lost: int, after_s: float) -> None:
        super().__init__("")
        self._is_lost, self._after_s = dist.get_rank() == lost, after_s

    def at(self, place: str) -> None:
        if self._is_lost and not self._counts:
            kill_after(self._after_s)
        super().at(place)


def train_to(places: Places, name: str, folder: str, uneven: int) -> dict[str, Any]:
    model, optimizer = make_calm()
    sums = []
    with replica_of(model, optimizer, algorithm_of(name), **SURVIVES) as replica:
        batches = replica.batches(loader_of(replica.rank, 12 + uneven * replica.rank))
        for epoch in range(NUM_EPOCHS):
            for batch in batches:
                places.at("batch")
                steps(model, optimizer, [batch])
            with replica.consensus():
                places.at("evaluation")
                sums.append(replica.mean(1.0) * replica.world_size)
            replica.barrier()
            if replica.is_first:
                Path(folder, "first").write_text(str(replica.rank))
            places.at("save")
            replica.save(Path(folder, "saved.pt"), epoch=epoch)
        metrics = replica.metrics()
        result = {"sums": sums, "members": replica.members, "is_first": replica.is_first}
    result |= {"num_members": metrics["num_members"], "view": metrics["view"]}
    return result | {"weights": weights(model), "loss": loss_of(model)}


def train(name: str, folder: str, lost: int, doomed: str, uneven: int) -> dict[str, Any]:
    places = Places(doomed if dist.get_rank() == lost else "")
    return train_to(places, name, folder, uneven)


def train_until_killed(name: str, folder: str, lost: int, after_s: float) -> dict[str, Any]:
    return train_to(Begun(lost, after_s), name, folder, 2)


def check_left(
    outcomes: list[Any], lost: list[int], file: Path, *, may_be_done: bool = False
) -> None:
    """The ranks that are left have trained to the end, together, and have saved to the file.

    A rank may be lost after the last figures, when all is done (`may_be_done`): then some or all
    count it.
    """
    left = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert [outcome.error for outcome in left] == [""] * len(left)
    assert same([outcome.result["weights"] for outcome in left])
    assert left[0].result["loss"] < LOSS_UNTRAINED
    for outcome in left:
        assert set(outcome.result["members"]) >= set(range(len(outcomes))) - set(lost)
        assert outcome.result["members"] == left[0].result["members"] or may_be_done
        assert outcome.result["num_members"] == len(outcome.result["members"])
    saved = torch.load(file, weights_only=True)
    assert saved.get("extras", saved)["epoch"] == NUM_EPOCHS - 1
    mark = record.save_of(saved)
    assert mark is not None
    assert len(outcomes) >= mark.world_size >= len(left)


@cases(
    "name, lost, doomed, uneven",
    now=[("wagma", 0, "batch 20", 3)],
    later=[("allreduce", 2, "evaluation 2", 0), ("local_sgd", 0, "save 2", 0)],
)
def test_a_rank_is_killed_and_the_others_train_to_the_end(name, lost, doomed, uneven, tmp_path):
    outcomes = WORLD.outcomes(3, train, name, str(tmp_path), lost, doomed, uneven)
    check_left(outcomes, [lost], tmp_path / "saved.pt")
    left = [rank for rank in range(3) if rank != lost]
    for rank in left:
        result = outcomes[rank].result
        assert result["members"] == tuple(left)
        assert result["is_first"] == (rank == left[0])
        assert result["view"] == 1.0
        assert result["sums"][0] in (2.0, 3.0)
        assert result["sums"][-1] == 2.0
    assert (tmp_path / "first").read_text() == str(left[0])


def stop(folder: str, how: str) -> str:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD(4), **SURVIVES) as replica:
        try:
            for number, batch in enumerate(replica.batches(list(loader_of(0)) * 1000)):
                if number == 20 and replica.rank in (0, 1):
                    os.kill(os.getpid(), getattr(signal, how))
                steps(model, optimizer, [batch])
        except (SystemExit, KeyboardInterrupt) as end:
            replica.save(Path(folder, "stopped.pt"), why=str(end))
            raise
    return "not stopped"


@cases("how", now=["SIGTERM"], later=["SIGINT"])
def test_all_ranks_stop_and_save_where_too_few_would_stay_or_one_is_interrupted(how, tmp_path):
    outcomes = WORLD.outcomes(3, stop, str(tmp_path), how)
    errors = [outcome.error for outcome in outcomes]
    stopped = "; all ranks stopped"
    # One of the two may have left before the other was told to.
    assert all(stopped in each or " has left; the others go on" in each for each in errors), errors
    assert stopped in errors[2]
    assert how == "SIGTERM" or all(stopped in error for error in errors)
    saved = torch.load(tmp_path / "stopped.pt", weights_only=True)
    assert stopped in saved["extras"]["why"]


def diverge() -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, algorithm_of("oktopk"), **SURVIVES) as replica:
        replica.barrier()
        with pytest.raises(RuntimeError, match="loaded before the ranks meet for anything else"):
            replica.load("nowhere")
        for number, batch in enumerate(loader_of(replica.rank, 12), 1):
            if (replica.rank, number) == (0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            bad = torch.nan if (replica.rank, number) == (2, 9) else 1.0
            steps(model, optimizer, [[each * bad for each in batch]])


def test_all_ranks_end_where_what_they_train_is_not_finite():
    """Whatever on_loss says: without that rank, the others would train what has diverged."""
    outcomes = WORLD.outcomes(4, diverge)
    errors = [outcome.error for outcome in outcomes]
    assert errors[2].startswith("Diverged: "), errors
    for rank in (1, 2, 3):
        assert "must be finite, got NaN or inf on rank 2 at step 9; look at" in errors[rank]
        assert outcomes[rank].seconds < WORLD.timeout_s
    assert errors[1].startswith("PeerLost: rank ")


def compile_on_rank_1(busy_s: float) -> tuple[int, ...]:
    """In Python, so that the other threads of its process hardly get the interpreter."""
    model, optimizer = make_calm()
    limits = SURVIVES | {"heartbeat_timeout_s": busy_s / 3}
    with replica_of(model, optimizer, algorithm_of("wagma"), **limits) as replica:
        end = time.monotonic() + busy_s * (replica.rank == 1)
        for batch in replica.batches(loader_of(replica.rank, 8)):
            while time.monotonic() < end:
                pass
            steps(model, optimizer, [batch])
        return replica.members


@exhaustive
def test_a_rank_that_compiles_for_longer_than_the_heartbeat_is_not_lost():
    assert WORLD.run(3, compile_on_rank_1, 18.0) == [(0, 1, 2)] * 3


@exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", some(ALGORITHMS, ("wagma", "oktopk")))
def test_any_rank_is_killed_at_any_time(name, tmp_path):
    """In the simulated world, all algorithms: test_algorithms.py."""
    for outcomes, lost, folder in kill_at_random(WORLD, train_until_killed, name, tmp_path, 1.0):
        check_left(outcomes, lost, folder / "saved.pt", may_be_done=True)
