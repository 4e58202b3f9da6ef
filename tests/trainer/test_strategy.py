"""What holds of `Trainer.fit` under every strategy: real processes, joined by gloo."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from tests.support.fits import (
    NAMES,
    Adversaries,
    Plain,
    Seeded,
    assert_close,
    every_strategy,
    fit,
    fit_weights,
    run,
    same,
    some_now,
    strategy,
)
from tests.support.models import loader, trainer, weights
from tests.support.worlds import FitWorld


# ---- equal to what is known ----
def fit_ten_steps() -> tuple[Tensor, Tensor]:
    kwargs = {"make": Seeded, "max_steps": 10, "max_epochs": -1}
    return fit_weights("allreduce", kwargs), fit_weights("ddp", kwargs)


def test_allreduce_equals_ddp() -> None:
    (ours, ddp), (theirs, _) = run(2, fit_ten_steps)
    assert torch.equal(ours, theirs)
    assert_close(ours, ddp)


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


@pytest.mark.parametrize("name", ["balanced", "local_sgd"])
def test_a_loader_may_be_prepared_before_there_is_a_training(name: str) -> None:
    """As where a script asks for `trainer.estimated_stepping_batches` before `fit`."""
    given = loader()
    waiting = trainer(strategy(name), 1).strategy
    assert waiting.distributed_sampler_kwargs["num_replicas"] == 1
    assert waiting.process_dataloader(given) is given


class Asks(Plain):
    """Asks in its first hook how many steps there will be, for which its loader is prepared."""

    def setup(self, stage: str) -> None:
        self.planned = int(self.trainer.estimated_stepping_batches)


def fit_asked() -> list[tuple[int, int, str]]:
    """How many steps were planned and made, and what the loop has read."""
    found = []
    for name, options in ("balanced", {}), ("local_sgd", {"data": "claimed"}):
        model, ran = fit(name, Asks, options=options)
        found.append((model.planned, ran.global_step, type(ran.train_dataloader).__name__))
    return found


def test_a_hook_may_ask_for_the_number_of_steps_before_batches_are_dealt() -> None:
    [found] = run(1, fit_asked)
    assert [name for *_, name in found] == ["BalancedLoader", "ClaimedLoader"]
    assert all(planned == made for planned, made, _ in found)


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


class States(L.Callback):
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
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_adaptive(optimizer: str) -> list[Tensor]:
    whole = {"group_size": 2, "sync_period": 5, "grace_s": math.inf}
    kwargs = {"make": lambda: Adaptive(optimizer), "max_steps": 10, "max_epochs": -1}
    ways = (("wagma", whole), ("local_sgd", {"sync_period": 1}))
    return [fit_weights(name, {**kwargs, "options": options}) for name, options in ways]


@some_now("optimizer", ["adam", "adamw", "momentum", "nesterov"], now=("adam",))
def test_wagma_averages_what_any_optimizer_makes(optimizer: str) -> None:
    """One group of all ranks, waited for, is model averaging."""
    (synchronous, averaging), (theirs, _) = run(2, fit_adaptive, optimizer)
    assert torch.equal(synchronous, theirs)
    assert_close(synchronous, averaging)


def fit_with_averaged_momentum(name: str, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    every = options | {"average_momentum": True}
    kwargs: dict[str, Any] = {"options": every, "max_steps": 4, "max_epochs": -1}
    model, run = fit(name, lambda: Adaptive("adam"), **kwargs)
    states = run.optimizers[0].state.values()
    return weights(model), [s[key].clone() for s in states for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(
    ("name", "options"),
    [("local_sgd", {"sync_period": 2}), ("sgp", {}), ("popsgd", {"blocking": True})],
)
def test_momentum_is_averaged_with_the_weights(name: str, options: dict[str, Any]) -> None:
    (ours, kept), (theirs, others) = run(2, fit_with_averaged_momentum, name, options)
    assert torch.equal(ours, theirs)
    assert len(kept) >= 4
    assert all(map(torch.equal, kept, others))


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ is not installed: apt-get install g++"
)


class Silent(Seeded):
    """Lightning's `self.log` cannot be traced by torch 2.13, under any strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit_compiled(backend: str, folder: str) -> tuple[Tensor, Tensor]:
    cache = Path(folder, os.environ["RANK"])
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_COMPILE_THREADS="1")
    model = Silent()
    run = trainer(strategy("local_sgd"), 2)
    run.fit(torch.compile(model, backend=backend), loader())  # type: ignore[arg-type]
    assert bool(list(cache.rglob("*.so"))) == (backend == "inductor")
    return weights(model), fit_weights("local_sgd", {"make": Silent})


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.exhaustive, needs_compiler])]
)
def test_a_compiled_model_trains_like_the_plain_one(backend: str, tmp_path: Path) -> None:
    ranks = run(2, fit_compiled, backend, str(tmp_path))
    assert same([compiled for compiled, _ in ranks])
    assert_close(*ranks[0], 1e-6 if backend == "eager" else 1e-5)


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


def fit_shared(name: str) -> Tensor:
    model, _ = fit(name, Shared)
    assert model.first.weight is model.second.weight
    assert len(list(model.parameters())) == 8
    assert torch.equal(model.frozen.detach(), torch.ones(1))
    assert torch.equal(model.never.detach(), torch.ones(3))  # not even decayed
    assert model.sometimes != 0.0
    return weights(model)


@every_strategy
def test_tied_frozen_and_unused_parameters_are_treated_as_on_one_device(name: str) -> None:
    assert same(run(2, fit_shared, name))


class Finetuned(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Backbone(L.Callback):
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


# ---- what goes wrong ----
class Diverging(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_rank == 1 and batch_idx == 2 else loss


def fit_diverging(name: str) -> None:
    fit(name, Diverging, options={"check_finite": True, "timeout_s": 150})


@every_strategy
def test_check_finite_names_rank_and_step_on_every_rank(name: str) -> None:
    outcomes = FitWorld().outcomes(3, fit_diverging, name)
    what = "gradient" if name == "allreduce" else "weight"
    text = f"check_finite: every {what} must be finite, got NaN or inf on rank 1 at step 3 in net.0"
    for outcome in outcomes:
        assert text in outcome.error
        assert outcome.exitcode == 1
        assert outcome.seconds < 100  # before the 150 s for which they would wait


# ---- both packages, all launchers ----
def fit_with_both_packages() -> tuple[Tensor, Tensor]:
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
    return weights(model), fit_weights("local_sgd", {"options": {"sync_period": 2}})


def test_pytorch_lightning_trains_like_lightning() -> None:
    for theirs, ours in run(2, fit_with_both_packages):
        assert torch.equal(theirs, ours)


# ---- workers of loaders ----
SHARES: dict[str, tuple[str, dict[str, Any]]] = {
    "units": ("balanced", {}),
    "claims": ("wagma", {"data": "claimed"}),
}


def fit_with_workers(shares: str, persistent: bool) -> int:
    name, options = SHARES[shares]
    train = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    gc.collect()
    gc.disable()  # which would end what is left, at any time and in any thread
    try:
        fit(name, Plain, train, max_epochs=2, options=options)
        return len(multiprocessing.active_children())
    finally:
        gc.enable()


@pytest.mark.parametrize("persistent", [False, True], ids=["each epoch", "persistent"])
@pytest.mark.parametrize("shares", SHARES)
def test_workers_end_with_the_training(shares: str, persistent: bool) -> None:
    assert run(2, fit_with_workers, shares, persistent) == [0, 0]
