"""What holds of `Trainer.fit` under every strategy: real processes, joined by gloo.

Functions that run on every rank come before the tests that run them, and return what each rank saw.
Where a result can be computed on one process in plain torch, it is: the oracle.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_dsgd import (
    STRATEGIES,
    Algorithm,
    CommunicationMonitor,
    DecentralizedStrategy,
    StragglerInjector,
    flat,
)
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.models import Regression, loader, trainer, weights
from tests.worlds import FitWorld

ROOT = Path(__file__).parents[1]
NAMES = ("allreduce", "no_sync", "local_sgd", "dpsgd")  # one of each kind
ASYNCHRONOUS = ("no_sync", "local_sgd", "dpsgd")
every_strategy = pytest.mark.parametrize("name", NAMES)


def strategy(name: str, **options: Any) -> Any:
    """By name; what hangs fails soon, saying who waits for whom."""
    defaults = {"local_sgd": {"sync_period": 4}}.get(name, {})
    return STRATEGIES[name](**{"timeout_s": 20.0, **defaults, **options})


def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return FitWorld().run(world_size, fn, *args)


class Plain(Regression):
    """Without BatchNorm: a mean over ranks is a mean over their samples."""

    def __init__(self, lr: float = 0.05, momentum: float = 0.9) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(lr, momentum)
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


class Seeded(Regression):
    """With BatchNorm, the same on every rank from the start."""

    def __init__(self, lr: float = 0.05, momentum: float = 0.9) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(lr, momentum)


def buffers(module: nn.Module) -> Tensor:
    return torch.cat([b.detach().double().reshape(-1) for b in module.buffers()])


def same(tensors: list[Tensor]) -> bool:
    """Whether they are equal to the bit."""
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def fit(
    name: str,
    make: Callable[..., L.LightningModule] = Plain,
    train: dict[str, Any] | None = None,
    val: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[L.LightningModule, L.Trainer]:
    """Trains a model on this rank, with a strategy of ours by name, or any other."""
    world_size = int(os.environ["WORLD_SIZE"])
    chosen = strategy(name, **kwargs.pop("options", {})) if name in STRATEGIES else name
    model = make()
    run = trainer(chosen, kwargs.pop("devices", world_size), **kwargs)
    run.fit(model, loader(**(train or {})), None if val is None else loader(**val))
    return model, run


def fit_weights(name: str, kwargs: dict[str, Any]) -> Tensor:
    return weights(fit(name, **kwargs)[0])


def batches_of_all_ranks(num_samples: int, batch_size: int) -> list[Any]:
    """What the ranks train on in the first epoch: each has every P-th sample of such a batch."""
    dataset = loader(num_samples).dataset
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
    return list(DataLoader(dataset, batch_size, sampler=sampler))


def oracle(
    batch_size: int,
    num_samples: int = 128,
    accumulate: int = 1,
    clip: Callable[[list[Tensor]], None] | None = None,
) -> Tensor:
    """One epoch of SGD on one process, in plain torch."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=model.lr, momentum=model.momentum)
    batches = batches_of_all_ranks(num_samples, batch_size)
    for index, batch in enumerate(batches, 1):
        (model.loss(batch) / accumulate).backward()
        if index % accumulate == 0 or index == len(batches):
            if clip is not None:
                clip([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def assert_close(given: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


# ---- one optimizer step ----


def test_accumulated_gradients_equal_one_process_on_the_concatenated_batches() -> None:
    # 6 batches a rank, of which 4 and then the last 2 make a step.
    kwargs = {"train": {"num_samples": 72, "batch_size": 4}, "accumulate_grad_batches": 4}
    ranks = run(3, fit_weights, "allreduce", kwargs)
    assert same(ranks)
    assert_close(ranks[0], oracle(12, 72, accumulate=4))


@dataclass
class Counting(Algorithm):
    """Writes down when it is called."""

    name = "counting"
    calls: list[str] = field(default_factory=list)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        self.calls.append("before")

    def after_update(self, x: Tensor) -> None:
        self.calls.append("after")


def count_steps(accumulate: int) -> list[str]:
    algorithm = Counting()
    run = trainer(DecentralizedStrategy(algorithm), 2, accumulate_grad_batches=accumulate)
    run.fit(Plain(), loader(48, 4))
    assert run.global_step == len(algorithm.calls) / 2
    return algorithm.calls


def test_an_algorithm_steps_once_per_optimizer_step_not_per_batch() -> None:
    for calls in run(2, count_steps, 4):  # 6 batches: one step after 4 and one after the last
        assert calls == ["before", "after"] * 2


CLIPS: dict[str, tuple[float, Callable[[list[Tensor]], Any]]] = {
    "norm": (0.3, lambda grads: nn.utils.clip_grads_with_norm_(  # type: ignore[attr-defined]
        [_with_grad(g) for g in grads], 0.3, nn.utils.get_total_norm(grads)
    )),
    "value": (0.05, lambda grads: [g.clamp_(-0.05, 0.05) for g in grads]),
}  # fmt: skip


def _with_grad(grad: Tensor) -> Tensor:
    tensor = torch.zeros_like(grad)
    tensor.grad = grad
    return tensor


@pytest.mark.parametrize("algorithm", CLIPS)
def test_clipping_clips_the_reduced_gradient(algorithm: str) -> None:
    bound, clip = CLIPS[algorithm]
    kwargs = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm}
    ranks = run(2, fit_weights, "allreduce", kwargs)
    assert same(ranks)
    assert_close(ranks[0], oracle(16, clip=clip))
    # The means of gradients that each rank had clipped would be seen.
    assert not torch.allclose(oracle(16, clip=clip), oracle(16), atol=1e-3)
    assert not torch.allclose(ranks[0], oracle_clipped_before(clip), atol=1e-3)


def oracle_clipped_before(clip: Callable[[list[Tensor]], Any]) -> Tensor:
    """What the strategy must not do: the mean of two ranks' clipped gradients."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=model.lr, momentum=model.momentum)
    for x, y in batches_of_all_ranks(128, 16):
        halves = []
        for rank in range(2):
            grads = torch.autograd.grad(
                model.loss((x[rank::2], y[rank::2])), list(model.parameters())
            )
            clip(list(grads))
            halves.append(grads)
        for p, first, second in zip(model.parameters(), *halves, strict=True):
            p.grad = (first + second) / 2
        optimizer.step()
    return weights(model)


# ---- precision ----


class Gentle(Plain):
    def __init__(self) -> None:
        super().__init__(lr=0.01, momentum=0.0)


def fit_bf16(name: str) -> tuple[Tensor, list[float], set[torch.dtype]]:
    losses = Recorder("train_loss")
    model, _ = fit(name, Gentle, precision="bf16-mixed", max_epochs=5, callbacks=[losses])
    return weights(model), losses.values, {p.dtype for p in model.parameters()}


class Recorder(L.Callback):
    """The values of a metric after every batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


@every_strategy
def test_bf16_mixed_trains_weights_that_stay_float32(name: str) -> None:
    ranks = run(2, fit_bf16, name)
    assert same([x for x, _, _ in ranks])
    for _, losses, dtypes in ranks:
        assert dtypes == {torch.float32}
        assert sum(losses[-8:]) < sum(losses[:8]) / 2


def fit_16_mixed_on_cpu() -> tuple[list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, run = fit("local_sgd", precision="16-mixed")
    return [str(w.message) for w in caught], run.precision


def test_16_mixed_on_cpu_becomes_bf16_with_lightnings_warning() -> None:
    for texts, precision in run(2, fit_16_mixed_on_cpu):
        assert precision == "bf16-mixed"
        assert any("fp16 is not supported on CPU" in text for text in texts)


class Overflowing(Plain):
    """The loss of rank 1 is infinite in one batch; looks at weights and loss scale after each."""

    bad_batch = 2

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[Tensor, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == self.bad_batch:
            loss = loss * torch.inf
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.history.append((weights(self), scaler.get_scale()))


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))


def fit_with_overflow(name: str) -> list[tuple[Tensor, float]]:
    model, _ = fit(name, Overflowing, plugins=[fp16()])
    assert isinstance(model, Overflowing)
    return model.history


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step_together() -> None:
    ranks = run(3, fit_with_overflow, "allreduce")
    bad = Overflowing.bad_batch
    for after_batch in zip(*ranks, strict=True):
        assert same([x for x, _ in after_batch])
        assert len({scale for _, scale in after_batch}) == 1
    x, scales = [x for x, _ in ranks[0]], [scale for _, scale in ranks[0]]
    assert torch.equal(x[bad], x[bad - 1])
    assert not torch.equal(x[bad - 1], x[bad - 2])
    assert not torch.equal(x[bad + 1], x[bad])
    assert (scales[bad - 1], scales[bad]) == (256.0, 128.0)
    assert x[-1].isfinite().all()


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_where_gradients_stay_local_only_the_rank_that_overflows_skips(name: str) -> None:
    ranks = run(2, fit_with_overflow, name)
    assert [history[-1][1] for history in ranks] == [256.0, 128.0]
    assert all(x.isfinite().all() for history in ranks for x, _ in history)


class Fused(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=True)


def fit_fused() -> None:
    fit("allreduce", Fused, plugins=[fp16()])


def test_a_fused_optimizer_with_16_mixed_is_refused() -> None:
    for outcome in FitWorld().outcomes(2, fit_fused):
        assert outcome.error.startswith("ValueError: ")
        assert "got a fused SGD; use fused=False" in outcome.error


# ---- equal to what is known ----


def fit_ten_steps(name: str, options: dict[str, Any], momentum: float) -> Tensor:
    def make() -> L.LightningModule:
        return Seeded(momentum=momentum)

    kwargs: dict[str, Any] = {"options": options} if options else {}
    return weights(fit(name, make, max_steps=10, max_epochs=-1, **kwargs)[0])


def test_allreduce_equals_ddp() -> None:
    ours, ddp = run(2, fit_ten_steps, "allreduce", {}, 0.9), run(2, fit_ten_steps, "ddp", {}, 0.9)
    assert same(ours)
    assert_close(ours[0], ddp[0])


def test_local_sgd_with_period_one_and_plain_sgd_equals_allreduce() -> None:
    local = run(3, fit_ten_steps, "local_sgd", {"sync_period": 1}, 0.0)
    reduced = run(3, fit_ten_steps, "allreduce", {}, 0.0)
    assert same(local)
    assert_close(local[0], reduced[0])


def fit_alone() -> dict[str, Tensor]:
    kwargs: dict[str, Any] = {"val": {"num_samples": 32}, "max_epochs": 2}
    kwargs["use_distributed_sampler"] = False  # which shuffles, as under DDP
    return {name: weights(fit(name, Seeded, **kwargs)[0]) for name in ("auto", *NAMES)}


def test_one_rank_equals_a_single_device_to_the_bit() -> None:
    (results,) = run(1, fit_alone)
    single = results.pop("auto")
    assert set(results) == set(NAMES)
    for name, x in results.items():
        assert torch.equal(x, single), name


# ---- manual optimization, several optimizers ----


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def fit_both_ways(name: str) -> tuple[Tensor, Tensor]:
    return weights(fit(name, Plain)[0]), weights(fit(name, Manual)[0])


@every_strategy
def test_manual_optimization_equals_automatic(name: str) -> None:
    ranks = run(2, fit_both_ways, name)
    for automatic, manual in ranks:
        assert torch.equal(automatic, manual)
    assert same([manual for _, manual in ranks])


class Adversaries(L.LightningModule):
    """A generator and a discriminator, which steps twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        L.seed_everything(0, verbose=False)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
        self.discriminator = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        self.apart = 0.0

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        real = batch[0]
        loss = nn.functional.binary_cross_entropy_with_logits
        for _ in range(2):
            self.toggle_optimizer(discriminator)
            fake = self.generator(torch.randn(len(real), 4)).detach()
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            discriminator.zero_grad()
            self.manual_backward(
                loss(self.discriminator(real), ones) + loss(self.discriminator(fake), zeros)
            )
            discriminator.step()
            self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(
            loss(self.discriminator(self.generator(torch.randn(len(real), 4))), ones)
        )
        generator.step()
        self.untoggle_optimizer(generator)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(batch[0]).mean(), sync_dist=True)

    def algorithm_states(self) -> list[dict[str, Any]]:
        return self.trainer.strategy._replica.state_dict()  # type: ignore[attr-defined]


class States(L.Callback):
    """What the algorithm of each optimizer has counted when the last batch is over."""

    states: list[dict[str, Any]]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.states = pl_module.algorithm_states()


def fit_adversaries(name: str) -> tuple[Tensor, list[dict[str, Any]]]:
    states = States()
    model, _ = fit(name, Adversaries, {"num_samples": 80}, callbacks=[states])
    return weights(model), states.states


@every_strategy
def test_two_optimizers_each_count_their_own_steps_and_all_weights_agree(name: str) -> None:
    ranks = run(2, fit_adversaries, name)  # 5 batches: 5 steps of one, 10 of the other
    assert same([x for x, _ in ranks])
    for _, (generator, discriminator) in ranks:
        if name == "allreduce":
            assert (generator["step"], discriminator["step"]) == (5, 10)
        if name == "local_sgd":
            assert generator["steps_since_sync"] == 5 % 4
            assert discriminator["steps_since_sync"] == 10 % 4


# ---- learning rates ----


class Scheduled(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
            )
            config = {"scheduler": scheduler, "monitor": "val_loss"}
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            config = {"scheduler": scheduler, "interval": self.kind}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_batch_start(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"] / self.lr)


def fit_scheduled(name: str, kind: str) -> list[float]:
    def make() -> L.LightningModule:
        return Scheduled(kind)

    model, _ = fit(name, make, {"num_samples": 32}, {"num_samples": 16}, max_epochs=3)
    assert isinstance(model, Scheduled)
    return model.rates


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "wagma"])
@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("step", [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        ("epoch", [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
        ("plateau", [1, 1, 1, 1, 1 / 2, 1 / 2]),
    ],
)
def test_learning_rates_follow_their_schedule_on_every_rank(
    name: str, kind: str, rates: list[float]
) -> None:
    assert run(2, fit_scheduled, name, kind) == [rates, rates]


class Adaptive(Plain):
    """Adam, momentum and a schedule: whatever makes W', weights are averaged after it."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        made: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "adam": lambda: torch.optim.Adam(self.parameters(), 0.01),
            "adamw": lambda: torch.optim.AdamW(self.parameters(), 0.01, amsgrad=True),
            "momentum": lambda: torch.optim.SGD(self.parameters(), 0.05, 0.9, weight_decay=0.01),
            "nesterov": lambda: torch.optim.SGD(self.parameters(), 0.05, 0.9, nesterov=True),
        }
        optimizer = made[self.optimizer]()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def fit_adaptive(name: str, options: dict[str, Any], optimizer: str) -> Tensor:
    model, _ = fit(name, lambda: Adaptive(optimizer), max_steps=10, max_epochs=-1, options=options)
    return weights(model)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum", "nesterov"])
def test_wagma_averages_what_any_optimizer_makes(optimizer: str) -> None:
    """One group of all ranks, waited for, is model averaging; without waiting all learn alike."""
    whole = {"group_size": 2, "sync_period": 5, "wait_avoiding": False}
    synchronous = run(2, fit_adaptive, "wagma", whole, optimizer)
    averaging = run(2, fit_adaptive, "local_sgd", {"sync_period": 1}, optimizer)
    assert same(synchronous)
    assert_close(synchronous[0], averaging[0])
    for options in ({}, {"overlap": True}):
        late = run(2, fit_adaptive, "wagma", {"sync_period": 5, **options}, optimizer)
        assert same(late)
        start = weights(Adaptive(optimizer))
        moved = (late[0] - averaging[0]).norm() / (averaging[0] - start).norm()
        assert moved < 0.3


# ---- ranks with different numbers of batches ----


def fit_uneven(
    name: str, num_batches: tuple[int, ...], make: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[Tensor, int, float]:
    samples = 8 * num_batches[int(os.environ["RANK"])]
    model, run = fit(
        name,
        make,
        {"num_samples": samples},
        {"num_samples": 32},
        max_epochs=2,
        use_distributed_sampler=False,
        **kwargs,
    )
    everything = torch.cat([weights(model).double(), buffers(model)])
    return everything, run.global_step, float(run.callback_metrics["val_loss"])


@pytest.mark.parametrize("num_batches", [(5, 6, 4), (3, 11), (11, 3)], ids=str)
@every_strategy
def test_ranks_with_different_numbers_of_batches_end_together(
    name: str, num_batches: tuple[int, ...]
) -> None:
    ranks = run(len(num_batches), fit_uneven, name, num_batches, Seeded, {})
    assert [steps for _, steps, _ in ranks] == [2 * n for n in num_batches]
    assert same([x for x, _, _ in ranks])
    assert len({val_loss for _, _, val_loss in ranks}) == 1
    assert ranks[0][0].isfinite().all()


class TwoDtypes(Seeded):
    """Weights of two dtypes: two flat tensors, each with an algorithm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0], batch[1] / self.scale.float()))


class Pair(Adversaries):
    """The buffers that fit_uneven looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.zeros(1))


@pytest.mark.parametrize("make", [TwoDtypes, Pair])
@pytest.mark.parametrize("name", NAMES)
def test_models_of_several_parts_end_together_too(name: str, make: Callable[..., Any]) -> None:
    ranks = run(2, fit_uneven, name, (3, 11), make, {"options": {"timeout_s": 1.5}})
    assert same([x for x, _, _ in ranks])


class Metrics(Plain):
    """A torchmetrics object, which asks all ranks at the end of the epoch without the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.logged, self.computed = MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logged(float(self.global_rank))
        self.computed(1.0)
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("computed", self.computed.compute())
        self.computed.reset()


def fit_metrics(name: str, num_batches: tuple[int, ...]) -> tuple[float, float]:
    samples = 8 * num_batches[int(os.environ["RANK"])]
    train = {"num_samples": samples}
    _, run = fit(name, Metrics, train, max_epochs=2, use_distributed_sampler=False)
    return float(run.callback_metrics["logged"]), float(run.callback_metrics["computed"])


@every_strategy
def test_a_torchmetrics_object_counts_over_ranks_with_different_numbers_of_batches(
    name: str,
) -> None:
    assert run(2, fit_metrics, name, (11, 3)) == [(pytest.approx(3 / 14), 14.0)] * 2


class Seldom(Plain):
    """Rank 1 has nothing to tell its metric; and a buffer of a dtype that is no plain number's."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = SumMetric()
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            self.seldom.update(1.0)
        self.log("seldom", self.seldom, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def fit_seldom(name: str) -> tuple[float, Tensor]:
    model, run = fit(name, Seldom, {"num_samples": 32}, max_epochs=1)
    return float(run.callback_metrics["seldom"]), model.turns


@every_strategy
def test_a_metric_may_be_updated_on_some_ranks_only_and_a_buffer_be_complex(name: str) -> None:
    for count, turns in run(2, fit_seldom, name):
        assert count == 2.0
        assert torch.equal(turns, torch.polar(torch.ones(3), torch.arange(3.0)))


def fit_unevenly(case: str, folder: str) -> str:
    options: dict[str, Any] = {"max_epochs": 2}
    make: Any = Plain
    if case == "saves":
        options["callbacks"] = [ModelCheckpoint(folder, every_n_train_steps=3)]
        options["enable_checkpointing"] = True
    elif case == "validates":
        options["val_check_interval"] = 3
    elif case == "stops":
        options = {"max_steps": 10, "max_epochs": -1}
    elif case == "orders":  # as with NCCL, whose order must be one
        make = Adversaries
        ProcessGroupTransport.is_native = lambda *_: True  # type: ignore[method-assign]
    else:
        make = Logging
    samples = 8 * (5, 8)[int(os.environ["RANK"])]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(
                "allreduce",
                make,
                {"num_samples": samples},
                None if case == "saves" else {"num_samples": 32},
                use_distributed_sampler=False,
                options={"timeout_s": 5},
                **options,
            )
    except (ValueError, PeerLost) as error:  # PeerLost: another rank was first to notice
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("saves", "ranks must save as often .* got 5 batches .* on rank 0, 8 .* every_n_epochs"),
        ("validates", "ranks must evaluate as often .* val_check_interval=3; use a fraction"),
        ("stops", "max_steps=10, which are 2 whole epochs on rank 0, 1 whole epochs on rank 1"),
        ("logs", "must not be asked of ranks that have run out of batches.* use on_epoch=True"),
        ("orders", 'need the same order .* and 2 optimizers .* use transport="mpi", or give'),
    ],
)
def test_what_makes_uneven_ranks_wait_for_each_other_is_refused(
    case: str, text: str, tmp_path: Path
) -> None:
    for error in run(2, fit_unevenly, case, str(tmp_path)):
        assert re.search(text, error)


