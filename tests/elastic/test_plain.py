"""A plain loop goes on without a rank that is lost: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_dsgd as dsgd
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.session import record
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from tests.plain.test_training import loader_of, make, replica_of, same, steps
from tests.support.doomed import await_leave
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
    """Names each place of the loop that a rank comes to, and ends at one of them."""

    def __init__(self, doomed: str, signum: int = signal.SIGKILL) -> None:
        self._doomed, self._signum, self._counts = doomed, signum, dict[str, int]()

    def at(self, place: str) -> None:
        """Of a place that it comes to again, the number of the time belongs to its name."""
        self._counts[place] = self._counts.get(place, 0) + 1
        if f"{place} {self._counts[place]}" == self._doomed:
            os.kill(os.getpid(), self._signum)


class Begun(Places):
    """Where a rank comes to its first batch, or to a later one, it is killed so long after that."""

    def __init__(self, lost: int, after_s: float, num_before: int = 0) -> None:
        super().__init__("")
        self._is_lost = dist.get_rank() == lost
        self._after_s, self._num_before = after_s, num_before

    def at(self, place: str) -> None:
        is_it = place == "batch" and sum(self._counts.values()) == self._num_before
        if is_it and self._is_lost:
            kill_after(self._after_s)
        super().at(place)


def loop(
    replica: Any, model: Regression, optimizer: Any, folder: str, places: Places, batches: Any
) -> dict[str, Any]:
    sums = []
    for epoch in range(NUM_EPOCHS):
        for batch in batches:
            places.at("batch")
            await_leave(replica._session)
            steps(model, optimizer, [batch])
        with replica.consensus():
            places.at("evaluation")
            shown = weights(model)
            sums.append(replica.mean(1.0) * replica.world_size)
        replica.barrier()
        if replica.is_first:
            Path(folder, "first").write_text(str(replica.rank))
        places.at("save")
        replica.save(Path(folder, "saved.pt"), epoch=epoch)
    places.at("end")
    metrics = replica.metrics()
    return {
        "shown": shown,
        "sums": sums,
        "members": replica.members,
        "is_first": replica.is_first,
        "num_members": metrics["num_members"],
        "view": metrics["view"],
    }


def train_to(places: Places, name: str, folder: str, uneven: int) -> dict[str, Any]:
    model, optimizer = make_calm()
    with replica_of(model, optimizer, algorithm_of(name), **SURVIVES) as replica:
        batches = replica.batches(loader_of(replica.rank, 12 + uneven * replica.rank))
        result = loop(replica, model, optimizer, folder, places, batches)
    return result | {"weights": weights(model), "loss": loss_of(model)}


def train(
    name: str, folder: str, lost: int, doomed: str, uneven: int = 0, signum: int = signal.SIGKILL
) -> dict[str, Any]:
    places = Places(doomed if dist.get_rank() == lost else "", signum)
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
    later=[
        ("allreduce", 2, "evaluation 2", 0),
        ("local_sgd", 0, "save 2", 0),
        ("wagma", 1, "end 1", 0),
    ],
)
def test_a_rank_is_killed_and_the_others_train_to_the_end(name, lost, doomed, uneven, tmp_path):
    outcomes = WORLD.outcomes(3, train, name, str(tmp_path), lost, doomed, uneven)
    check_left(outcomes, [lost], tmp_path / "saved.pt", may_be_done=doomed == "end 1")
    left = [rank for rank in range(3) if rank != lost]
    for rank in left:
        result = outcomes[rank].result
        assert result["members"] == tuple(left) or doomed == "end 1"
        assert result["is_first"] == (rank == result["members"][0])
        assert result["view"] == float(3 - len(result["members"]))
        assert result["sums"][0] in (2.0, 3.0)
        assert result["sums"][-1] == 2.0 or doomed == "end 1"
    if doomed != "end 1":
        assert (tmp_path / "first").read_text() == str(left[0])


def test_a_rank_that_gets_sigterm_leaves_and_the_others_train_to_the_end(tmp_path):
    outcomes = WORLD.outcomes(
        3, train, "local_sgd", str(tmp_path), 0, "batch 15", 0, signal.SIGTERM
    )
    assert outcomes[0].error == "SystemExit: rank 0 received SIGTERM and has left; the others go on"
    check_left(outcomes, [0], tmp_path / "saved.pt")
    assert outcomes[1].result["members"] == (1, 2)


def test_sigterm_in_the_last_batch_ends_the_rank_once_all_have_trained_to_the_end(tmp_path):
    last = f"batch {12 * NUM_EPOCHS}"
    outcomes = WORLD.outcomes(2, train, "local_sgd", str(tmp_path), 1, last, 0, signal.SIGTERM)
    assert outcomes[1].error == "SystemExit: rank 1 received SIGTERM"
    check_left(outcomes, [1], tmp_path / "saved.pt")
    assert outcomes[0].result["members"] == (0, 1)


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


def stop_while_one_is_killed(folder: str) -> None:
    """Rank 0 stops; rank 1 would, but learns first that rank 2 is lost."""
    has_stopped, rank = Path(folder, "stopped"), dist.get_rank()
    really, calls = Session._stop_here, []

    def stop_here(self: Any, training: Any) -> None:
        calls.append(rank)
        if rank == 0:
            has_stopped.touch()
        while not has_stopped.exists():
            time.sleep(0.001)  # between two looks
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while rank == 1 and len(calls) == 1:
            self.net.check()
            time.sleep(0.001)  # between two looks
        really(self, training)

    Session._stop_here = stop_here  # type: ignore[assignment,method-assign]
    stop(folder, "SIGINT")


@exhaustive
def test_a_rank_that_a_loss_keeps_from_stopping_stops_too(tmp_path):
    outcomes = WORLD.outcomes(3, stop_while_one_is_killed, str(tmp_path))
    errors = [outcome.error for outcome in outcomes]
    assert all("received SIGINT; all ranks stopped" in error for error in errors[:2]), errors
    assert max(outcome.seconds for outcome in outcomes[:2]) < WORLD.timeout_s
    saved = torch.load(tmp_path / "stopped.pt", weights_only=True)
    assert "all ranks stopped" in saved["extras"]["why"]


def diverge(name: str, options: dict[str, Any]) -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, algorithm_of(name), **SURVIVES | options) as replica:
        for number, batch in enumerate(loader_of(replica.rank, 12), 1):
            if (replica.rank, number) == (0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            bad = torch.nan if (replica.rank, number) == (2, 9) else 1.0
            steps(model, optimizer, [[each * bad for each in batch]])


@cases(
    "name, options, what",
    now=[("oktopk", {}, "gradients must be finite, got NaN or inf on rank 2 at step 9; look at")],
    later=[
        (
            "wagma",
            {"check_finite": True},
            "every weight must be finite, got NaN or inf on rank 2 at step 9 in",
        )
    ],
)
def test_all_ranks_end_where_what_they_train_is_not_finite(name, options, what, tmp_path):
    """Whatever on_loss says: without that rank, the others would train what has diverged."""
    outcomes = WORLD.outcomes(4, diverge, name, options)
    errors = [outcome.error for outcome in outcomes]
    assert errors[2].startswith("Diverged: "), errors
    for rank in (1, 2, 3):
        assert what in errors[rank]
        assert outcomes[rank].seconds < WORLD.timeout_s
    assert errors[1].startswith("PeerLost: rank ")


def resume(folder: str, path: str) -> tuple[int, bool]:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD(4), **SURVIVES) as replica:
        epoch = replica.load(path)["epoch"]
        replica.barrier()
        with pytest.raises(RuntimeError, match="loaded before the ranks meet for anything else"):
            replica.load(path)
        steps(model, optimizer, replica.batches(loader_of(replica.rank)))
    return epoch, same([weights(model)])


@exhaustive
def test_those_that_are_left_resume_from_what_they_have_saved(tmp_path):
    outcomes = WORLD.outcomes(3, train, "local_sgd", str(tmp_path), 0, "batch 13")
    check_left(outcomes, [0], tmp_path / "saved.pt")
    assert WORLD.run(2, resume, str(tmp_path), str(tmp_path / "saved.pt")) == [(3, True)] * 2


def test_a_rank_that_has_left_gets_no_more_batches():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = dsgd.decentralized(model, optimizer, dsgd.WAGMA(), on_loss="continue")
    replica._session._phase = Phase.LEFT
    with pytest.raises(SystemExit, match="has left"):
        replica.batches([])


@exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", some(ALGORITHMS, ("wagma", "oktopk")))
def test_any_rank_is_killed_at_any_time(name, tmp_path):
    """In the simulated world, all algorithms: test_algorithms.py."""
    for outcomes, lost, folder in kill_at_random(WORLD, train_until_killed, name, tmp_path, 1.0):
        check_left(outcomes, lost, folder / "saved.pt", may_be_done=True)


# ---- the way of a lost rank ----
def files_of_a_loss(lost: int) -> tuple[list[str], list[str]]:
    """The package's files through which calls come to the wing's code, in a step and in a loss.

    A loss begins in the batch in which a rank is killed, and ends when the next one begins.
    """
    root, now = Path(dsgd.__file__).parent, [""]
    met: dict[str, set[str]] = {"step": set(), "loss": set()}

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if now[0] and event == "call" and frame and "/elastic/" in frame.f_code.co_filename:
            while frame is not None:
                file = Path(frame.f_code.co_filename)
                if root in file.parents:
                    met[now[0]].add(f"{file.relative_to(root)}")
                frame = frame.f_back

    threading.setprofile(note)  # for the mesh's thread, which is to come
    sys.setprofile(note)
    model, optimizer = make()
    with replica_of(model, optimizer, algorithm_of("dpsgd"), **SURVIVES) as replica:
        for number, batch in enumerate(replica.batches(loader_of(replica.rank, 12))):
            now[0] = {4: "step", 5: "loss"}.get(number, "" if len(replica.members) < 3 else now[0])
            if number == 5 and replica.rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            steps(model, optimizer, [batch])
        threading.setprofile(None)
        sys.setprofile(None)
    return sorted(met["step"]), sorted(met["loss"])


def test_a_lost_rank_comes_through_few_files_of_two_rooms() -> None:
    """Whoever follows a loss reads these; other rooms are on the way of every step as well."""
    outcomes = WORLD.outcomes(3, files_of_a_loss, 2)
    for step, loss in (each.result for each in outcomes[:2]):
        rooms = "transport/", "elastic/"
        way = [file for file in loss if file.startswith(rooms)]
        assert 8 < len(way) <= 12, "\n".join(way)
        assert {file for file in loss if not file.startswith(rooms)} <= {*step}


def compile_on_rank_1(busy_s: float) -> tuple[int, ...]:
    """In Python, so that its other threads hardly get the interpreter."""
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
def test_a_rank_that_compiles_for_longer_than_the_heartbeat_ends_nothing():
    assert WORLD.run(3, compile_on_rank_1, 9.0) == [(0, 1, 2)] * 3
