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
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
)
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_dsgd import STRATEGIES, CommunicationMonitor, LocalSGDStrategy, StragglerInjector
from tests.support.fits import fp16
from tests.support.models import Regression, loader, trainer
from tests.support.worlds import FitWorld

ASYNCHRONOUS = ["no_sync", "local_sgd", "dpsgd"]


def make(name: str, **options: Any) -> Any:
    return STRATEGIES[name](timeout_s=20, **options)


# ---- the arguments of a strategy ----
SECONDS = "must be a number above 0 and at most"
ARGUMENTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"sync_periode": 4},
        ["LocalSGDStrategy has no option sync_periode, got sync_periode=4", "mean sync_period?"],
    ),
    ({"topology": "ring"}, ["has no option topology, got topology='ring'", "takes sync_period"]),
    ({"transport": "smoke"}, ["transport must be ", "got transport='smoke'", '"process_group"']),
    ({"evaluate": "best"}, ['evaluate must be "consensus" or "local"', "got evaluate='best'"]),
    (
        {"average_buffers": "no"},
        ["average_buffers must be True or False, got average_buffers='no'; try"],
    ),
    ({"sync_period": 2.5}, ["sync_period must be a whole number of at least 1, got sync_period=2"]),
    ({"sync_period": "4"}, ["got sync_period='4'; try sync_period=4"]),
    ({"wire_dtype": "fp16"}, ['"e3m0" or "2bit", got wire_dtype=\'fp16\'; try']),
    ({"data": "dealt"}, ['data must be "equal" or "claimed"', "got data='dealt'"]),
    ({"timeout_s": float("nan")}, [f"timeout_s {SECONDS}", "got timeout_s=nan; try"]),
    ({"timeout_s": float("inf")}, ["at most", "got timeout_s=inf; try timeout_s=1800"]),
    ({"timeout_s": "10m"}, [f"timeout_s {SECONDS}", "got timeout_s='10m'; try timeout_s=1800"]),
    ({"heartbeat_timeout_s": True}, [f"heartbeat_timeout_s {SECONDS}", "timeout_s=True; try"]),
    ({"startup_timeout_s": 0.0}, [f"startup_timeout_s {SECONDS}", "timeout_s=0.0; try"]),
    (
        {"find_unused_parameters": True},
        ["cannot honour find_unused_parameters, got find_unused_parameters=True", "leave the"],
    ),
    ({"static_graph": True}, ["cannot honour static_graph, got", "leave the option out"]),
    ({"gradient_as_bucket_view": True}, ["cannot honour gradient_as_bucket_view", "leave the"]),
    ({"ddp_comm_hook": print}, ["cannot honour ddp_comm_hook", '"ddp"']),
    (
        {"model_averaging_period": 4},
        ["cannot honour model_averaging_period", 'use strategy="local_sgd" with sync_period'],
    ),
    ({"sharding_strategy": "FULL"}, ["honour sharding_strategy, got sharding_st", '"fsdp"']),
    ({"stage": 3}, ["cannot honour stage, got stage=3", '"deepspeed"']),
    ({"config": "ds.json"}, ["cannot honour config", '"deepspeed"']),
    ({"batched_grad_copy": 7}, ["LocalSGDStrategy has no option batched_grad_copy, got"]),
]