# ---- logged metrics ----


class Logging(Plain):
    """Logs its rank, in every way that asks for a value over all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = float(self.global_rank)
        self.log("both", rank, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("max", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("after", float(self.global_rank), on_step=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.global_rank), sync_dist=True)


def fit_logging(name: str) -> tuple[list[float], dict[str, float], list[str]]:
    steps = Recorder("both_step")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, run = fit(name, Logging, callbacks=[steps])
    texts = [str(w.message) for w in caught if "logs the value of rank 0 alone" in str(w.message)]
    return steps.values, {k: float(v) for k, v in run.callback_metrics.items()}, texts


@every_strategy
def test_logged_values_are_over_all_ranks_where_that_makes_no_step_wait(name: str) -> None:
    ranks = run(3, fit_logging, name)
    num_batches = len(ranks[0][0])
    for rank, (steps, metrics, texts) in enumerate(ranks):
        of_a_step = 1.0 if name == "allreduce" else rank
        assert steps == [of_a_step] * num_batches
        assert metrics["after"] == of_a_step
        assert (metrics["both_epoch"], metrics["epoch"]) == (1.0, 1.0)
        assert (metrics["sum"], metrics["max"]) == (3.0 * num_batches, 2.0)
        assert len(texts) == (1 if rank == 0 and name != "allreduce" else 0)


# ---- callbacks that decide ----


def fit_monitored(name: str, folder: str, options: dict[str, Any]) -> tuple[str, float, Tensor]:
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}")
    model, _ = fit(
        name,
        Seeded,
        val={"num_samples": 32},
        max_epochs=3,
        callbacks=[best],
        enable_checkpointing=True,
        options=options,
    )
    assert best.best_model_score is not None
    return best.best_model_path, float(best.best_model_score), weights(model)


def loss_of(checkpoint: str, num_samples: int = 32) -> float:
    model = Seeded()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    model.eval()
    with torch.no_grad():
        (batch,) = loader(num_samples, num_samples)
        return float(model.loss(batch))


@every_strategy
def test_a_monitored_checkpoint_scores_and_holds_the_consensus(name: str, tmp_path: Path) -> None:
    ranks = run(2, fit_monitored, name, str(tmp_path), {})
    path, score, _ = ranks[0]
    assert [rank[:2] for rank in ranks] == [(path, score)] * 2
    assert score == pytest.approx(loss_of(path), rel=1e-5)


def fit_uneven_monitored(name: str, folder: str) -> tuple[float, float]:
    best = ModelCheckpoint(folder, monitor="val_loss")  # the name holds the number of steps
    samples = 8 * (5, 3)[int(os.environ["RANK"])]
    model, run = fit(
        name,
        Seeded,
        {"num_samples": samples},
        {"num_samples": 32},
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=[best],
        enable_checkpointing=True,
    )
    assert best.best_model_score is not None
    (metrics,) = run.validate(model, loader(32), ckpt_path="best", verbose=False)
    return float(best.best_model_score), metrics["val_loss"]


def test_ranks_that_have_made_different_numbers_of_steps_save_one_checkpoint(
    tmp_path: Path,
) -> None:
    for score, validated in run(2, fit_uneven_monitored, "local_sgd", str(tmp_path)):
        assert validated == pytest.approx(score, rel=1e-5)
    (path,) = tmp_path.glob("*.ckpt")
    (folder,) = tmp_path.glob("*.replicas")
    assert folder == Path(f"{path}.replicas")
    assert sorted(file.name for file in folder.iterdir()) == ["rank_00000.pt", "rank_00001.pt"]


class Stopping(Plain):
    """A metric that goes on falling on rank 0 and does not on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        falling = -float(self.current_epoch) if self.global_rank == 0 else 0.0
        self.log("own", falling)


