"""What cannot work is refused before training: what must hold, what was given, what to do."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
)
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_dsgd import (
    CommunicationMonitor,
    DecentralizedStrategy,
    LocalSGD,
    StragglerInjector,
)
from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import fp16
from tests.support.models import Regression, loader, trainer
from tests.support.worlds import FitWorld


def make(name: str, **options: Any) -> Any:
    return strategy_of(name, timeout_s=20, **options)


# ---- the arguments of a strategy ----
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {"timeot_s": 4},
        "DecentralizedStrategy has no option timeot_s, got .*mean timeout_s",
    ),
    ({"sync_period": 4}, r"got sync_period=4 for the strategy; write .*LocalSGD\(sync_period=4\)"),
    (
        {"grace_s": 0.1},
        'grace_s is an option of wagma, eager_sgd, got grace_s=0.1 with "local_sgd"; ',
    ),
    ({"micro_batches": 2}, 'micro_batches is an option of balanced, got micro_batches=2 with "loc'),
    ({"transport": "smoke"}, "transport must be .*got transport='smoke'"),
    ({"evaluate": "best"}, 'evaluate must be "consensus" or "local".*got evaluate=.best'),
    ({"average_buffers": "no"}, "average_buffers must be True or False, got average_buffers='no'"),
    ({"data": "dealt"}, 'data must be "equal" or "claimed".*got data=\'dealt\''),
    ({"timeout_s": float("nan")}, "timeout_s must be a number above 0.* got timeout_s=nan; try"),
    ({"heartbeat_timeout_s": True}, "heartbeat_timeout_s must be a number above 0.*s=True; try"),
    ({"find_unused_parameters": True}, "cannot honour find_unused_parameters, got .*leave the"),
    ({"ddp_comm_hook": print}, 'cannot honour ddp_comm_hook.*"ddp"'),
    ({"model_averaging_period": 4}, 'honour model_averaging_period.*"local_sgd" with sync_period'),
    ({"sharding_strategy": "FULL"}, 'honour sharding_strategy, got sharding_st.*"fsdp"'),
    ({"checkpoint_io": "x"}, "honour checkpoint_io, got .*Trainer, or to Fabric, in plugins="),
    ({"timeout": 60}, "honour timeout, got timeout=60: torch's own .* as long as timeout_s says"),
    ({"stage": 3}, 'cannot honour stage, got stage=3.*"deepspeed"'),
]


@pytest.mark.parametrize(("options", "text"), ARGUMENTS, ids=str)
def test_what_a_strategy_cannot_honour_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DecentralizedStrategy(LocalSGD(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_period": 2.5}, "sync_period must be a whole number of at least 1, got sync_period"),
        ({"wire_dtype": "fp16"}, '"e3m0" or "2bit", got wire_dtype=\'fp16\'; try'),
    ],
)
def test_hyperparameters_that_break_their_rules_are_refused(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        DecentralizedStrategy(LocalSGD(**options))


def test_arguments_at_the_default_of_ddp_say_nothing() -> None:
    """A command line passes all of them."""
    DecentralizedStrategy(
        "local_sgd", find_unused_parameters=False, broadcast_buffers=None, ddp_comm_hook=None
    )
    DecentralizedStrategy("local_sgd", accelerator=None, parallel_devices=[torch.device("cpu")])


# ---- Trainer, callbacks, optimizers, models ----
class NeverTrained(Regression):
    """Fails the test if training begins."""

    def training_step(self, *args: Any) -> Any:
        raise AssertionError("training has begun")


def fit(strategy: Any, model: Any = None, **options: Any) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    model = NeverTrained() if model is None else model
    trainer(strategy, options.pop("devices", world_size), **options).fit(model, loader())


class TwoOwners(NeverTrained):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        last = self.net[3].bias
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD([last], lr=0.1)]


class Newton(NeverTrained):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Fused(NeverTrained):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, fused=True)


class Sparse(NeverTrained):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)


class Lazy(NeverTrained):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)


class Elsewhere(LightningEnvironment):
    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "SyncBatchNorm": (
        lambda: {"sync_batchnorm": True},
        'must be off where.*got sync_batchnorm=True.*with strategy="local_sgd".*leave it',
    ),
    "SyncBatchNorm on CPUs": (
        lambda: {"strategy": "allreduce", "sync_batchnorm": True},
        "sync_batchnorm must be off on CPUs.*got sync_batchnorm=True.*leave it out",
    ),
    "SyncBatchNorm with pieces of the gradient": (
        lambda: {"strategy": make("allreduce", overlap=True), "sync_batchnorm": True},
        "sync_batchnorm must be off with overlap=True.*or set overlap=False",
    ),
    "accumulation with pieces of the gradient": (
        lambda: {"strategy": make("allreduce", overlap=True), "accumulate_grad_batches": 2},
        "a step must have one, got accumulate_grad_batches=2; set overlap=False",
    ),
    "accumulation with pieces of a node's gradient": (
        lambda: {
            "strategy": make("sgp", node_size=1, num_buckets=2),
            "accumulate_grad_batches": 2,
        },
        "num_buckets sends.*got accumulate_grad_batches=2; set num_buckets=None",
    ),
    "a parameter of two optimizers": (
        lambda: {"model": TwoOwners()},
        "must belong to one optimizer, got 'net.3.bias' in the optimizers 0 and 1.*give it to",
    ),
    "LBFGS": (lambda: {"model": Newton()}, "got LBFGS.*use SGD or Adam"),
    "a sparse embedding": (
        lambda: {"model": Sparse()},
        "must be dense, got module 'words', Embedding with sparse=True.*sparse=False",
    ),
    "a lazy module": (
        lambda: {"model": Lazy()},
        "must have a shape, got the lazy parameter 'head.weight'; run a forward pass",
    ),
    "a fused optimizer with 16-mixed": (
        lambda: {"strategy": "allreduce", "model": Fused(), "plugins": [fp16()]},
        "got a fused SGD; use fused=False",
    ),
    "a time as val_check_interval": (
        lambda: {"strategy": "no_sync", "val_check_interval": "00:00:00:10"},
        'got val_check_interval as a time.*with strategy="no_sync".*use a number of batches',
    ),
    "LearningRateFinder": (
        lambda: {"strategy": "hpsgd", "callbacks": [LearningRateFinder()]},
        r'got LearningRateFinder.*strategy="hpsgd".*search with Trainer\(devices=1\)',
    ),
    "ModelPruning": (
        lambda: {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        'must prune the same weights, got ModelPruning.*strategy="local_sgd".*"allreduce", or',
    ),
    "BatchSizeFinder": (
        lambda: {"strategy": "allreduce", "callbacks": [BatchSizeFinder()]},
        r"a batch size must be.*got BatchSizeFinder.*search with Trainer\(devices=1\)",
    ),
    "FSDP's precision": (
        lambda: {"plugins": [FSDPPrecision("bf16-mixed")]},
        'got FSDPPrecision.*strategy="local_sgd".*use precision="16-mixed" or "bf16-mixed"',
    ),
    "CommunicationMonitor without our strategy": (
        lambda: {"strategy": "ddp", "callbacks": [CommunicationMonitor()]},
        "CommunicationMonitor needs a strategy of lightning_dsgd, got DDPStrategy; use",
    ),
    "groups of more ranks than there are": (
        lambda: {"strategy": make("wagma", group_size=3)},
        "group_size must be at least 1 and no larger.*got group_size=3 with world_size=2; try gr",
    ),
    "slow kernels on a CPU": (
        lambda: {"callbacks": [StragglerInjector(0.1, on="device")]},
        r"a kernel that spins needs a CUDA device, got cpu; delay the host instead \(on=",
    ),
}


def all_refused() -> dict[str, str]:
    """The error of each case: one world for all, as errors leave nothing."""
    errors = {}
    for case, (options, _) in REFUSED.items():
        given = {"strategy": "local_sgd", **options()}
        if given["strategy"] in ALL_ALGORITHMS:
            given["strategy"] = make(given["strategy"])
        try:
            fit(**given)
        except ValueError as error:
            errors[case] = str(error)
    return errors


@pytest.fixture(scope="module")
def errors_of_ranks() -> list[dict[str, str]]:
    return FitWorld().run(2, all_refused)


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank_before_training(
    case: str, errors_of_ranks: list[dict[str, str]]
) -> None:
    for errors in errors_of_ranks:
        assert re.search(REFUSED[case][1], errors[case], re.DOTALL)


def test_a_straggler_with_bad_numbers_is_refused() -> None:
    text = "delay_s must not be negative, got delay_s=nan; try delay_s="
    with pytest.raises(ValueError, match=re.escape(text)):
        StragglerInjector(delay_s=float("nan"))
    text = 'on must be "host" or "device", got on=\'gpu\'; try on="host"'
    with pytest.raises(ValueError, match=re.escape(text)):
        StragglerInjector(0.1, on="gpu")


# ---- processes, and names ----
def fit_with_fewer_processes() -> None:
    fit(make("local_sgd"), devices=4, plugins=[Elsewhere()])


def foreign(device: Any) -> CPUAccelerator:
    """Returns an accelerator of another package, whose devices are what it likes."""

    class Foreign(CPUAccelerator):
        @staticmethod
        def get_parallel_devices(devices: Any) -> list[Any]:
            return [device] * int(devices)

    return Foreign()


def test_a_trainer_that_trains_nothing_leaves_devices_and_the_environment_alone() -> None:
    before = dict(os.environ)
    for device in ("an elephant", torch.device("cuda", 0)):
        made = L.Trainer(strategy="balanced", accelerator=foreign(device), devices=2, logger=False)
        assert made.strategy.parallel_devices == [device] * 2
    assert dict(os.environ) == before


def test_fewer_processes_than_devices_are_refused() -> None:
    (outcome,) = FitWorld().outcomes(1, fit_with_fewer_processes)
    rule = "each device needs a process of its own, got 1 processes for devices=4 and"
    assert rule in outcome.error
    way_out = "start 4 processes, or set devices and num_nodes so that their product is 1"
    assert way_out in outcome.error


NEAR_MISSES = {"wagam": "wagma", "Ok-Topk": "oktopk", "EagerSGDStrategy": "eager_sgd", "dpp": ""}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_misspelt_name_is_answered_with_what_may_have_been_meant(package: str) -> None:
    """In Lightning's own words alone where it is nearer to one of Lightning's names."""
    for name, meant in NEAR_MISSES.items():
        theirs = f"You selected an invalid strategy name: `strategy='{name.lower()}'`"
        with pytest.raises(ValueError, match=re.escape(theirs)) as caught:
            importlib.import_module(package).Trainer(strategy=name, accelerator="cpu", logger=False)
        assert (f'Did you mean "{meant}", of lightning_dsgd?' in str(caught.value)) == bool(meant)


# ---- ranks that differ ----
def changed(change: Callable[[NeverTrained], Any], of_rank: int = 2) -> NeverTrained:
    """A model that is another one on one rank."""
    model = NeverTrained()
    if rank() == of_rank:
        change(model)
    return model


def widened(model: NeverTrained) -> None:
    model.net[0], model.net[1] = nn.Linear(10, 17), nn.BatchNorm1d(17)


class Freezing(NeverTrained):
    def configure_optimizers(self) -> Any:
        trained = list(self.parameters())
        return torch.optim.SGD(trained[:-1] if rank() == 1 else trained, lr=0.1)


class AdamOnOne(NeverTrained):
    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adam if rank() == 2 else torch.optim.SGD
        return kind(self.parameters(), lr=0.1)


def rank() -> int:
    return int(os.environ["RANK"])


A_MODEL = "the model must be the same on all ranks, got "
A_STRATEGY = "the strategy must be the same on all ranks, got "
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (
        lambda: changed(widened, of_rank=1),
        A_MODEL + r"parameter 'net.0.weight' of shape \(16, 10\) and torch.float32.* on ranks "
        r"0 and 2.*parameter 'net.0.weight' of shape \(17, 10\) and torch.float32.*on rank 1"
        ".*build it from the same arguments everywhere",
    ),
    "buffer": (
        lambda: changed(lambda model: model.net[1].register_buffer("running_var", torch.ones(3))),
        r"buffer 'net.1.running_var' of shape \(3,\).*on rank 2",
    ),
    "optimizer": (Freezing, r"'net.3.bias' of shape \(1,\).*trained by no optimizer on rank 1"),
    "kind": (
        AdamOnOne,
        r"trained by optimizer 0 \(SGD\) on ranks 0 and 1.* 0 \(Adam\) on rank 2",
    ),
    "hyperparameters": (
        lambda: make("local_sgd", sync_period=8 if rank() == 1 else 4),
        A_STRATEGY + 'strategy="local_sgd" with sync_period=4.*on ranks 0 and 2'
        '.*strategy="local_sgd" with sync_period=8.*on rank 1; give every rank the same arg',
    ),
    "algorithms": (
        lambda: make(("no_sync", "local_sgd", "dpsgd")[rank()]),
        A_STRATEGY + 'strategy="no_sync" with .*on rank 0.*"local_sgd" with sync_period=2.*on rank '
        "1.*\"dpsgd\" with topology='ring'.*on rank 2",
    ),
}


def fit_different() -> dict[str, str]:
    """What is said of each difference: one world for all, as errors leave nothing behind."""
    errors = {}
    for case, (make_different, _) in DIFFERENT.items():
        made = make_different()
        is_model = isinstance(made, L.LightningModule)
        try:
            fit(make("local_sgd") if is_model else made, made if is_model else None)
        except ValueError as error:
            errors[case] = str(error)
    return errors


def test_models_and_strategies_that_differ_between_ranks_are_refused_on_all() -> None:
    """Else some would wait for messages that never come, or take one kind for another."""
    errors, *others = FitWorld().run(3, fit_different)
    assert others == [errors] * 2
    for case, (_, text) in DIFFERENT.items():
        assert re.search(text, errors[case], re.DOTALL), errors[case]