@pytest.mark.parametrize(("options", "parts"), ARGUMENTS, ids=str)
def test_what_a_strategy_cannot_honour_is_refused(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        LocalSGDStrategy(**options)
    for part in parts:
        assert part in str(caught.value)


def test_arguments_at_the_default_of_ddp_say_nothing() -> None:
    """A command line passes all of them."""
    LocalSGDStrategy(find_unused_parameters=False, broadcast_buffers=None, ddp_comm_hook=None)
    LocalSGDStrategy(accelerator=None, parallel_devices=[torch.device("cpu")])


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


ONLY_LOCKSTEP = 'with strategy="{name}"'
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], list[str], list[str]]] = {
    "SyncBatchNorm": (
        lambda: {"sync_batchnorm": True},
        ASYNCHRONOUS,
        ["sync_batchnorm must be off where", "got sync_batchnorm=True", ONLY_LOCKSTEP, "leave it"],
    ),
    "SyncBatchNorm on CPUs": (
        lambda: {"sync_batchnorm": True},
        ["allreduce"],
        ["sync_batchnorm must be off on CPUs", "got sync_batchnorm=True", "leave it out"],
    ),
    "SyncBatchNorm with pieces of the gradient": (
        lambda: {"strategy": make("allreduce", overlap=True), "sync_batchnorm": True},
        ["allreduce"],
        ["sync_batchnorm must be off with overlap=True", "or set overlap=False"],
    ),
    "accumulation with pieces of the gradient": (
        lambda: {"strategy": make("allreduce", overlap=True), "accumulate_grad_batches": 2},
        ["allreduce"],
        ["a step must have one, got accumulate_grad_batches=2; set overlap=False"],
    ),
    "accumulation that is scheduled with pieces of the gradient": (
        lambda: {
            "strategy": make("allreduce", overlap=True),
            "callbacks": [GradientAccumulationScheduler({4: 2})],
        },
        ["allreduce"],
        ["a step must have one, got accumulate_grad_batches=2; set overlap=False"],
    ),
    "a parameter of two optimizers": (
        lambda: {"model": TwoOwners()},
        ["local_sgd"],
        ["must belong to one optimizer, got 'net.3.bias' in the optimizers 0 and 1", "give it to"],
    ),
    "LBFGS": (
        lambda: {"model": Newton()},
        ["allreduce", "local_sgd"],
        ["got LBFGS", "use SGD or Adam"],
    ),
    "a sparse embedding": (
        lambda: {"model": Sparse()},
        ["allreduce", "no_sync"],
        ["gradients must be dense, got module 'words', Embedding with sparse=True", "sparse=False"],
    ),
    "a lazy module": (
        lambda: {"model": Lazy()},
        ["local_sgd"],
        ["parameters must have a shape, got the lazy parameter 'head.weight'; run a forward pass"],
    ),
    "a fused optimizer with 16-mixed": (
        lambda: {"model": Fused(), "plugins": [fp16()]},
        ["allreduce"],
        ["got a fused SGD; use fused=False"],
    ),
    "a time as val_check_interval": (
        lambda: {"val_check_interval": "00:00:00:10"},
        ["allreduce", "no_sync"],
        ["got val_check_interval as a time", ONLY_LOCKSTEP, "use a number of batches"],
    ),
    "LearningRateFinder": (
        lambda: {"callbacks": [LearningRateFinder()]},
        ["allreduce", "hpsgd"],
        ["got LearningRateFinder", ONLY_LOCKSTEP, "search with Trainer(devices=1)"],
    ),
    "ModelPruning": (
        lambda: {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        ASYNCHRONOUS,
        ["must prune the same weights, got ModelPruning", ONLY_LOCKSTEP, '"allreduce", or'],
    ),
    "BatchSizeFinder": (
        lambda: {"callbacks": [BatchSizeFinder()]},
        ["allreduce", "hpsgd"],
        ["a batch size must be", "got BatchSizeFinder", ONLY_LOCKSTEP, "search with Trainer(devic"],
    ),
    "FSDP's precision": (
        lambda: {"plugins": [FSDPPrecision("bf16-mixed")]},
        ["local_sgd"],
        ["got FSDPPrecision", ONLY_LOCKSTEP, 'use precision="16-mixed" or "bf16-mixed"'],
    ),
    "CommunicationMonitor without our strategy": (
        lambda: {"callbacks": [CommunicationMonitor()]},
        ["ddp"],
        ["CommunicationMonitor needs a strategy of lightning_dsgd, got DDPStrategy; use"],
    ),
    "groups of more ranks than there are": (
        lambda: {"strategy": make("wagma", group_size=3)},
        ["wagma"],
        [
            "group_size must be at least 1 and no larger",
            "got group_size=3 with world_size=2; try gr",
        ],
    ),
    "more stragglers than ranks": (
        lambda: {"callbacks": [StragglerInjector(0.1, num_ranks=3)]},
        ["local_sgd"],
        ["got num_ranks=3 with 2 ranks; try num_ranks=2"],
    ),
    "slow kernels on a CPU": (
        lambda: {"callbacks": [StragglerInjector(0.1, on="device")]},
        ["local_sgd"],
        ["a kernel that spins needs a CUDA device, got cpu; delay the host instead (on="],
    ),
}


def all_refused() -> dict[str, list[str]]:
    """The error of each case under each strategy: one world for all, as errors leave nothing."""
    errors: dict[str, list[str]] = {case: [] for case in REFUSED}
    for case, (options, names, _) in REFUSED.items():
        for name in names:
            strategy = make(name) if name in STRATEGIES else name
            try:
                fit(**{"strategy": strategy, **options()})
            except ValueError as error:
                errors[case].append(str(error))
    return errors


@pytest.fixture(scope="module")
def errors_of_ranks() -> list[dict[str, list[str]]]:
    return FitWorld().run(2, all_refused)


@pytest.mark.xdist_group("refused")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank_before_training(
    case: str, errors_of_ranks: list[dict[str, list[str]]]
) -> None:
    _, names, parts = REFUSED[case]
    for errors in errors_of_ranks:
        assert len(errors[case]) == len(names)
        for name, error in zip(names, errors[case], strict=True):
            for part in parts:
                assert part.format(name=name) in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay_s": -0.1}, "delay_s must not be negative, got delay_s=-0.1; try delay_s=0.3"),
        ({"delay_s": float("nan")}, "delay_s must not be negative, got delay_s=nan; try delay_s="),
        ({"num_ranks": -1}, "num_ranks must not be negative, got num_ranks=-1; try 1"),
        ({"on": "gpu"}, 'on must be "host" or "device", got on=\'gpu\'; try on="host"'),
    ],
)
def test_a_straggler_with_bad_numbers_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        StragglerInjector(**{"delay_s": 0.1, **options})


