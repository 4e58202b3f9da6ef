"""Ranks that the process of the script forks or spawns: it gets their weights, or their error."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import some_now
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import ParentWorld


class Noted(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(weights(pl_module), Path(self.folder, f"rank_{trainer.global_rank}.pt"))


def ranks_weights(folder: str) -> list[torch.Tensor]:
    return [torch.load(Path(folder, f"rank_{rank}.pt")) for rank in range(2)]


# Weights come back
def fit_twice(name: str, method: str, folder: str) -> None:
    model = Regression()
    seen = [weights(model)]
    for _ in range(2):
        saves = ModelCheckpoint(folder, monitor="val_loss")
        fitter = trainer(
            strategy_of(name, start_method=method),
            2,
            callbacks=[Noted(folder), saves],
            enable_checkpointing=True,
        )
        fitter.fit(model, loader(), loader(32))
        assert all(torch.equal(weights(model), theirs) for theirs in ranks_weights(folder))
        seen.append(weights(model))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])

    (validated,) = fitter.validate(model, loader(32))
    (tested,) = fitter.test(model, loader(32), ckpt_path="best")
    (batch,) = loader(32, 32)
    assert validated["val_loss"] == pytest.approx(float(model.eval().loss(batch)), rel=1e-5)
    saved = fitter.strategy.load_checkpoint(saves.best_model_path)
    model.load_state_dict(saved["state_dict"])
    assert tested["val_loss"] == pytest.approx(float(model.loss(batch)), rel=1e-5)
    fitter.save_checkpoint(Path(folder, "by_hand.ckpt"))

    with pytest.raises(NotImplementedError, match="creating a new Trainer"):
        fitter.fit(model, loader())
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    atexit._run_exitfuncs()  # which processes of multiprocessing do not
    assert not ignored


@some_now("method", ["fork", "forkserver", "spawn"], now=("fork",))
def test_weights_of_forked_ranks_come_back_and_are_trained_on(method: str, tmp_path: Path) -> None:
    (found,) = ParentWorld().outcomes(1, fit_twice, "wagma", method, str(tmp_path))
    assert not found.error
    Regression.load_from_checkpoint(tmp_path / "by_hand.ckpt")


def fit_after_a_failure(folder: str) -> list[str]:
    errors = []
    model = Failing(folder)
    fitter = trainer(strategy_of("local_sgd", start_method="fork"), 2)
    for _ in range(3):
        try:
            fitter.fit(model, loader())
        except torch.multiprocessing.ProcessRaisedException as error:
            errors.append(str(error).strip())
        assert not active_children()
    fitter.save_checkpoint(Path(folder, "saved.ckpt"))  # which warns where ranks are lost
    return errors


class Failing(Regression):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        failures = list(Path(self.folder).glob("failed_*"))
        if self.global_rank == 1 and batch_idx == 3 and len(failures) < 2:
            Path(self.folder, f"failed_{len(failures)}").touch()
            raise ValueError("no such luck")
        return super().training_step(batch, batch_idx)


def test_the_parent_raises_what_its_rank_has_raised_and_trains_again(tmp_path: Path) -> None:
    (errors,) = ParentWorld().run(1, fit_after_a_failure, str(tmp_path))
    assert len(errors) == 2
    for error in errors:
        assert "Process 1 terminated with the following error" in error
        assert error.endswith("ValueError: no such luck")


# Threads
def fit_after_computing() -> list[int]:
    """As in a notebook, where a cell above has computed something."""
    torch.set_num_threads(2)
    os.environ["OMP_NUM_THREADS"] = "2"
    model = Multiplying()
    multiply().sum().backward()
    for _ in range(2):
        fitter = trainer(strategy_of("dpsgd", start_method="fork"), 2, limit_train_batches=2)
        fitter.fit(model, loader())
        multiply()
    return [int(fitter.callback_metrics["num_threads"]), torch.get_num_threads()]


def multiply() -> torch.Tensor:
    x = torch.ones(300, 300, requires_grad=True)
    return (x @ x).exp()


class Multiplying(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        multiply().sum().backward()
        self.log("num_threads", float(torch.get_num_threads()))
        return super().training_step(batch, batch_idx)


def test_ranks_may_be_forked_after_a_computation() -> None:
    assert ParentWorld().run(1, fit_after_computing) == [[2, 2]]


# A rank that fails ends all
class Leaving(Regression):
    """All of its ranks end as torch takes good ranks to end, which have left their results."""

    def on_train_epoch_end(self) -> None:
        raise SystemExit


def fit_and_leave() -> None:
    trainer(strategy_of("no_sync", start_method="fork"), 2).fit(Leaving(), loader())


def test_forked_ranks_without_a_result_are_not_waited_for() -> None:
    (found,) = ParentWorld().outcomes(1, fit_and_leave)
    assert "ProcessExitedException" in found.error
    assert "terminated with exit code 1" in found.error


def fit_until_the_parent_gets(folder: str, signum: int) -> None:
    strategy = strategy_of("local_sgd", start_method="fork")
    trainer(strategy, 2, max_epochs=100_000).fit(ParentKiller(folder, signum), loader())


class ParentKiller(Regression):
    def __init__(self, folder: str, signum: int) -> None:
        super().__init__()
        self.folder, self.signum = folder, signum

    def on_train_start(self) -> None:
        Path(self.folder, f"pid_{self.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0 and self.global_step == 20:
            os.kill(os.getppid(), self.signum)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_forked_ranks_end_with_the_script_that_gets_a_signal(signum: int, tmp_path: Path) -> None:
    (found,) = ParentWorld().outcomes(1, fit_until_the_parent_gets, str(tmp_path), signum)
    if signum == signal.SIGKILL:
        assert found.exitcode == -signal.SIGKILL
    else:
        assert found.error.startswith("SystemExit")
    for rank in range(2):
        wait_for_the_end(int(Path(tmp_path, f"pid_{rank}").read_text()))


def wait_for_the_end(pid: int) -> None:
    """Of a process that need not be a child of this one; the test's time is its limit."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([handle], [], [])
    os.close(handle)


# What cannot be
def fit_under_a_launcher() -> None:
    os.environ.update(LOCAL_RANK="0", WORLD_SIZE="2")
    trainer(strategy_of("dpsgd", start_method="fork"), 2)


def test_ranks_are_not_forked_where_a_launcher_has_started_them() -> None:
    (found,) = ParentWorld().outcomes(1, fit_under_a_launcher)
    assert "ValueError: start_method must be left out" in found.error
    assert "got start_method='fork' in the environment of Lightning" in found.error