def fit_early_stopping(name: str) -> tuple[int, int]:
    stopping = EarlyStopping("own", patience=2)
    _, run = fit(
        name,
        Stopping,
        {"num_samples": 32},
        {"num_samples": 16},
        max_epochs=8,
        callbacks=[stopping],
        num_sanity_val_steps=0,
    )
    return run.current_epoch, run.global_step


@every_strategy
def test_early_stopping_stops_all_ranks_after_the_same_epoch(name: str) -> None:
    ranks = run(2, fit_early_stopping, name)
    assert ranks == [(3, 6), (3, 6)]


def fit_swa(name: str) -> tuple[Tensor, Tensor]:
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    model, _ = fit(name, Seeded, max_epochs=4, callbacks=[swa])
    return weights(model), buffers(model)


@every_strategy
def test_stochastic_weight_averaging_ends_with_one_model(name: str) -> None:
    ranks = run(2, fit_swa, name)
    assert same([x for x, _ in ranks])
    assert same([b for _, b in ranks])
    if name == "allreduce":
        assert_close(ranks[0][0], run(2, fit_swa, "ddp")[0][0], 1e-5)


# ---- validation ----


class Watching(Seeded):
    """Looks at its weights and statistics around a validation in the middle of an epoch.

    The strategy's hooks come after the module's: `on_validation_start` still sees what was trained,
    `on_validation_end` still what was validated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []
        self.during: list[Tensor] = []
        self.after: list[Tensor] = []

    def everything(self) -> Tensor:
        return torch.cat([weights(self).double(), buffers(self)])

    def on_validation_start(self) -> None:
        self.before.append(self.everything())

    def on_validation_end(self) -> None:
        self.during.append(self.everything())

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.after.append(self.everything())


def fit_watching(name: str, options: dict[str, Any]) -> tuple[list[Tensor], ...]:
    model, _ = fit(
        name,
        Watching,
        val={"num_samples": 16},
        val_check_interval=0.5,
        max_epochs=2,
        options=options,
    )
    assert isinstance(model, Watching)
    assert len(model.before) == 5  # the sanity check, and two an epoch
    return model.before, model.during, model.after


@every_strategy
def test_validation_shows_the_consensus_and_gives_back_the_weights_to_the_bit(name: str) -> None:
    ranks = run(2, fit_watching, name, {})
    for before, _, after in ranks:
        assert all(map(torch.equal, before, after))
    for index in range(1, 5):
        before, during, _ = ([rank[i][index] for rank in ranks] for i in range(3))
        assert same(during)
        # Ranks differ at least in their BatchNorm statistics.
        assert not same(before)
        assert_close(during[0], (before[0] + before[1]) / 2, 1e-5)


def test_local_evaluation_shows_each_rank_its_own_weights() -> None:
    ranks = run(2, fit_watching, "no_sync", {"evaluate": "local"})
    for before, during, after in ranks:
        assert all(map(torch.equal, before, during))
        assert all(map(torch.equal, before, after))
    assert not same([rank[1][-1] for rank in ranks])


def fit_and_evaluate(name: str) -> dict[str, Any]:
    """Validates, tests and predicts with a model that differs between ranks, and after fit."""
    L.seed_everything(int(os.environ["RANK"]), verbose=False)
    model, run = Regression(), trainer(strategy(name), 2)
    results: dict[str, Any] = {}
    for when in ("alone", "after fit"):
        results[f"validate {when}"] = run.validate(model, loader(32), verbose=False)
        results[f"test {when}"] = run.test(model, loader(32), verbose=False)
        results[f"predict {when}"] = torch.cat(run.predict(model, loader(32, shuffle=False)))
        if when == "alone":
            run.fit(model, loader(), loader(32))
            results["fit"] = [{"val_loss": float(run.callback_metrics["val_loss"])}]
    results["weights"] = weights(model)
    return results


@every_strategy
def test_validate_test_and_predict_work_alone_and_after_fit(name: str) -> None:
    ranks = run(2, fit_and_evaluate, name)
    first = ranks[0]
    assert same([rank["weights"] for rank in ranks])
    for rank in ranks:
        for key in ("validate alone", "test alone", "validate after fit", "test after fit"):
            assert rank[key] == first[key]
    assert first["validate alone"] == first["test alone"]
    assert first["validate after fit"] == first["test after fit"] == first["fit"]
    assert first["validate after fit"] != first["validate alone"]
    # The ranks predict different samples, with the same model.
    assert not torch.equal(ranks[0]["predict after fit"], ranks[1]["predict after fit"])
    assert len(ranks[0]["predict after fit"]) == 16


# ---- buffers ----


class Statistics(L.Callback):
    """The BatchNorm statistics of this rank after every batch."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.values.append(buffers(pl_module))