# ---- processes, and names ----
def fit_with_fewer_processes() -> None:
    fit(make("local_sgd"), devices=4, plugins=[Elsewhere()])


def test_fewer_processes_than_devices_are_refused() -> None:
    (outcome,) = FitWorld().outcomes(1, fit_with_fewer_processes)
    rule = "each device needs a process of its own, got 1 processes for devices=4 and"
    assert rule in outcome.error
    way_out = "start 4 processes, or set devices and num_nodes so that their product is 1"
    assert way_out in outcome.error


NEAR_MISSES = {
    "wagam": '"wagma"',
    "local-sgd": '"local_sgd"',
    "localsgd": '"local_sgd"',
    "Ok-Topk": '"oktopk"',
    "EagerSGDStrategy": '"eager_sgd"',
    "topk-gather": '"topk_allgather"',
}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_misspelt_name_is_answered_with_what_may_have_been_meant(name: str, package: str) -> None:
    theirs = f"You selected an invalid strategy name: `strategy='{name.lower()}'`"
    with pytest.raises(ValueError, match=re.escape(theirs)) as caught:
        importlib.import_module(package).Trainer(strategy=name, accelerator="cpu", logger=False)
    assert f"Did you mean {NEAR_MISSES[name]}, of lightning_dsgd?" in str(caught.value)


@pytest.mark.parametrize("name", ["dpp", "bagua"])
def test_another_unknown_name_is_refused_by_lightning_itself(name: str) -> None:
    """In its own words: nearer to one of its names, or near to none of ours."""
    with pytest.raises(ValueError, match=f"invalid strategy name: `strategy='{name}'`") as caught:
        trainer(name, 2)
    assert str(caught.value).endswith("https://lightning.ai")


# ---- ranks that differ ----
def changed(change: Callable[[NeverTrained], Any], of_rank: int = 2) -> NeverTrained:
    """A model that is another one on one rank."""
    model = NeverTrained()
    if rank() == of_rank:
        change(model)
    return model


def deepened(model: NeverTrained) -> None:
    model.net.append(nn.Linear(1, 1))


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
DIFFERENT: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "shape": (
        lambda: changed(widened, of_rank=1),
        [
            *(A_MODEL, "parameter 'net.0.weight' of shape (16, 10) and torch.float32"),
            *("on ranks 0 and 2", "parameter 'net.0.weight' of shape (17, 10) and torch.float32"),
            *("on rank 1", "build it from the same arguments everywhere"),
        ],
    ),
    "number": (
        lambda: changed(deepened),
        [
            *(A_MODEL, "got 9 parameters and buffers on ranks 0 and 1"),
            *("11 parameters and buffers on rank 2", "build it from the same arguments everywhere"),
        ],
    ),
    "dtype": (
        lambda: changed(lambda model: model.net[3].double(), of_rank=0),
        ["'net.3.weight' of shape (1, 16) and torch.float64", "on rank 0"],
    ),
    "buffer": (
        lambda: changed(lambda model: model.net[1].register_buffer("running_var", torch.ones(3))),
        ["buffer 'net.1.running_var' of shape (3,)", "on rank 2"],
    ),
    "optimizer": (Freezing, ["'net.3.bias' of shape (1,)", "trained by no optimizer on rank 1"]),
    "kind": (AdamOnOne, ["trained by optimizer 0 (SGD) on ranks 0 and 1", "0 (Adam) on rank 2"]),
    "hyperparameters": (
        lambda: make("local_sgd", sync_period=8 if rank() == 1 else 4),
        [
            *(A_STRATEGY, 'strategy="local_sgd" with sync_period=4', "on ranks 0 and 2"),
            *('strategy="local_sgd" with sync_period=8', "on rank 1; give every rank the same arg"),
        ],
    ),
    "algorithms": (
        lambda: make(ASYNCHRONOUS[rank()]),
        [
            *(A_STRATEGY, 'strategy="no_sync" with ', "on rank 0", "on rank 1", "on rank 2"),
            *('"local_sgd" with sync_period=8', "\"dpsgd\" with topology='ring'"),
        ],
    ),
    "what is evaluated": (
        lambda: make("no_sync", evaluate="local" if rank() == 2 else "consensus"),
        ["evaluate='consensus'", "on ranks 0 and 1", "evaluate='local'", "on rank 2"],
    ),
    "buffers that are averaged": (
        lambda: make("no_sync", average_buffers=rank() == 0),
        ["average_buffers=True", "on rank 0", "average_buffers=False", "on ranks 1 and 2"],
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
    for case, (_, parts) in DIFFERENT.items():
        for part in parts:
            assert part in errors[case]
