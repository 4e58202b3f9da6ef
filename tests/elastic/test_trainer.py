"""Training goes on without a rank that is lost, through the Trainer, on real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.elastic.members import Members
from lightning_dsgd.elastic.trainer import TrainerFace
from lightning_dsgd.elastic.turnover import Turnover
from lightning_dsgd.elastic.views import ChangingViews
from lightning_dsgd.lab.callbacks import CommunicationMonitor
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.trainer.children import Processes
from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.trainer.sessions import TrainerSession
from tests.elastic.test_plain import LOSS_UNTRAINED, PERIODS, SURVIVES
from tests.support.doomed import Doomed, Plan, await_leave
from tests.support.killed import NUM_RANKS, kill_after, kill_at_random
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


class KilledLater(Logging):
    """One rank is killed some time after its first batch has begun."""

    def __init__(self, folder: str, lost: int, after_s: float) -> None:
        super().__init__(folder, ())
        self.lost, self.after_s = lost, after_s

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.num_batches == 0 and self.global_rank == self.lost:
            kill_after(self.after_s)
        return super().training_step(batch, batch_idx)


def fit_until_killed(name: str, folder: str, lost: int, after_s: float) -> dict[str, Any]:
    return fit(name, folder, None, KilledLater(folder, lost, after_s), NUM_RANKS)


def fit(
    name: str, folder: str, plan: Plan | None, model: Logging | None = None, devices: int = 3
) -> dict[str, Any]:
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    callbacks = [saver, EarlyStopping("error", patience=100), CommunicationMonitor()]
    options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": NUM_EPOCHS}
    options |= {"logger": CSVLogger(folder, "logs"), "log_every_n_steps": 1}
    given = SURVIVES | PERIODS.get(name, {})
    train = trainer(strategy_of(name, **given), devices, **options)
    model = Logging(folder, () if plan is None else (plan,)) if model is None else model
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


def check_checkpoint(path: Path, num_members: int) -> None:
    """Of the last epoch, with a replica of every rank that is left."""
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == NUM_EPOCHS - 1
    mark = record.save_of(saved)
    assert mark is not None
    assert mark.world_size == num_members
    files = [Path(f"{path}.replicas", f"rank_{rank:05d}.pt") for rank in range(num_members)]
    assert sorted(Path(f"{path}.replicas").iterdir()) == files
    marks = [record.save_of(torch.load(file, weights_only=True)) for file in files]
    assert [m.save_number for m in marks if m is not None] == [mark.save_number] * num_members


def check(outcomes: list[Any], lost: int, folder: Path) -> None:
    """The ranks that are left have trained to the end, together."""
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    check_checkpoint(folder / "last.ckpt", len(left))
    for number, outcome in enumerate(left):
        assert outcome.error == ""
        assert outcome.exitcode == 0
        assert outcome.result["weights"] == left[0].result["weights"]
        assert outcome.result["epoch"] == NUM_EPOCHS
        assert outcome.result["is_first"] == (number == 0)
        assert outcome.result["num_members"] == len(left)
        # 256 samples in batches of 8, from the epoch after the loss on
        assert outcome.result["num_batches"] == 256 / 8 / len(left)
    assert left[0].result["figures"]["dsgd/num_members"] == len(left)
    assert left[0].result["figures"]["loss"] < LOSS_UNTRAINED
    assert sum(len(f.read_text().splitlines()) for f in folder.rglob("metrics.csv")) > 5


@cases("name, lost", now=[("local_sgd", 0)], later=[("wagma", 2)])
def test_a_rank_is_killed_and_the_others_train_to_the_end(name, lost, tmp_path):
    outcomes = WORLD.outcomes(3, fit, name, str(tmp_path), Plan(lost, "SIGKILL", at=20))
    check(outcomes, lost, tmp_path)


@cases("name, leaves", now=[("local_sgd", 0)], later=[("wagma", 1)])
def test_a_rank_that_gets_sigterm_leaves_and_the_others_train_to_the_end(name, leaves, tmp_path):
    outcomes = WORLD.outcomes(3, fit, name, str(tmp_path), Plan(leaves, "SIGTERM", at=20))
    assert outcomes[leaves].error.endswith(
        f"rank {leaves} received SIGTERM and has left; the others go on"
    )
    check(outcomes, leaves, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", some(ALGORITHMS, ("local_sgd", "hpsgd")))
def test_any_rank_is_killed_at_any_time(name, tmp_path):
    """A rank may be lost after the last epoch: the others then count it, or do not."""
    for outcomes, lost, folder in kill_at_random(WORLD, fit_until_killed, name, tmp_path, 2.0):
        left = [each for rank, each in enumerate(outcomes) if rank not in lost]
        for outcome in left:
            assert (outcome.error, outcome.exitcode) == ("", 0)
            assert outcome.result["weights"] == left[0].result["weights"]
            assert outcome.result["epoch"] == NUM_EPOCHS
            assert outcome.result["num_members"] in range(len(left), NUM_RANKS + 1)
        saved = torch.load(folder / "last.ckpt", weights_only=True)
        assert saved["epoch"] == NUM_EPOCHS - 1


def test_ranks_that_are_forked_are_refused():
    with pytest.raises(ValueError, match="must not be forked or spawned"):
        members().check_start("fork")


def members() -> Members:
    made = Members(Opening(choose("a test", Options, {}), print), TrainerFace, None)
    TrainerSession(Processes(), made)
    return made


@pytest.mark.parametrize(
    ("most", "num_members", "invited"),
    [(2, 2, ()), (2, 1, (5,)), (4, 2, (5, 7))],
)
def test_as_many_are_invited_as_there_is_room_for(most, num_members, invited):
    views = ChangingViews()
    views.newcomers = lambda: (5, 7, 8)  # type: ignore[method-assign]
    view = SimpleNamespace(world_size=num_members, views=views)
    calls: Any = SimpleNamespace(view=view)
    nobody: Any = None
    assert Turnover(nobody, nobody, calls, nobody, None, most).newcomers() == [*invited]


def test_a_collective_of_some_ranks_is_refused():
    strategy = strategy_of("local_sgd", on_loss="continue")
    strategy.session._net = SimpleNamespace(is_forks=False, check_process=lambda: None)
    for ask in (strategy.all_gather, strategy.reduce):
        with pytest.raises(ValueError, match=r"must be of all ranks .* got group='some'"):
            ask(torch.ones(()), group="some")


def test_a_process_that_comes_later_needs_a_training():
    session = members().session
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