def fit_statistics(name: str, average_buffers: bool) -> tuple[list[Tensor], Tensor]:
    statistics = Statistics()
    options = {"average_buffers": average_buffers}
    model, _ = fit(name, Seeded, callbacks=[statistics], options=options)
    return statistics.values, buffers(model)


@every_strategy
def test_statistics_are_local_in_training_and_averaged_at_the_end(name: str) -> None:
    ours, theirs = run(2, fit_statistics, name, True)
    assert len(ours[0]) == 8
    assert not any(map(torch.equal, ours[0], theirs[0]))
    assert torch.equal(ours[1], theirs[1])
    assert_close(ours[1], (ours[0][-1] + theirs[0][-1]) / 2)


@every_strategy
def test_without_averaging_the_statistics_of_rank_0_are_left_at_the_end(name: str) -> None:
    ours, theirs = run(2, fit_statistics, name, False)
    assert not any(map(torch.equal, ours[0], theirs[0]))
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[1], ours[0][-1])


# ---- the Trainer ----


def fit_twice(name: str) -> tuple[Tensor, Tensor, int, int]:
    model, run = Seeded(), trainer(strategy(name), 2)
    run.fit(model, loader(), loader(32))
    first, callbacks = weights(model), len(run.callbacks)
    run.fit_loop.max_epochs = 3
    run.fit(model, loader(), loader(32))
    assert len(run.callbacks) == callbacks
    return first, weights(model), run.global_step, run.current_epoch


