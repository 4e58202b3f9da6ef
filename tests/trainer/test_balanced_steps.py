"""Steps of `strategy="balanced"` that users disturb: what goes on, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.trainer.refusals import check_sync_batchnorm
from tests.support.fits import LATER, Plain, Seeded, errors, fit, run, strategy
from tests.support.models import loader, trainer, weights


class Skips(Plain):
    """Has no loss for some of its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch[0][0, 0] < 0 else {"loss": self.loss(batch)}


class ByZero(Plain):
    """Has a loss without a gradient where `Skips` has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * 0 if batch[0][0, 0] < 0 else loss


class LogsUnequally(Plain):
    """Rank 0 logs in each of its 4 micro-batches of a step, and rank 1 in the first of its 4."""

    slot = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.slot = batch_idx % 4
        self.trainer.strategy.barrier()  # so that no rank computes more than one in a slot

    def on_after_backward(self) -> None:
        if self.global_rank == 0 or self.slot == 0:
            self.log("is_of_rank_0", 1.0 - self.global_rank, on_step=True, sync_dist=True)


def of_two(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    return of(first), of(second)


def of(given: tuple[str, Callable[[], Any], dict[str, Any]]) -> Tensor:
    name, make, kwargs = given
    return weights(fit(name, make, **kwargs)[0]).double()


def assert_alike(ranks: list[tuple[Tensor, Tensor]]) -> None:
    for ours, theirs in ranks:
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        assert torch.equal(ours, ranks[0][0])


TWO: dict[str, Any] = {"accumulate_grad_batches": 2}


def test_a_micro_batch_without_a_loss_has_no_gradient() -> None:
    assert_alike(run(2, of_two, ("balanced", Skips, TWO), ("ddp", ByZero, TWO)))


def log_unequally() -> tuple[float, int]:
    options = {"backups": False}
    _, ran = fit("balanced", LogsUnequally, accumulate_grad_batches=4, options=options)
    return float(ran.callback_metrics["is_of_rank_0"]), ran.global_step


def test_hooks_of_a_backward_pass_log_over_all_ranks() -> None:
    assert run(2, log_unequally) == [(pytest.approx(4 / 5), 2)] * 2


class Unfreezes(L.Callback):
    """Trains the first layer from some batch on."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_fit_start(self, ran: Any, module: Any) -> None:
        module.net[0].requires_grad_(False)

    def on_train_batch_start(self, ran: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            module.net[0].requires_grad_(True)


def unfreeze(name: str, at: int) -> Tensor:
    return of((name, Plain, {"accumulate_grad_batches": 2, "callbacks": [Unfreezes(at)]}))


def unfreeze_both() -> tuple[Tensor, Tensor]:
    return unfreeze("balanced", 4), unfreeze("allreduce", 4)


def test_parameters_may_be_unfrozen_before_a_step() -> None:
    assert_alike(run(2, unfreeze_both))


class Counts(Plain):
    """Counts the samples that enter a sum, and logs the loss of each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()
        self.logged = SumMetric()
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        assert self.count(float(len(batch[0]))) == len(batch[0])
        self.log("train_loss", loss, on_step=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("first", loss, on_step=False, on_epoch=True, rank_zero_only=True)
        self.logged(1.0)
        self.log("logged", self.logged, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.total = float(self.count.compute())


class StallsOnce(Counts):
    """Rank 1 stalls in its first micro-batch until rank 0 has made the only step."""

    stalls: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and self.stalls is not None:
            until(self.stalls.exists)
            self.stalls = None
        return loss


class Steps(L.Callback):
    """Says that rank 0 has made its last step of the epoch."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_train_batch_end(self, ran: Any, *args: Any) -> None:
        if ran.global_rank == 0 and args[-1] == 7:
            self.flag.touch()


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.01)


def fit_without_a_unit(
    flag: Path,
    where: str,
    max_epochs: int = 1,
    make: Callable[[], Counts] = StallsOnce,
    callbacks: Sequence[L.Callback] = (),
) -> tuple[float, dict[str, float]]:
    """Rank 1 stalls before its first micro-batch, or in it, until rank 0 has made the step."""
    begin_step = Balancing.begin_step

    def late(balancing: Balancing, within: int) -> None:
        if balancing._net.rank == 1:
            until(flag.exists)
        begin_step(balancing, within)

    StallsOnce.stalls = flag if where == "in" else None
    with mock.patch.object(Balancing, "begin_step", late if where == "before" else begin_step):
        model, ran = fit(
            "balanced",
            make,
            accumulate_grad_batches=8,
            callbacks=[Steps(flag), *callbacks],
            max_epochs=max_epochs,
        )
    assert isinstance(model, Counts)
    return model.total, {name: float(value) for name, value in ran.callback_metrics.items()}


LOGGED = {"train_loss", "both", "both_step", "both_epoch", "first", "logged"}


@pytest.mark.parametrize("where", ["before", "in"])
def test_a_rank_whose_units_others_have_computed_shows_what_they_log(
    where: str, tmp_path: Path
) -> None:
    (count, logs), (same_count, shown) = run(2, fit_without_a_unit, tmp_path / "flag", where)
    assert count == same_count == 128
    assert logs.keys() == LOGGED
    assert shown == pytest.approx(logs)
    assert logs["logged"] == 16


