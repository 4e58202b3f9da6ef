"""docs/works_with.md: what it says is shown, here or by the test that it names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import Plain, Recorder
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[2]
HERE = "test_works_with.py"


# ---- one case a feature: what a rank does, and what it has at its end ----
def fit(name: str, model: L.LightningModule | None = None, data: Any = None, **kwargs: Any) -> Any:
    model = Regression() if model is None else model
    run = trainer(strategy_of(name, timeout_s=20.0), 2, **kwargs)
    run.fit(model, loader() if data is None else data, loader(32))
    return model, run


class Clipping(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 1e-9, "norm")


def own_clipping(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = Clipping(momentum=0.0)
    before = weights(model)
    fit(name, model)
    torch.testing.assert_close(weights(model), before)
    return model


def mixed_precision(name: str, folder: Path) -> Any:
    losses = Recorder("train_loss")
    options: dict[str, Any] = {"max_epochs": 5, "callbacks": [losses]}
    model, _ = fit(name, Plain(0.01, 0.0), precision="bf16-mixed", **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    least = 1 if name == "oktopk" else 2  # which sends one entry of so small a network
    assert sum(losses.values[-8:]) < sum(losses.values[:8]) / least
    return model


def true_precision(name: str, folder: Path) -> Any:
    for precision, dtype in (("64-true", torch.float64), ("bf16-true", torch.bfloat16)):
        model, _ = fit(name, precision=precision)
        assert {p.dtype for p in model.parameters()} == {dtype}
    return model


class Scheduled(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer, schedulers = super().configure_optimizers(), torch.optim.lr_scheduler
        config = {"scheduler": schedulers.StepLR(optimizer, 1, gamma=0.5), "interval": self.kind}
        if self.kind == "plateau":
            limits: Any = {"factor": 0.5, "patience": 0, "threshold": 10.0}
            plateau = schedulers.ReduceLROnPlateau(optimizer, threshold_mode="abs", **limits)
            config = {"scheduler": plateau, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_batch_start(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"] / self.lr)


RATES = {
    "step": [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32],
    "epoch": [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4],
    "plateau": [1, 1, 1, 1, 1 / 2, 1 / 2],
}


def schedulers(name: str, folder: Path) -> Any:
    for kind, expected in RATES.items():
        model, _ = fit(name, Scheduled(kind), loader(32), max_epochs=3)
        assert model.rates == expected, kind
    return model


class Featured(Regression):
    """With gradient checkpointing, a parametrized layer, and one loader or several."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.lr, self.momentum = 0.05, 0.9

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        weight_norm(self.net[0])

    def loss(self, batch: Any) -> Tensor:
        hidden: Any = checkpoint(self.net[0], batch[0], use_reentrant=False)
        return ((self.net[1:](hidden) - batch[1]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(map(self.loss, batch.values() if isinstance(batch, dict) else [batch]))


class Data(L.LightningDataModule):
    num_made = 0

    def __init__(self, num_loaders: int) -> None:
        super().__init__()
        self.num_loaders = num_loaders

    def train_dataloader(self) -> Any:
        self.num_made += 1
        if self.num_loaders == 1:
            return loader()
        return CombinedLoader({"a": loader(), "b": loader(64)}, "max_size_cycle")


def model_and_data(name: str, folder: Path) -> Any:
    """With two loaders, where they are not refused."""
    model, data = Featured(), Data(1 if name == "balanced" else 2)
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0}
    limits = {"max_epochs": 3, "limit_train_batches": 5}
    run = trainer(strategy_of(name), 2, detect_anomaly=True, **options, **limits)
    run.fit(model, data)
    assert (data.num_made, run.global_step) == (3, 3 * 5)
    return model


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(48 + 16 * int(os.environ["RANK"])):
            x = torch.randn(10)
            yield x, x.sum(0, keepdim=True)


def iterable_dataset(name: str, folder: Path) -> Any:
    model, run = fit(name, data=torch.utils.data.DataLoader(Stream(), 8))
    assert run.global_step == 6 + 2 * int(os.environ["RANK"])
    return model


def fit_twice(name: str, folder: Path) -> Any:
    model, run = fit(name)
    first, callbacks = weights(model), len(run.callbacks)
    run.fit_loop.max_epochs = 3
    run.fit(model, loader(), loader(32))
    assert not torch.equal(weights(model), first)
    assert (run.global_step, run.current_epoch, len(run.callbacks)) == (24, 3, callbacks)
    return model


class Skipping(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None

    def on_train_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True)


def skipped_epochs(name: str, folder: Path) -> Any:
    model, run = fit(name, Skipping(), max_epochs=2)
    assert (float(run.callback_metrics["rank"]), run.global_step) == (0.5, 6)
    return model


class Writer(BasePredictionWriter):
    num_written = 0

    def write_on_epoch_end(self, *args: Any) -> None:
        self.num_written += 1


def callbacks_and_loggers(name: str, folder: Path) -> Any:
    seen: list[int] = []
    writer, logger = Writer("epoch"), CSVLogger(str(folder), version="")
    loggers = [logger, TensorBoardLogger(folder, name="board")]
    callbacks = [
        LearningRateMonitor("step"),
        DeviceStatsMonitor(),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        TQDMProgressBar(),
        ModelSummary(2),
        LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[-1])),
        SpikeDetection(exclude_batches_path=str(folder / "spikes"), warmup=100),
        writer,
    ]
    shown = {"enable_progress_bar": True, "enable_model_summary": True, "log_every_n_steps": 2}
    model, run = fit(name, callbacks=callbacks, logger=loggers, profiler="advanced", **shown)
    assert seen == list(range(8))
    if run.is_global_zero:
        figures = Path(logger.log_dir, "metrics.csv").read_text()
        assert all(column in figures for column in ("lr-SGD", "cpu_percent", "samples_per_sec"))
        assert list((folder / "board").rglob("events*"))
    run.predict(model, loader(32))
    assert writer.num_written == 1
    return model