@every_strategy
def test_one_trainer_fits_twice(name: str) -> None:
    ranks = run(2, fit_twice, name)
    assert same([first for first, *_ in ranks])
    assert same([second for _, second, *_ in ranks])
    assert not torch.equal(ranks[0][0], ranks[0][1])
    assert [rank[2:] for rank in ranks] == [(24, 3)] * 2


def fit_max_steps(name: str) -> tuple[int, Tensor]:
    model, run = fit(name, max_steps=13, max_epochs=-1)
    return run.global_step, weights(model)


@every_strategy
def test_max_steps_counts_the_steps_of_a_rank(name: str) -> None:
    ranks = run(2, fit_max_steps, name)
    assert [steps for steps, _ in ranks] == [13, 13]
    assert same([x for _, x in ranks])


class Skipping(Plain):
    """Ends every epoch after three batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None

    def on_train_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True)


def fit_skipping(name: str) -> tuple[Tensor, float, int]:
    model, run = fit(name, Skipping, val={"num_samples": 32}, max_epochs=2)
    return weights(model), float(run.callback_metrics["rank"]), run.global_step


@every_strategy
def test_an_epoch_that_the_module_ends_is_over(name: str) -> None:
    ranks = run(2, fit_skipping, name)
    assert same([x for x, _, _ in ranks])
    assert [rank[1:] for rank in ranks] == [(0.5, 6)] * 2


class Silent(Seeded):
    """Lightning's `self.log` cannot be traced by torch 2.13, under any strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit_compiled(name: str) -> tuple[Tensor, Tensor]:
    model = Silent()
    run = trainer(strategy(name), 2)
    run.fit(torch.compile(model, backend="eager"), loader())  # type: ignore[arg-type]
    return weights(model), fit_weights(name, {"make": Silent})


