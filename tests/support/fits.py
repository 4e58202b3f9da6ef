"""What tests of `Trainer.fit` share: models, and strategies whose waits end soon."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.devices import port_of
from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import FitWorld

NAMES = ("allreduce", "no_sync", "local_sgd", "dpsgd")  # one of each kind
LATER = pytest.mark.exhaustive


def some_now(name: str, values: Iterable[str], now: Container[str]) -> pytest.MarkDecorator:
    """A parameter of which `make test` runs some values, and `make test-all` the others."""
    marked = [pytest.param(v, marks=() if v in now else LATER) for v in values]
    return pytest.mark.parametrize(name, marked)


# Ranks that do not step together stand for all; `make test-all` tries those that do as well.
every_strategy = some_now("name", ["allreduce", "local_sgd"], now=("local_sgd",))


def strategy(name: str, **options: Any) -> Any:
    """By name; what hangs fails soon, saying who waits for whom."""
    defaults = {"local_sgd": {"sync_period": 4}}.get(name, {})
    return strategy_of(name, **{"timeout_s": 60.0, **defaults, **options})


def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return FitWorld().run(world_size, fn, *args)


def errors(world_size: int, fn: Callable[..., Any], *args: Any) -> list[str]:
    return [outcome.error for outcome in FitWorld().outcomes(world_size, fn, *args)]


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


def accelerator_of(device: torch.device) -> Any:
    """What has a Trainer, or Fabric, train on this device, which all its ranks share."""

    class OneDevice(Accelerator):
        def setup_device(self, device: torch.device) -> None:
            port_of(device).enter()

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [device] * devices)
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "one_device")

    return "cpu" if device.type == "cpu" else OneDevice()


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
    chosen = strategy(name, **kwargs.pop("options", {})) if name in ALL_ALGORITHMS else name
    model = make()
    run = trainer(chosen, kwargs.pop("devices", world_size), **kwargs)
    run.fit(model, loader(**(train or {})), None if val is None else loader(**val))
    return model, run


def fit_weights(name: str, kwargs: dict[str, Any]) -> Tensor:
    return weights(fit(name, **kwargs)[0])


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))


def assert_close(given: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


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
        return self.trainer.strategy.session.training.replica.state_dict()  # type: ignore[attr-defined]


class Recorder(L.Callback):
    """The values of a metric after every batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))