def barebones(name: str, folder: Path) -> Any:
    options = {"logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"}
    model = fit(name, barebones=True, **dict.fromkeys(options))[0]
    fit(name, model, deterministic=True, profiler="simple")
    return model


def fits(
    make: Callable[[], L.LightningModule] = Regression, steps: int = 0, **options: Any
) -> Callable[[str, Path], Any]:
    """A case of a fit with these options, which makes so many steps."""

    def case(name: str, folder: Path) -> Any:
        model, run = fit(name, make(), **options)
        assert run.global_step == steps or not steps
        return model

    return case


CASES: dict[str, Callable[[str, Path], Any]] = {
    "`GradientAccumulationScheduler`": fits(
        steps=8 + 4, max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "`configure_gradient_clipping`": own_clipping,
    "Learning rate schedulers, by step, epoch or metric": schedulers,
    "`bf16-mixed`": mixed_precision,
    "`bf16-true`, `64-true`": true_precision,
    "`IterableDataset`": iterable_dataset,
    "`fast_dev_run`": fits(steps=2, fast_dev_run=2),
    "`fit` called twice": fit_twice,
    "`max_steps`": fits(steps=13, max_steps=13, max_epochs=-1, overfit_batches=4),
    "`on_train_batch_start` that ends an epoch": skipped_epochs,
    "`barebones=True`, `deterministic=True`": barebones,
    **dict.fromkeys(
        (
            *("`detect_anomaly=True`", "Gradient checkpointing (`torch.utils.checkpoint`)"),
            *("`configure_model`", "Parametrizations (`weight_norm`)"),
            "Several loaders (`CombinedLoader`)",
            "`LightningDataModule`, `reload_dataloaders_every_n_epochs`",
            "`limit_train_batches`, `limit_val_batches`, `overfit_batches`",
        ),
        model_and_data,
    ),
    **dict.fromkeys(
        (
            *("`BasePredictionWriter`", "`LearningRateMonitor`", "`DeviceStatsMonitor`"),
            *("`ThroughputMonitor`", "`TQDMProgressBar`", "`ModelSummary`", "`LambdaCallback`"),
            *("`SpikeDetection`", "Profilers (`simple`, `advanced`)", "`TensorBoardLogger`"),
        ),
        callbacks_and_loggers,
    ),
}


REFUSED = {("balanced", "`IterableDataset`"): "must be a DataLoader of a dataset with indices"}
"""By strategy and feature, what the error says."""


def run_cases(name: str, folder: Path) -> dict[str, Tensor | str]:
    """The weights after each case, or what went wrong in it: one world for all."""
    results: dict[str, Tensor | str] = {}
    os.chdir(folder)
    for case in dict.fromkeys(CASES.values()):
        features = ", ".join(feature for feature, shown_by in CASES.items() if shown_by is case)
        try:
            results[features] = weights(case(name, folder)).double()
        except Exception as error:
            results[features] = f"{type(error).__name__}: {error}"
    return results


@cases("name", now=["wagma"], later=["balanced", "allreduce", "local_sgd", "hpsgd", "oktopk"])
def test_a_feature_ends_in_one_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    pytest.importorskip("tensorboardX")
    first, second = FitWorld().run(2, run_cases, name, tmp_path)
    for features, ours in first.items():
        if (name, features) in REFUSED:
            assert all(REFUSED[name, features] in str(each[features]) for each in (first, second))
            continue
        assert isinstance(ours, Tensor), f"{features}: {ours}"
        assert ours.isfinite().all(), features
        assert torch.equal(ours, second[features]), features


# ---- what ends a training ----
class Raising(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("no such luck")
        return super().training_step(batch, batch_idx)


def fit_raising(folder: Path) -> None:
    saver = OnExceptionCheckpoint(folder, "saved")
    fit("wagma", Raising(), callbacks=[saver], enable_checkpointing=True)


def test_a_checkpoint_on_an_exception_is_saved(tmp_path: Path) -> None:
    outcomes = FitWorld().outcomes(2, fit_raising, tmp_path)
    assert all(outcome.error for outcome in outcomes)
    Regression.load_from_checkpoint(tmp_path / "saved.ckpt")


# ---- weights that a callback takes away ----
def fit_pruning(name: str) -> tuple[Tensor, float]:
    model = Regression()
    callback = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(model.net[0], "weight")],
        amount=0.5,
        use_lottery_ticket_hypothesis=False,
    )
    fit(name, model, callbacks=[callback])
    return weights(model), float((model.net[0].weight == 0).float().mean())