def test_a_compiled_model_trains_like_the_plain_one() -> None:
    ranks = run(2, fit_compiled, "local_sgd")
    assert same([compiled for compiled, _ in ranks])
    assert_close(*ranks[0])


# ---- which parameters ----


class Shared(Plain):
    """A tied weight, a frozen one, one that only rank 0 uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.sometimes = nn.Parameter(torch.zeros(1))
        self.never = nn.Parameter(torch.ones(3))

    def loss(self, batch: Any) -> Tensor:
        hidden = self.second(torch.tanh(self.first(batch[0]))) * self.frozen
        if self.global_rank == 0:
            hidden = hidden + self.sometimes
        return ((self.net(hidden) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def fit_shared(name: str) -> tuple[Tensor, bool, Tensor, Tensor, float, int]:
    model, _ = fit(name, Shared)
    assert isinstance(model, Shared)
    return (
        weights(model),
        model.first.weight is model.second.weight,
        model.frozen.detach(),
        model.never.detach(),
        float(model.sometimes.detach()),
        len(list(model.parameters())),
    )


@every_strategy
def test_tied_frozen_and_unused_parameters_are_treated_as_on_one_device(name: str) -> None:
    ranks = run(2, fit_shared, name)
    assert same([rank[0] for rank in ranks])
    for _, tied, frozen, never, sometimes, count in ranks:
        assert tied
        assert count == 8
        assert torch.equal(frozen, torch.ones(1))
        assert torch.equal(never, torch.ones(3))  # no gradient anywhere: not even decayed
        assert sometimes != 0.0


def test_a_parameter_that_one_rank_uses_gets_the_mean_gradient_on_all() -> None:
    # In lockstep the weights of all ranks are the same after every step, not at the end alone.
    for rank in run(2, fit_shared_in_lockstep):
        assert rank == [True] * 8


class Alike(L.Callback):
    def __init__(self) -> None:
        self.values: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        theirs = trainer.strategy.broadcast(weights(pl_module))
        self.values.append(torch.equal(theirs, weights(pl_module)))


def fit_shared_in_lockstep() -> list[bool]:
    alike = Alike()
    fit("allreduce", Shared, callbacks=[alike])
    return alike.values


class Finetuned(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Backbone(L.Callback):
    """The weights of the backbone after every epoch."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.values.append(pl_module.backbone[0].weight.detach().clone())


