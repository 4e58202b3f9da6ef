"""docs/evidence/works_with.md: what it says is shown, here or by the test that it names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
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

from lightning_dsgd import STRATEGIES
from tests.support.fits import Plain, Recorder
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[2]
HERE = "test_works_with.py"
FAST = "wagma"
EXHAUSTIVE = ("allreduce", "local_sgd", "hpsgd", "oktopk")
NEEDS = {
    "`DeviceStatsMonitor`": ("psutil", "pip install psutil"),
    "`TensorBoardLogger`": ("tensorboardX", "pip install tensorboardX"),
}
"""What else a case needs, and how to get it."""


# ---- one case a feature: what a rank does, and what it has at its end ----
def fit(name: str, model: L.LightningModule | None = None, data: Any = None, **kwargs: Any) -> Any:
    model = Regression() if model is None else model
    run = trainer(STRATEGIES[name](timeout_s=20.0), 2, **kwargs)
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


class Checkpointing(Regression):
    def loss(self, batch: Any) -> Tensor:
        hidden: Any = checkpoint(self.net[0], batch[0], use_reentrant=False)
        return ((self.net[1:](hidden) - batch[1]) ** 2).mean()


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


class Configured(Regression):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.lr, self.momentum = 0.05, 0.9

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def parametrizations(name: str, folder: Path) -> Any:
    model = Regression()
    weight_norm(model.net[0])
    return fit(name, model)[0]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(48 + 16 * int(os.environ["RANK"])):
            x = torch.randn(10)
            yield x, x.sum(0, keepdim=True)


def iterable_dataset(name: str, folder: Path) -> Any:
    model, run = fit(name, data=torch.utils.data.DataLoader(Stream(), 8))
    assert run.global_step == 6 + 2 * int(os.environ["RANK"])
    return model


class TwoLoaders(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Data(L.LightningDataModule):
    num_made = 0

    def train_dataloader(self) -> Any:
        self.num_made += 1
        return loader()


def reload_dataloaders(name: str, folder: Path) -> Any:
    model, data = Regression(), Data()
    run = trainer(STRATEGIES[name](), 2, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    run.fit(model, data)
    assert data.num_made == 3
    return model


def limits(name: str, folder: Path) -> Any:
    model, run = fit(name, limit_train_batches=3, limit_val_batches=0)
    assert run.global_step == 3
    model, run = fit(name, overfit_batches=2)
    assert run.global_step == 2
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
    def __init__(self) -> None:
        super().__init__("epoch")
        self.num_written = 0

    def write_on_epoch_end(self, *args: Any) -> None:
        self.num_written += 1


def prediction_writer(name: str, folder: Path) -> Any:
    writer = Writer()
    model, run = fit(name, callbacks=[writer])
    run.predict(model, loader(32))
    assert writer.num_written == 1
    return model


def logged(name: str, folder: Path, callback: L.Callback, column: str, **kwargs: Any) -> Any:
    logger = CSVLogger(str(folder), name=type(callback).__name__, version="")
    kwargs = {"log_every_n_steps": 2, **kwargs}
    model, run = fit(name, callbacks=[callback], logger=logger, **kwargs)
    if run.is_global_zero:
        assert column in Path(logger.log_dir, "metrics.csv").read_text()
    return model


def throughput(name: str, folder: Path) -> Any:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    return logged(name, folder, monitor, "samples_per_sec")


def lambda_callback(name: str, folder: Path) -> Any:
    seen: list[int] = []
    callback = LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[-1]))
    model, _ = fit(name, callbacks=[callback])
    assert seen == list(range(8))
    return model


def tensorboard(name: str, folder: Path) -> Any:
    model, run = fit(name, logger=TensorBoardLogger(folder, name="board"), log_every_n_steps=2)
    if run.is_global_zero:
        assert list((folder / "board").rglob("events*"))
    return model


def barebones(name: str, folder: Path) -> Any:
    options = {"logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"}
    model = fit(name, barebones=True, **dict.fromkeys(options))[0]
    fit(name, model, deterministic=True)
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
    "`detect_anomaly=True`": fits(detect_anomaly=True),
    "Gradient checkpointing (`torch.utils.checkpoint`)": fits(Checkpointing),
    "`bf16-mixed`": mixed_precision,
    "`bf16-true`, `64-true`": true_precision,
    "`configure_model`": fits(Configured),
    "Parametrizations (`weight_norm`)": parametrizations,
    "`IterableDataset`": iterable_dataset,
    "Several loaders (`CombinedLoader`)": fits(
        TwoLoaders, 8, data=CombinedLoader({"a": loader(), "b": loader(64)}, "max_size_cycle")
    ),
    "`LightningDataModule`, `reload_dataloaders_every_n_epochs`": reload_dataloaders,
    "`limit_train_batches`, `limit_val_batches`, `overfit_batches`": limits,
    "`fast_dev_run`": fits(steps=2, fast_dev_run=2),
    "`BasePredictionWriter`": prediction_writer,
    "`LearningRateMonitor`": lambda name, folder: logged(
        name, folder, LearningRateMonitor("step"), "lr-SGD"
    ),
    "`DeviceStatsMonitor`": lambda name, folder: logged(
        name, folder, DeviceStatsMonitor(), "cpu_percent"
    ),
    "`ThroughputMonitor`": throughput,
    "`TQDMProgressBar`": fits(callbacks=[TQDMProgressBar()], enable_progress_bar=True),
    "`ModelSummary`": fits(callbacks=[ModelSummary(2)], enable_model_summary=True),
    "`LambdaCallback`": lambda_callback,
    "`SpikeDetection`": lambda name, folder: fit(
        name, callbacks=[SpikeDetection(exclude_batches_path=str(folder / "spikes"), warmup=100)]
    )[0],
    "`fit` called twice": fit_twice,
    "`max_steps`": fits(steps=13, max_steps=13, max_epochs=-1),
    "`on_train_batch_start` that ends an epoch": skipped_epochs,
    "Profilers (`simple`, `advanced`)": lambda name, folder: [
        fit(name, profiler=p)[0] for p in ("simple", "advanced")
    ][1],
    "`TensorBoardLogger`": tensorboard,
    "`barebones=True`, `deterministic=True`": barebones,
}


def missing(feature: str) -> str:
    module, way_out = NEEDS.get(feature, ("", ""))
    return f"{module} is not installed: {way_out}" if module and not find_spec(module) else ""


def run_cases(name: str, folder: Path) -> dict[str, Tensor | str]:
    """The weights after each case, or what went wrong in it: one world for all."""
    results: dict[str, Tensor | str] = {}
    os.chdir(folder)
    for feature, case in CASES.items():
        if not missing(feature):
            try:
                results[feature] = weights(case(name, folder)).double()
            except Exception as error:
                results[feature] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def of(name: str) -> Any:
        outcomes = FitWorld().outcomes(2, run_cases, name, tmp_path_factory.mktemp("cases"))
        assert [outcome.error for outcome in outcomes] == ["", ""]
        return [outcome.result for outcome in outcomes]

    return of


def grouped(name: str) -> Any:
    """All cases of a strategy in one process of the tests, as they share a world."""
    marks = [pytest.mark.xdist_group(f"works with {name}")]
    return pytest.param(name, marks=marks + [pytest.mark.exhaustive] * (name != FAST), id=name)


@pytest.mark.parametrize("name", [grouped(name) for name in (FAST, *EXHAUSTIVE)])
@pytest.mark.parametrize("feature", CASES)
def test_a_feature_ends_in_one_model(
    feature: str, name: str, results: Callable[[str], Any]
) -> None:
    if missing(feature):
        pytest.skip(missing(feature))
    ours, theirs = (rank[feature] for rank in results(name))
    assert isinstance(ours, Tensor), ours
    assert isinstance(theirs, Tensor), theirs
    assert torch.equal(ours, theirs)
    assert ours.isfinite().all()


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
    page = (ROOT / "docs" / "evidence" / "works_with.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.endswith("` |")]
    return [(feature, shown_by.strip("`")) for feature, _, shown_by in lines]


def test_every_row_without_another_test_has_a_case_and_none_is_listed_twice() -> None:
    features = [feature for feature, _ in rows()]
    assert len(features) == len(set(features)) > len(CASES)
    assert [feature for feature, shown_by in rows() if shown_by == HERE] == list(CASES)


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