def test_a_rank_logs_after_an_epoch_in_which_others_have_computed_all(tmp_path: Path) -> None:
    for _, logs in run(2, fit_without_a_unit, tmp_path / "flag", "before", 2):
        assert logs.keys() == LOGGED


class Returns(Counts):
    """Returns more than a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}


class Sees(L.Callback):
    """Holds which losses it has seen, and those of the batches, before the step."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def on_train_batch_end(self, ran: Any, model: Any, outputs: Any, *args: Any) -> None:
        batch, slot = args
        assert outputs["size"] == len(batch[0])
        if slot < 7:
            own = float(model.loss(batch)) / ran.accumulate_grad_batches
            self.losses.append((float(outputs["loss"]), own))


def see_without_a_unit(flag: Path) -> tuple[float, list[tuple[float, float]]]:
    sees = Sees()
    count, _ = fit_without_a_unit(flag, "before", make=Returns, callbacks=[sees])
    return count, sees.losses


def test_callbacks_see_a_batchs_own_output_on_a_rank_that_has_computed_nothing(
    tmp_path: Path,
) -> None:
    for count, losses in run(2, see_without_a_unit, tmp_path / "flag"):
        assert count == 128
        assert [shown for shown, _ in losses] == pytest.approx([own for _, own in losses])


# ---- refused, with the way out ----


class Gathers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0])
        return self.loss(batch)


class Asks(Plain):
    """Its metric asks all ranks in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count(float(len(batch[0])))
        return self.loss(batch)


class Meets(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier()
        return self.loss(batch)


class Iterates(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def fit_several() -> None:
    ran = trainer(strategy("balanced"), 2)
    ran.fit(Plain(), {"a": loader(64), "b": loader(32)})


@pytest.mark.parametrize(
    ("fn", "given", "text"),
    [
        (fit_several, (), "got a dict of loaders"),
        (unfreeze, ("balanced", 3), "before the first micro-batch of a step"),
        (of, (("balanced", Gathers, TWO),), "must not wait for all ranks, got all_gather"),
        (of, (("balanced", Asks, TWO),), "must not ask all ranks in training_step, got SumMetric"),
        (of, (("balanced", Meets, TWO),), "must not wait for all ranks, got a barrier"),
        (of, (("balanced", Iterates, TWO),), "got training_step(dataloader_iter)"),
    ],
    ids=["loaders", "unfrozen", "all_gather", "metric", "barrier", "dataloader_iter"],
)
def test_what_would_wait_or_differ_is_refused(fn: Any, given: Any, text: str) -> None:
    for error in errors(2, fn, *given):
        assert text in error


class Newton(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Twice(torch.optim.SGD):
    """Computes two gradients a step."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class TwiceAStep(Plain):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), self.lr)


@pytest.mark.parametrize(
    ("make", "text"),
    [(Newton, "is not known before"), (TwiceAStep, "got Twice, which calls its closure again")],
)
def test_several_gradients_a_step_are_refused_on_one_rank_too(make: Any, text: str) -> None:
    [error] = errors(1, of, ("balanced", make, TWO))
    assert text in error


def test_batchnorm_over_all_ranks_is_refused_on_every_device() -> None:
    with pytest.raises(ValueError, match="different numbers of micro-batches"):
        check_sync_batchnorm(Balanced(), torch.device("cuda"))


# ---- callbacks that change what a step is ----


class Backbone(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.net = self.net[0], nn.Sequential(nn.Tanh(), self.net[2])

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = ((self.net(self.backbone(batch[0])) - batch[1]) ** 2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr)


class Ema(WeightAveraging):
    def __init__(self) -> None:
        averaged = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        super().__init__(multi_avg_fn=averaged)


CALLBACKS: dict[str, tuple[Any, Callable[[], L.Callback]]] = {
    "schedule": (Plain, lambda: GradientAccumulationScheduler({0: 1, 1: 4, 2: 3})),
    "finetuning": (Backbone, lambda: BackboneFinetuning(1, backbone_initial_lr=0.01)),
    "swa": (Plain, lambda: StochasticWeightAveraging(0.01, 1, annealing_epochs=1)),
    "swa with BatchNorm": (Seeded, lambda: StochasticWeightAveraging(0.01, 1, annealing_epochs=1)),
    "ema": (Plain, Ema),
    "reload": (Plain, L.Callback),
}


def fit_with_callback(name: str) -> tuple[Tensor, Tensor]:
    make, callback = CALLBACKS[name]
    found = []
    for chosen in ("balanced", "allreduce"):
        kwargs: dict[str, Any] = {"max_epochs": 3, "callbacks": [callback()]}
        if name != "schedule":
            kwargs["accumulate_grad_batches"] = 2
        if name == "reload":
            kwargs["reload_dataloaders_every_n_epochs"] = 1
        found.append(of((chosen, make, kwargs)))
    return found[0], found[1]


@LATER
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_change_steps_as_with_allreduce(name: str) -> None:
    ranks = run(2, fit_with_callback, name)
    for ours, theirs in ranks:
        assert torch.equal(ours, ranks[0][0])
        if "BatchNorm" not in name:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