def test_ranks_that_step_together_prune_the_same_weights() -> None:
    ours, theirs = FitWorld().run(2, fit_pruning, "allreduce")
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == 0.5


# ---- the table ----
def rows() -> list[tuple[str, str]]:
    """The features of the page, each with the test that shows it."""
    page = (ROOT / "docs" / "works_with.md").read_text()
    _, _, table = page.partition("| feature |")
    lines = [line for line in table.partition("\n\n")[0].splitlines() if line.endswith("` |")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(feature, shown_by.strip("`")) for feature, _, shown_by in cells]


def test_every_row_without_another_test_has_a_case_and_none_is_listed_twice() -> None:
    features = [feature for feature, _ in rows()]
    assert len(features) == len(set(features)) > len(CASES)
    assert {feature for feature, shown_by in rows() if shown_by == HERE} == {*CASES}


@pytest.mark.parametrize("test", sorted({test for _, test in rows() if test != HERE}))
def test_a_test_that_the_table_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    name, _, parameter = name.removesuffix("]").partition("[")
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests").rglob(file)]
    modules = [importlib.import_module(".".join(path.parts)) for path in paths]
    (function,) = (getattr(module, name) for module in modules if hasattr(module, name))
    if parameter:
        marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
        values = [getattr(value, "values", value) for mark in marks for value in mark.args[1]]
        assert parameter in [value[0] if isinstance(value, tuple) else value for value in values]