def fit_finetuning(name: str) -> tuple[list[Tensor], Tensor, int]:
    backbone = Backbone()
    tuning = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=0.5)
    model, run = fit(
        name, Finetuned, val={"num_samples": 32}, max_epochs=3, callbacks=[tuning, backbone]
    )
    return backbone.values, weights(model), len(run.optimizers[0].param_groups)


@every_strategy
def test_parameters_that_the_optimizer_gets_later_are_trained_together_from_then_on(
    name: str,
) -> None:
    ranks = run(2, fit_finetuning, name)
    assert same([x for _, x, _ in ranks])
    for epochs, _, num_groups in ranks:
        assert num_groups == 2
        assert not torch.equal(epochs[0], epochs[1])
        assert not torch.equal(epochs[1], epochs[2])
    assert torch.equal(ranks[0][0][0], ranks[1][0][0])
    if name in ("allreduce", "local_sgd"):  # which has just synchronised
        assert same([epochs[2] for epochs, _, _ in ranks])


# ---- nobody waits for everybody ----


class Slow(Plain):
    """One rank is not done with its first batch before all others are done with their last one."""

    patience_s = 10.0  # less than gloo's, after which Lightning goes on as if nothing had been

    def __init__(self, slow_rank: int, folder: str) -> None:
        super().__init__()
        self.slow_rank = slow_rank
        self.news = dist.FileStore(f"{folder}/news", dist.get_world_size())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (self.global_rank, batch_idx) == (self.slow_rank, 0):
            fast = [f"rank {r}" for r in range(self.trainer.world_size) if r != self.slow_rank]
            self.news.wait(fast, timedelta(seconds=self.patience_s))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.trainer.num_training_batches:
            self.news.set(f"rank {self.global_rank}", "done")


def fit_slow(name: str, slow_rank: int, folder: str) -> int:
    return fit(name, lambda: Slow(slow_rank, folder), {"num_samples": 3 * 8 * 20})[1].global_step


@pytest.mark.parametrize("slow_rank", [0, 1, 2])
def test_fast_ranks_train_at_their_own_speed(slow_rank: int, tmp_path: Path) -> None:
    """Lightning's broadcast before every batch would make them wait for rank 0."""
    assert run(3, fit_slow, "no_sync", slow_rank, str(tmp_path)) == [20, 20, 20]


# ---- what goes wrong ----


