"""Steps of `strategy="balanced"` that users disturb: what goes on, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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

from lightning_dsgd.algorithms.balanced import Balanced
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


class LogsGradients(Plain):
    """Rank 1 is late, and computes fewer micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            threading.Event().wait(0.05)
        return self.loss(batch)

    def on_after_backward(self) -> None:
        bias = self.net[2].bias
        assert isinstance(bias, Tensor)
        assert bias.grad is not None
        self.log("grad", bias.grad.mean(), on_step=True, sync_dist=True)


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


def log_gradients() -> tuple[float, int]:
    _, ran = fit("balanced", LogsGradients, accumulate_grad_batches=4)
    return float(ran.callback_metrics["grad"]), ran.global_step


def test_hooks_of_a_backward_pass_log_over_all_ranks() -> None:
    (ours, steps), (theirs, _) = run(2, log_gradients)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert steps == 2


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


# ---- refused, with the way out ----


class Gathers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0])
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
        (of, (("balanced", Iterates, TWO),), "got training_step(dataloader_iter)"),
    ],
    ids=["loaders", "unfrozen", "all_gather", "dataloader_iter"],
)
def test_what_would_wait_or_differ_is_refused(fn: Any, given: Any, text: str) -> None:
    for error in errors(2, fn, *given):
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
