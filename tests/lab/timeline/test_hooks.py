"""`StepTrace` among other callbacks, and on ranks that come later: whose time is whose."""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dsgd import StepTrace
from lightning_dsgd.lab.diagnose.times import read
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.timeline import step_trace
from lightning_dsgd.lab.timeline.trace import Step, read_folder
from tests.support.models import Regression, loader, trainer
from tests.support.worlds import FitWorld

SLOW_S = 0.02
COPY_S = 0.2
STEPS = 26
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Slow(L.Callback):
    """Takes its time in every hook of a step, on rank 1."""


def _slow(self: Slow, trainer: Any, *args: Any) -> None:
    if trainer.global_rank == 1:
        time.sleep(SLOW_S)


for _name in HOOKS:
    setattr(Slow, _name, _slow)


def fit_with_slow(folder: Path, place: int) -> None:
    callbacks: list[L.Callback] = [Slow()]
    callbacks.insert(place, StepTrace(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = trainer("ddp", 2, callbacks=callbacks)
        train.fit(Regression(), loader(STEPS * 16))
    assert [c for c in train.callbacks if c in callbacks] == callbacks
    assert not any(isinstance(c, step_trace._First | step_trace._Last) for c in train.callbacks)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_the_time_of_other_callbacks_is_between(place: int, tmp_path: Path) -> None:
    FitWorld().run(2, fit_with_slow, tmp_path, place)
    slow = read_folder(tmp_path)[1]
    for kind in ("forward", "backward", "optimizer"):
        took = [sum(end - begin for begin, end in getattr(s, kind)) for s in slow.steps]
        assert statistics.median(took) < SLOW_S, kind
    seen = read(tmp_path)
    found = judge(seen)
    assert (found.cause, found.ranks) == ("callbacks", (1,))
    assert found.late_s > 0.8 * len(HOOKS) * SLOW_S
    assert found.parts["between"] > 0.8 * found.late_s
    assert found.costs["network"] < 0.2


class Copies(Regression):
    """Takes its time to bring a batch to the device, on rank 1."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            time.sleep(COPY_S)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def fit_with_slow_copies(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = trainer("ddp", 2, callbacks=[StepTrace(folder)], val_check_interval=13)
        train.fit(Copies(), loader(STEPS * 16), loader(16))


def test_copies_to_the_device_are_a_part_of_their_own(tmp_path: Path) -> None:
    """Those of a validation belong to the validation."""
    FitWorld().run(2, fit_with_slow_copies, tmp_path)
    for trace in read_folder(tmp_path):
        assert [len(step.copy) for step in trace.steps] == [1] * STEPS
        took = [end - begin for step in trace.steps for begin, end in step.copy]
        assert (min(took) >= COPY_S) == (trace.rank == 1)
    seen = read(tmp_path)
    found = judge(seen)
    assert (found.cause, found.ranks) == ("copies", (1,))
    assert found.parts["copies"] > 0.8 * found.late_s > 0.6 * COPY_S


# ---- one rank ----
def fit_alone(
    folder: Path, model: L.LightningModule | None = None, data: Any = None, **options: Any
) -> tuple[L.Trainer, StepTrace]:
    trace = StepTrace(folder, **options)
    train = trainer("auto", 1, callbacks=[trace])
    given = (loader(), loader(8)) if data is None else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train.fit(model or Regression(), *given, datamodule=data)
    return train, trace


def steps_in(folder: Path) -> tuple[Step, ...]:
    (trace,) = read_folder(folder)
    return trace.steps


class Augments(Regression):
    """Works on each batch before and after it comes to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(SLOW_S)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(SLOW_S)
        return batch


class BringsAndAugments(Augments):
    """Brings its batches to the device in its own way, too."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Brings(L.LightningDataModule):
    """Brings batches to the device in place of the model."""

    def train_dataloader(self) -> Any:
        return loader()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@pytest.mark.parametrize(
    ("model", "data", "num_copies"),
    [(Augments, None, 0), (BringsAndAugments, None, 1), (Augments, Brings, 1)],
)
def test_work_on_a_batch_is_no_copy_and_a_cpu_copies_only_by_a_hook(
    model: type[L.LightningModule], data: Any, num_copies: int, tmp_path: Path
) -> None:
    fit_alone(tmp_path, model(), data and data())
    steps = steps_in(tmp_path)
    assert {len(step.copy) for step in steps} == {num_copies}
    took = [end - begin for step in steps for begin, end in step.copy]
    assert statistics.median(took or [0.0]) < SLOW_S


def test_the_first_steps_of_each_fit_are_skipped(tmp_path: Path) -> None:
    train, _ = fit_alone(tmp_path, skip_steps=3)
    assert [step.number for step in steps_in(tmp_path)] == list(range(4, 17))
    train.fit_loop.max_epochs = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train.fit(Regression(), loader())
    assert [step.number for step in steps_in(tmp_path)] == list(range(20, 33))


class Fails(Regression):
    def on_train_epoch_end(self) -> None:
        raise ValueError("no such luck")


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    """Also where training fails."""
    train, trace = fit_alone(tmp_path)
    assert not {"start", "stop"} & {*vars(train.profiler)}
    assert all(isinstance(c, StepTrace) or "StepTrace" not in repr(c) for c in train.callbacks)
    train = trainer("auto", 1, callbacks=[trace])
    before = list(train.callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no such luck"):
            train.fit(Fails(), loader())
    assert train.callbacks == before
    assert not {"start", "stop"} & {*vars(train.profiler)}
    (recorded,) = read_folder(tmp_path)
    assert recorded.end == "training has ended: ValueError"


# ---- a rank that joins ----
def begun(trace: StepTrace, *, takes_part: bool, rank: int) -> dict[str, Any]:
    """The first line of a rank's file; nobody answers a rank that joins."""

    def broadcast(value: Any) -> Any:
        assert takes_part, "nobody answers"
        return value

    session = SimpleNamespace(
        takes_part=takes_part,
        rank=rank,
        is_open=False,
        net=None,
        ranks=SimpleNamespace(can_be_joined=True),
    )
    model = Regression()
    train = SimpleNamespace(
        strategy=SimpleNamespace(
            session=session, broadcast=broadcast, model=model, root_device=torch.device("cpu")
        ),
        profiler=SimpleNamespace(start=None, stop=None),
        global_step=0,
        global_rank=0,
        world_size=2,
        num_training_batches=8,
        accumulate_grad_batches=1,
        train_dataloader=None,
        datamodule=None,
    )
    trace.on_train_start(train, model)
    trace._end(train, "the test has ended")
    (line,) = [t.about for t in read_folder(trace.folder) if t.rank == rank]
    return line


def test_a_rank_that_joins_asks_nobody_and_writes_to_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, here, there = StepTrace(tmp_path), StepTrace(tmp_path), StepTrace(tmp_path)
    assert member.state_dict() == {}  # a checkpoint has nothing of it
    first = begun(member, takes_part=True, rank=0)
    given = member.state_dict()
    assert member.state_key == here.state_key
    here.load_state_dict(given)
    second = begun(here, takes_part=False, rank=2)
    assert {k: first[k] for k in ("run", "began_unix_s")} == {
        k: second[k] for k in ("run", "began_unix_s")
    }
    assert 0 <= second["origin_s"] - first["origin_s"] < 60
    # On another node, whose clock since its boot is another one.
    there.load_state_dict(given)
    real = time.monotonic
    monkeypatch.setattr(step_trace.clocks, "boot_id", lambda: "of another kernel")
    monkeypatch.setattr(step_trace.time, "monotonic", lambda: real() + 1e6)
    third = begun(there, takes_part=False, rank=3)
    assert third["run"] == first["run"]
    assert 0 <= third["origin_s"] - first["origin_s"] < 60


def test_a_rank_that_joins_without_a_state_writes_a_run_of_its_own(tmp_path: Path) -> None:
    assert begun(StepTrace(tmp_path), takes_part=False, rank=2)["rank"] == 2
