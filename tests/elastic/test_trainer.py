"""Training goes on without a rank that is lost, through the Trainer, on real processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_dsgd import STRATEGIES
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.elastic.joining import TrainerMembers
from lightning_dsgd.elastic.views import ChangingViews
from lightning_dsgd.lab.callbacks import CommunicationMonitor
from lightning_dsgd.session import record
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.trainer.children import Processes
from lightning_dsgd.trainer.sessions import TrainerSession
from tests.elastic.test_plain import LOSS_UNTRAINED, PERIODS, SURVIVES
from tests.support.doomed import Doomed, Plan, await_leave
from tests.support.killed import kill_after, kill_at_random
from tests.support.models import loader, trainer
from tests.support.thorough import cases, some
from tests.support.worlds import FitWorld

WORLD = FitWorld(timeout_s=60.0)
NUM_EPOCHS = 6


class Logging(Doomed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        await_leave(self.trainer.strategy.session)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("one", torch.ones(()), sync_dist=True, reduce_fx="sum")
        self.log("error", torch.ones(()), sync_dist=True)


class Diverging(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if (self.global_rank, self.num_batches) == (1, 9) else loss


def fit(
    name: str,
    folder: str,
    plans: tuple[Plan, ...],
    devices: int,
    min_ranks: int | None = None,
    model_type: type[Logging] = Logging,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    callbacks = [saver, EarlyStopping("error", patience=100), CommunicationMonitor()]
    options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": NUM_EPOCHS}
    options |= {"logger": CSVLogger(folder, "logs"), "log_every_n_steps": 1}
    given = SURVIVES | {"min_ranks": min_ranks} | PERIODS.get(name, {})
    train = trainer(STRATEGIES[name](**given), devices, **options)
    model = model_type(folder, plans)
    train.fit(model, loader(256), loader(32))
    if train.strategy.session.ranks.has_changed:
        with pytest.raises(ValueError, match="must not be used again once ranks were lost"):
            train.validate(model, loader(32), verbose=False)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "weights": weights.tolist(),
        "epoch": train.current_epoch,
        "is_first": train.is_global_zero,
        "num_members": train.strategy.session.world_size,
        "num_batches": train.num_training_batches,
        "figures": {k: float(v) for k, v in train.logged_metrics.items()},
    }


def fit_until_killed(name: str, folder: str, lost: int, after_s: float) -> dict[str, Any]:
    if int(os.environ["RANK"]) == lost:
        kill_after(after_s, Path(folder, f"batches_{lost}").exists)
    return fit(name, folder, (), devices=4)


def check_checkpoint(path: Path) -> int:
    """Of the last epoch, with a replica of every rank that saved it: how many did.

    A rank that is lost when it has said that its replica is written leaves it under the name that
    a load knows as well.
    """
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == NUM_EPOCHS - 1
    mark = record.save_of(saved)
    assert mark is not None
    ranks = range(mark.world_size)
    files = {rank: sorted(Path(f"{path}.replicas").glob(f"rank_{rank:05d}.pt*")) for rank in ranks}
    assert sum(map(len, files.values())) == len(list(Path(f"{path}.replicas").iterdir()))
    for rank in ranks:
        marks = [record.save_of(torch.load(file, weights_only=True)) for file in files[rank]]
        assert [m.save_number for m in marks if m is not None][-1] == mark.save_number
    return mark.world_size


def check(outcomes: list[Any], lost: list[int], folder: Path) -> None:
    """The ranks that are left have trained to the end, together.

    A rank may be lost after the last figures, after the last checkpoint or when all is done: each
    of these counts it, and what comes after the loss does not.
    """
    ranks = [rank for rank in range(len(outcomes)) if rank not in lost]
    left = [outcomes[rank] for rank in ranks]
    num_members = left[0].result["num_members"]
    num_saved = check_checkpoint(folder / "last.ckpt")
    counts = [left[0].result["figures"]["dsgd/num_members"], num_saved, num_members]
    assert len(outcomes) >= counts[0] >= counts[1] >= counts[2] >= len(left)
    for outcome in left:
        assert outcome.error == ""
        assert outcome.exitcode == 0
        assert outcome.result["weights"] == left[0].result["weights"]
        assert outcome.result["epoch"] == NUM_EPOCHS
        assert outcome.result["num_members"] == num_members
    first = ranks[0] if num_members == len(left) else 0
    assert [o.result["is_first"] for o in left] == [rank == first for rank in ranks]
    assert left[0].result["figures"]["loss"] < LOSS_UNTRAINED
    assert sum(len(f.read_text().splitlines()) for f in folder.rglob("metrics.csv")) > 5


@cases("name, lost", now=[("local_sgd", 0)], later=[("wagma", 2)])
def test_a_rank_is_killed_and_the_others_train_to_the_end(name, lost, tmp_path):
    plan = Plan(lost, "SIGKILL", at=20)
    outcomes = WORLD.outcomes(3, fit, name, str(tmp_path), (plan,), 3)
    check(outcomes, [lost], tmp_path)
    left = outcomes[1 if lost == 0 else 0].result
    assert left["num_members"] == left["figures"]["dsgd/num_members"] == 2
    for outcome in outcomes:  # 256 samples in batches of 8, from the epoch after the loss on
        assert outcome.result is None or outcome.result["num_batches"] == 256 / 8 / 2


@cases("name, leaves", now=[("local_sgd", 0)], later=[("wagma", 1)])
def test_a_rank_that_gets_sigterm_leaves_and_the_others_train_to_the_end(name, leaves, tmp_path):
    plan = Plan(leaves, "SIGTERM", at=20)
    outcomes = WORLD.outcomes(3, fit, name, str(tmp_path), (plan,), 3)
    assert outcomes[leaves].error.endswith(
        f"rank {leaves} received SIGTERM and has left; the others go on"
    )
    check(outcomes, [leaves], tmp_path)
    left = outcomes[2].result
    assert left["num_members"] == left["figures"]["dsgd/num_members"] == 2
    assert left["num_batches"] == 256 / 8 / 2


@pytest.mark.exhaustive
def test_all_ranks_stop_where_too_few_would_stay(tmp_path):
    plans = tuple(Plan(rank, "SIGTERM", at=20) for rank in (0, 1))
    outcomes = WORLD.outcomes(3, fit, "local_sgd", str(tmp_path), plans, 3)
    errors = [outcome.error for outcome in outcomes]
    ends = ("; all ranks stopped, as too few would stay", " has left; the others go on")
    assert all(error.endswith(ends) for error in errors), errors
    assert errors[2].endswith(ends[0])


def test_all_ranks_end_where_what_they_train_is_not_finite(tmp_path):
    outcomes = WORLD.outcomes(3, fit, "oktopk", str(tmp_path), (), 3, None, Diverging)
    for outcome in outcomes:
        assert "gradients must be finite, got NaN or inf on rank 1 at step 9; look" in outcome.error


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", some(ALGORITHMS, ("local_sgd", "hpsgd")))
def test_any_rank_is_killed_at_any_time(name, tmp_path):
    for fit in kill_at_random(WORLD, fit_until_killed, name, tmp_path, latest_s=2.0):
        check(*fit)


def test_ranks_that_are_forked_are_refused():
    with pytest.raises(ValueError, match="must not be forked or spawned"):
        members(None).check_start("fork")


def members(max_ranks: int | None) -> TrainerMembers:
    made = TrainerMembers(Opening(choose("a test", Options, {}), print), None, max_ranks)
    TrainerSession(Processes(), made)
    return made


@pytest.mark.parametrize(
    ("most", "num_members", "invited"),
    [(None, 2, ()), (None, 1, (5,)), (4, 2, (5, 7)), (3, 2, (5,))],
)
def test_as_many_are_invited_as_there_is_room_for(most, num_members, invited):
    ranks = members(most)
    ranks._num_ranks = 2
    views = ChangingViews()
    views.newcomers = lambda: (5, 7, 8)  # type: ignore[method-assign]
    view = SimpleNamespace(world_size=num_members, views=views)
    ranks._calls = SimpleNamespace(view=view)  # type: ignore[assignment]
    assert ranks._newcomers() == [*invited]


def test_a_rank_besides_the_first_reads_what_one_of_these_reads():
    ranks = members(5)
    assert ranks.share({"num_replicas": 2, "rank": 1}) == {"num_replicas": 2, "rank": 1}
    assert ranks.share({"num_replicas": 2, "rank": 4}) == {"num_replicas": 2, "rank": 0}


def test_a_trainer_whose_ranks_have_changed_is_refused_with_what_has_happened():
    strategy = STRATEGIES["local_sgd"](on_loss="continue", max_ranks=3)
    ranks = strategy.session.ranks
    ranks._num_ranks, ranks._members = 2, (0, 1, 2)
    with pytest.raises(ValueError, match=r"lost or have joined, .* got the ranks \(0, 1, 2\) and"):
        strategy.setup_environment()


@pytest.mark.parametrize("ask", ["all_gather", "reduce"])
def test_a_collective_of_some_ranks_is_refused(ask):
    strategy = STRATEGIES["local_sgd"](on_loss="continue")
    strategy.session._net = SimpleNamespace(is_forks=False, check_process=lambda: None)
    with pytest.raises(ValueError, match=r"a collective must be of all ranks .* got group='some'"):
        getattr(strategy, ask)(torch.ones(()), group="some")


def test_a_process_that_comes_later_needs_a_training():
    session = members(None).session
    session.world_size = 2
    session.ranks.find_training(("localhost", 1), "fit")
    session.rank = 2
    with pytest.raises(ValueError, match="rank 2 was started to join a training of 2 ranks"):
        session.ranks.find_training(("localhost", 1), "fit")


def test_a_rank_that_ends_badly_ends_no_other_that_it_has_started():
    processes, child = Processes(), subprocess.Popen(["sleep", "100"])
    launcher = SimpleNamespace(procs=[child])
    try:
        processes.take_over(launcher, "popen", str)
        processes.forgive()
        processes.end_children(within_s=0.0)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