class Diverging(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_rank == 1 and batch_idx == 2 else loss


def fit_diverging(name: str) -> None:
    fit(name, Diverging, options={"check_finite": True})


@every_strategy
def test_check_finite_names_rank_and_step_on_every_rank(name: str) -> None:
    outcomes = FitWorld().outcomes(3, fit_diverging, name)
    what = "gradient" if name == "allreduce" else "weight"
    text = f"check_finite: every {what} must be finite, got NaN or inf on rank 1 at step 3 in net.0"
    for outcome in outcomes:
        assert text in outcome.error
        assert outcome.exitcode == 1
        assert outcome.seconds < 10


# ---- figures ----


def fit_with_figures(name: str, folder: str) -> tuple[int, list[list[int]]]:
    straggler = StragglerInjector(delay_s=0.02, num_ranks=1, seed=1)
    model, run = fit(
        name,
        val={"num_samples": 16},
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=2,
        callbacks=[CommunicationMonitor(), straggler],
    )
    (weights_of,) = flat.flatten(model.named_parameters())
    delayed = [straggler.delayed_ranks(step, run.world_size) for step in range(8)]
    return weights_of.x.nbytes, delayed


def read_figures(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
            if row.get("dsgd/bytes_sent")
        ]


def fit_accumulating(folder: str) -> int:
    model, _ = fit(
        "allreduce",
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        callbacks=[CommunicationMonitor()],
    )
    (weights_of,) = flat.flatten(model.named_parameters())
    return weights_of.x.nbytes


def test_figures_count_all_batches_of_an_accumulated_step(tmp_path: Path) -> None:
    num_bytes, _ = run(2, fit_accumulating, str(tmp_path))
    rows = read_figures(tmp_path)
    assert [row["dsgd/bytes_sent"] for row in rows] == [2 * (num_bytes + 8 * (1 + 4))] * len(rows)
    assert len(rows) == 2


def test_figures_in_the_csv_log_are_those_of_the_formula(tmp_path: Path) -> None:
    (num_bytes, delayed), *_ = run(2, fit_with_figures, "allreduce", str(tmp_path))
    rows = read_figures(tmp_path)
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    for row in rows:
        # Two steps, each with 2(P-1)/P |g|, and 8 bytes for this rank and each parameter.
        assert row["dsgd/bytes_sent"] == 2 * (num_bytes + 8 * (1 + 4))
        assert row["dsgd/messages_sent"] >= 4
        assert 0 <= row["dsgd/comm_overlap"] <= 1
    # Whoever is not delayed waits for who is.
    assert all(len(ranks) == 1 for ranks in delayed)
    waits = sum(ranks == [1] for ranks in delayed)
    assert 0 < waits < 8
    assert sum(row["dsgd/wait_s"] for row in rows) >= 0.8 * 0.02 * waits


def test_the_distance_of_the_ranks_is_logged(tmp_path: Path) -> None:
    run(2, fit_with_figures, "no_sync", str(tmp_path))
    rows = read_figures(tmp_path)
    assert [row["dsgd/bytes_sent"] for row in rows] == [0.0] * 4
    assert rows[0]["dsgd/consensus_distance"] == 0.0  # of the sanity check


def fit_with_wandb(name: str, folder: str) -> str:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    logger = WandbLogger(save_dir=folder, offline=True, project="tests")
    monitor = CommunicationMonitor(per_rank=True)
    fit(name, logger=logger, log_every_n_steps=2, callbacks=[monitor])
    import wandb

    directory = wandb.run.dir if wandb.run is not None else ""
    wandb.finish()
    return directory


def test_figures_are_in_an_offline_wandb_run_with_their_step_axis(tmp_path: Path) -> None:
    ranks = run(2, fit_with_wandb, "local_sgd", str(tmp_path))
    assert ranks[0]
    assert not ranks[1]
    (file,) = tmp_path.rglob("*.wandb")
    records = file.read_bytes()
    for key in (b"dsgd/bytes_sent", b"dsgd/messages_sent", b"dsgd/wait_s", b"dsgd/comm_overlap"):
        assert records.count(key) >= 4  # 8 steps, every second one logged
    assert b"trainer/global_step" in records[records.index(b"dsgd/*") :][:64]  # the step axis
    assert b'{"name":"local_sgd","num_ranks":2,"sync_period":4}' in records
    for rank in range(2):
        assert f"dsgd/rank_{rank:05d}/wait_s".encode() in records


def fit_two_epochs_with_figures_of_every_rank(folder: str) -> int:
    """The bytes of the weights."""
    logger = CSVLogger(folder, name="", version="")
    straggler = StragglerInjector(delay_s=0.01, num_ranks=1)
    monitor = CommunicationMonitor(per_rank=True)
    model, _ = fit("dpsgd", max_epochs=2, logger=logger, callbacks=[monitor, straggler])
    (weights_of,) = flat.flatten(model.named_parameters())
    return int(weights_of.x.nbytes)


def test_every_ranks_figures_are_logged_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    num_bytes, *_ = run(3, fit_two_epochs_with_figures_of_every_rank, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("dsgd/rank_00000/wait_s")]
    assert len(rows) == 2
    for row in rows:
        for rank in range(3):
            steps = float(row[f"dsgd/rank_{rank:05d}/bytes_sent"]) / (2 * num_bytes)
            assert steps == round(steps) > 0  # its two neighbours', of this epoch alone
            assert float(row[f"dsgd/rank_{rank:05d}/wait_s"]) >= 0
    first, second = (float(row["dsgd/rank_00002/bytes_sent"]) for row in rows)
    assert first == second


# ---- both packages, all launchers ----


def fit_with_pytorch_lightning() -> Tensor:
    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Plain().net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return ((self.net(batch[0]) - batch[1]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    model = Model()
    pytorch_lightning.Trainer(
        strategy="local_sgd",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, loader())
    return weights(model)


def test_pytorch_lightning_trains_like_lightning() -> None:
    ranks = run(2, fit_with_pytorch_lightning)
    assert same(ranks)
    kwargs = {"options": {"sync_period": 8}}
    assert torch.equal(ranks[0], run(2, fit_weights, "local_sgd", kwargs)[0])
