"""What cannot work is refused before training: what must hold, what was given, what to do."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_dsgd import (
    STRATEGIES,
    CommunicationMonitor,
    LocalSGDStrategy,
    StragglerInjector,
)
from tests.support import worlds
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import FitWorld

ASYNCHRONOUS = ["no_sync", "local_sgd", "dpsgd"]


def make(name: str, **options: Any) -> Any:
    return STRATEGIES[name](timeout_s=20, **options)


# ---- the arguments of a strategy ----

ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "misspelt": (
        {"sync_periode": 4},
        [
            "LocalSGDStrategy has no option sync_periode, got sync_periode=4",
            "sync_period, ",
            "; did you mean sync_period?",
        ],
    ),
    "of another algorithm": (
        {"topology": "ring"},
        ["has no option topology, got topology='ring'", "it takes sync_period"],
    ),
    "transport": (
        {"transport": "smoke"},
        ["transport must be ", "got transport='smoke'", '"process_group"'],
    ),
    "evaluate": (
        {"evaluate": "best"},
        ['evaluate must be "consensus" or "local"', "got evaluate='best'"],
    ),
    "no time": (
        {"timeout_s": 0},
        ["timeout_s must be positive and at most", "got timeout_s=0; try"],
    ),
    "no number of seconds": (
        {"timeout_s": float("nan")},
        ["timeout_s must be positive and at most", "got timeout_s=nan; try"],
    ),
    "no heartbeat": (
        {"heartbeat_timeout_s": -1.0},
        ["heartbeat_timeout_s must be positive and", "got heartbeat_timeout_s=-1.0; try"],
    ),
    "a time as text": (
        {"timeout_s": "10m"},
        ["timeout_s must be a number of seconds, got timeout_s='10m'; try timeout_s=1800"],
    ),
    "no time at all": (
        {"timeout_s": None},
        ["timeout_s must be a number of seconds, got timeout_s=None; try timeout_s=1800"],
    ),
    "a flag for a time": (
        {"heartbeat_timeout_s": True},
        ["heartbeat_timeout_s must be a number of seconds, got heartbeat_timeout_s=True; try"],
    ),
    "no time to start": (
        {"startup_timeout_s": 0.0},
        ["startup_timeout_s must be positive and", "got startup_timeout_s=0.0; try"],
    ),
    "no end": (
        {"timeout_s": float("inf")},
        ["timeout_s must be positive and at most", "got timeout_s=inf; try timeout_s=1800"],
    ),
    "find_unused_parameters": (
        {"find_unused_parameters": True},
        ["cannot honour find_unused_parameters, got find_unused_parameters=True", "leave the"],
    ),
    "static_graph": (
        {"static_graph": True},
        ["cannot honour static_graph, got static_graph=True", "leave the option out"],
    ),
    "gradient_as_bucket_view": (
        {"gradient_as_bucket_view": True},
        ["cannot honour gradient_as_bucket_view", "leave the option out"],
    ),
    "ddp_comm_hook": ({"ddp_comm_hook": print}, ["cannot honour ddp_comm_hook", '"ddp"']),
    "model_averaging_period": (
        {"model_averaging_period": 4},
        ["cannot honour model_averaging_period", 'use strategy="local_sgd" with sync_period'],
    ),
    "FSDP": (
        {"sharding_strategy": "FULL_SHARD"},
        ["cannot honour sharding_strategy, got sharding_strategy='FULL_SHARD'", '"fsdp"'],
    ),
    "DeepSpeed": ({"stage": 3}, ["cannot honour stage, got stage=3", '"deepspeed"']),
    "DeepSpeed's file": ({"config": "ds.json"}, ["cannot honour config", '"deepspeed"']),
    "DDP's, unknown to us": (
        {"batched_grad_copy": 7},
        ["LocalSGDStrategy has no option batched_grad_copy, got batched_grad_copy=7"],
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_a_strategy_cannot_honour_is_refused_when_it_is_made(case: str) -> None:
    options, parts = ARGUMENTS[case]
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        LocalSGDStrategy(**options)
    for part in parts:
        assert part in str(caught.value)


def test_arguments_at_the_default_of_ddp_say_nothing() -> None:
    """A command line passes all of them."""
    LocalSGDStrategy(find_unused_parameters=False, broadcast_buffers=None, ddp_comm_hook=None)


HYPERPARAMETERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sync_period=0": (
        "local_sgd",
        {"sync_period": 0},
        "sync_period must be a whole number of at least 1, got sync_period=0; try sync_period=8",
    ),
    "sync_period=2.5": (
        "local_sgd",
        {"sync_period": 2.5},
        "sync_period must be a whole number of at least 1, got sync_period=2.5; try sync_period=8",
    ),
    "text for a number": (
        "wagma",
        {"group_size": "4"},
        "group_size must be None or a whole number of at least 1, got group_size='4'; try "
        "group_size=4",
    ),
    "text for no number": (
        "wagma",
        {"group_size": "four"},
        "group_size must be None or a whole number of at least 1, got group_size='four'; try "
        "group_size=None",
    ),
    "text for a flag": (
        "wagma",
        {"overlap": "True"},
        "overlap must be True or False, got overlap='True'; try overlap=True",
    ),
    "another library's name": (
        "wagma",
        {"wire_dtype": "fp16"},
        'wire_dtype must be "float32", "bfloat16", "int8" or "int4", got wire_dtype=\'fp16\'; '
        "try wire_dtype='bfloat16'",
    ),
    "a group of nobody": (
        "wagma",
        {"group_size": 0},
        "group_size must be None or a whole number of at least 1, got group_size=0; try "
        "group_size=None",
    ),
    "a period of nothing": (
        "wagma",
        {"sync_period": 0},
        "sync_period must be a whole number of at least 1, got sync_period=0; try sync_period=100",
    ),
    "topology": (
        "dpsgd",
        {"topology": "star"},
        "topology must be \"ring\", got topology='star'; try topology='ring'",
    ),
    "quorum": (
        "eager_sgd",
        {"quorum": "all"},
        "quorum must be \"solo\" or \"majority\", got quorum='all'; try quorum='majority'",
    ),
    "max_local_steps": (
        "hpsgd",
        {"max_local_steps": 0},
        "max_local_steps must be None or a whole number of at least 1, got max_local_steps=0; "
        "try max_local_steps=None",
    ),
    "num_peers": (
        "sgp",
        {"num_peers": 0},
        "num_peers must be a whole number of at least 1, got num_peers=0; try num_peers=1",
    ),
    "nodes of nobody": (
        "sgp",
        {"hierarchical": True, "node_size": 0},
        "node_size must be None or a whole number of at least 1, got node_size=0; try "
        "node_size=None",
    ),
    "local_steps": (
        "popsgd",
        {"local_steps": 0},
        "local_steps must be a whole number of at least 1, got local_steps=0; try local_steps=1",
    ),
    "density": (
        "gtopk",
        {"density": 0.0},
        "density must be None or a number above 0 and at most 1, got density=0.0; try density=None",
    ),
    "wire_dtype": (
        "oktopk",
        {"wire_dtype": "int2"},
        'wire_dtype must be "float32", "bfloat16", "int8" or "int4", got wire_dtype=\'int2\'; '
        "try wire_dtype='int8'",
    ),
    "seed": ("adpsgd", {"seed": "x"}, "seed must be a whole number, got seed='x'; try seed=0"),
}


@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_a_hyperparameter_that_cannot_work_is_refused_when_the_strategy_is_made(case: str) -> None:
    """Before there are ranks; no strategy asks for their number."""
    name, options, text = HYPERPARAMETERS[case]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        STRATEGIES[name](**options)


def test_a_hyperparameter_that_needs_more_ranks_is_refused_before_training() -> None:
    for outcome in FitWorld().outcomes(2, fit_with_large_groups):
        assert outcome.error.startswith("ValueError: group_size must be at least 1 and no larger")
        assert "got group_size=3 with world_size=2; try group_size=" in outcome.error


def fit_with_large_groups() -> None:
    fit(make("wagma", group_size=3))


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


class Sparse(NeverTrained):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)


class Lazy(NeverTrained):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)


class Elsewhere(LightningEnvironment):
    """Ranks that someone else has started, fewer than there are devices."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass


def case_sync_batchnorm(name: str) -> None:
    fit(make(name), sync_batchnorm=True)


def case_two_owners(name: str) -> None:
    fit(make(name), TwoOwners())


def case_newton(name: str) -> None:
    fit(make(name), Newton())


def case_sparse(name: str) -> None:
    fit(make(name), Sparse())


def case_lazy(name: str) -> None:
    fit(make(name), Lazy())


def case_timed_validation(name: str) -> None:
    fit(make(name), val_check_interval="00:00:00:10")


def case_learning_rate_finder(name: str) -> None:
    fit(make(name), callbacks=[LearningRateFinder()])


def case_pruning(name: str) -> None:
    fit(make(name), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def case_batch_size_finder(name: str) -> None:
    fit(make(name), callbacks=[BatchSizeFinder()])


def case_fsdp_precision(name: str) -> None:
    fit(make(name), plugins=[FSDPPrecision("bf16-mixed")])


def case_monitor(name: str) -> None:
    fit("ddp", callbacks=[CommunicationMonitor()])


def case_too_many_stragglers(name: str) -> None:
    fit(make(name), callbacks=[StragglerInjector(0.1, num_ranks=3)])


def case_kernels_on_the_cpu(name: str) -> None:
    fit(make(name), callbacks=[StragglerInjector(0.1, on="device")])


def case_fewer_processes(name: str) -> None:
    fit(make(name), devices=4, plugins=[Elsewhere()])


ONLY_LOCKSTEP = 'with strategy="{name}"'
REFUSED: dict[str, tuple[Callable[[str], None], list[str], list[str]]] = {
    "SyncBatchNorm": (
        case_sync_batchnorm,
        ASYNCHRONOUS,
        ["sync_batchnorm must be off where", "got sync_batchnorm=True", ONLY_LOCKSTEP, "leave it"],
    ),
    "SyncBatchNorm on CPUs": (
        case_sync_batchnorm,
        ["allreduce"],
        ["sync_batchnorm must be off on CPUs", "got sync_batchnorm=True", "leave it out"],
    ),
    "a parameter of two optimizers": (
        case_two_owners,
        ["local_sgd"],
        ["must belong to one optimizer, got 'net.3.bias' in the optimizers 0 and 1", "give it to"],
    ),
    "LBFGS": (case_newton, ["allreduce", "local_sgd"], ["got LBFGS", "use SGD or Adam"]),
    "a sparse embedding": (
        case_sparse,
        ["allreduce", "no_sync"],
        ["gradients must be dense, got module 'words', Embedding with sparse=True", "sparse=False"],
    ),
    "a lazy module": (
        case_lazy,
        ["local_sgd"],
        ["parameters must have a shape, got the lazy parameter 'head.weight'; run a forward pass"],
    ),
    "a time as val_check_interval": (
        case_timed_validation,
        ["allreduce", "no_sync"],
        ["got val_check_interval as a time", ONLY_LOCKSTEP, "use a number of batches"],
    ),
    "LearningRateFinder": (
        case_learning_rate_finder,
        ["allreduce", "hpsgd"],
        ["got LearningRateFinder", ONLY_LOCKSTEP, "search with Trainer(devices=1)"],
    ),
    "ModelPruning": (
        case_pruning,
        ASYNCHRONOUS,
        [
            "must prune the same weights, got ModelPruning",
            ONLY_LOCKSTEP,
            'strategy="allreduce", or',
        ],
    ),
    "BatchSizeFinder": (
        case_batch_size_finder,
        ["allreduce", "hpsgd"],
        ["a batch size must be", "got BatchSizeFinder", ONLY_LOCKSTEP, "search with Trainer(devic"],
    ),
    "FSDP's precision": (
        case_fsdp_precision,
        ["local_sgd"],
        ["got FSDPPrecision", ONLY_LOCKSTEP, 'use precision="16-mixed" or "bf16-mixed"'],
    ),
    "CommunicationMonitor without our strategy": (
        case_monitor,
        ["ddp"],
        ["CommunicationMonitor needs a strategy of lightning_dsgd, got DDPStrategy; use"],
    ),
    "more stragglers than ranks": (
        case_too_many_stragglers,
        ["local_sgd"],
        ["got num_ranks=3 with 2 ranks; try num_ranks=2"],
    ),
    "slow kernels on a CPU": (
        case_kernels_on_the_cpu,
        ["local_sgd"],
        ["a kernel that spins needs a CUDA device, got cpu; delay the host instead (on="],
    ),
}


def all_refused(names: list[str], case: str) -> list[str]:
    """The error under each strategy: one world for all, as errors leave nothing behind."""
    errors = []
    for name in names:
        try:
            REFUSED[case][0](name)
        except ValueError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank_before_training(case: str) -> None:
    _, names, parts = REFUSED[case]
    for errors in FitWorld().run(2, all_refused, names, case):
        assert len(errors) == len(names)
        for name, error in zip(names, errors, strict=True):
            for part in parts:
                assert part.format(name=name) in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay_s": -0.1}, "delay_s must not be negative, got delay_s=-0.1; try delay_s=0.3"),
        (
            {"delay_s": float("nan")},
            "delay_s must not be negative, got delay_s=nan; try delay_s=0.3",
        ),
        (
            {"delay_s": 0.1, "num_ranks": -1},
            "num_ranks must not be negative, got num_ranks=-1; try 1",
        ),
        (
            {"delay_s": 0.1, "on": "gpu"},
            'on must be "host" or "device", got on=\'gpu\'; try on="host"',
        ),
    ],
)
def test_a_straggler_with_bad_numbers_is_refused_when_it_is_made(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        StragglerInjector(**options)


# ---- processes ----


def test_fewer_processes_than_devices_are_refused() -> None:
    """One process that someone else has started, with four devices for it."""
    (outcome,) = FitWorld().outcomes(1, case_fewer_processes, "local_sgd")
    assert "each device needs a process of its own, got 1 processes for devices=4 and" in (
        outcome.error
    )
    assert "start 4 processes, or set devices and num_nodes so that their product is 1" in (
        outcome.error
    )


def test_a_world_of_torchrun_smaller_than_the_devices_is_refused() -> None:
    """By Lightning itself."""
    (outcome,) = FitWorld().outcomes(1, fit_with_two_devices)
    assert outcome.error.startswith("ValueError: You set `devices=2`")
    assert "world size (1)" in outcome.error


def fit_with_two_devices() -> None:
    fit("local_sgd", devices=2)


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
    """Behind what Lightning says."""
    theirs = f"You selected an invalid strategy name: `strategy='{name.lower()}'`"
    with pytest.raises(ValueError, match=re.escape(theirs)) as caught:
        importlib.import_module(package).Trainer(strategy=name, accelerator="cpu", logger=False)
    assert f"Did you mean {NEAR_MISSES[name]}, of lightning_dsgd?" in str(caught.value)


@pytest.mark.parametrize("name", ["dpp", "ddp_sharded", "bagua", "horovod", "single", "fsdpp"])
def test_another_unknown_name_is_refused_by_lightning_itself(name: str) -> None:
    """In its own words: nearer to one of its names, or near to none of ours."""
    with pytest.raises(ValueError, match=f"invalid strategy name: `strategy='{name}'`") as caught:
        trainer(name, 2)
    assert str(caught.value).endswith("https://lightning.ai")


@pytest.mark.parametrize("name", [*STRATEGIES, "WAGMA", "ddp", "auto"])
def test_a_name_that_is_known_is_taken(name: str) -> None:
    trainer(name, 1)


def test_an_accelerator_that_is_not_there_is_refused_by_lightning_itself() -> None:
    with pytest.raises(MisconfigurationException, match="can not run on your system"):
        L.Trainer(strategy="local_sgd", accelerator="mps", devices=1)


def train_with_start_method(method: str) -> None:
    model = Regression()
    before = weights(model).clone()
    saver = ModelCheckpoint(save_top_k=0)
    strategy = LocalSGDStrategy(start_method=method, sync_period=3)
    runner = trainer(strategy, 2, callbacks=[saver], enable_checkpointing=True)
    runner.fit(model, loader(), loader(32))
    assert runner.state.finished
    assert float(runner.callback_metrics["val_loss"]) > 0
    assert not torch.equal(before, weights(model)), "the consensus has not come home"


@pytest.mark.exhaustive
def test_ranks_may_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy crosses over to them; the model comes back trained."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and so whatever training sets is taken back
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train_with_start_method("spawn")


def test_ranks_may_be_forked() -> None:
    """Also from a process that ends soon after: nothing fails at its exit."""
    process = worlds.preloaded.Process(target=train_forked)
    process.start()
    process.join(250)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0


def train_forked() -> None:
    """In a process of its own, so that what the ranks inherit is known."""
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    torch.set_num_threads(1)
    train_with_start_method("fork")
    atexit._run_exitfuncs()  # which processes of multiprocessing do not
    sys.exit(len(ignored))


# ---- ranks that differ ----


class Wide(NeverTrained):
    """Another shape on one rank."""

    def __init__(self) -> None:
        super().__init__()
        width = 17 if rank() == 1 else 16
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, width), nn.Linear(width, 1))


class Deep(NeverTrained):
    """One layer more on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(10, 10) for _ in range(2 + (rank() == 2))))


class Double(NeverTrained):
    """Another dtype on one rank."""

    def __init__(self) -> None:
        super().__init__()
        if rank() == 0:
            self.net[3].double()


class Counting(NeverTrained):
    """A buffer of another shape on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3 if rank() == 2 else 2))


class Freezing(NeverTrained):
    """One rank's optimizer leaves a parameter out."""

    def configure_optimizers(self) -> Any:
        trained = list(self.parameters())
        return torch.optim.SGD(trained[:-1] if rank() == 1 else trained, lr=0.1)


class AdamOnOne(NeverTrained):
    """One rank has another optimizer."""

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adam if rank() == 2 else torch.optim.SGD
        return kind(self.parameters(), lr=0.1)


class Shuffled(Regression):
    """Each rank's optimizer has the parameters in another order, as a set gives them."""

    def configure_optimizers(self) -> Any:
        order = list(self.parameters())
        return torch.optim.SGD(order[rank() :] + order[: rank()], lr=0.01)


def rank() -> int:
    return int(os.environ["RANK"])


MODELS: dict[str, tuple[type[L.LightningModule], list[str]]] = {
    "shape": (
        Wide,
        [
            "the model must be the same on all ranks",
            "parameter 'net.1.weight' of shape (16, 16) and torch.float32",
            "on ranks 0 and 2",
            "parameter 'net.1.weight' of shape (17, 16) and torch.float32",
            "on rank 1",
            "build it from the same arguments everywhere",
        ],
    ),
    "number": (
        Deep,
        [
            "the model must be the same on all ranks",
            "got 4 parameters and buffers on ranks 0 and 1",
            "6 parameters and buffers on rank 2",
            "build it from the same arguments everywhere",
        ],
    ),
    "dtype": (Double, ["'net.3.weight' of shape (1, 16) and torch.float64", "on rank 0"]),
    "buffer": (Counting, ["buffer 'seen' of shape (3,)", "on rank 2"]),
    "optimizer": (Freezing, ["'net.3.bias' of shape (1,)", "trained by no optimizer on rank 1"]),
    "kind": (AdamOnOne, ["trained by optimizer 0 (SGD) on ranks 0 and 1", "0 (Adam) on rank 2"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_differ_between_ranks_are_refused_on_all(case: str) -> None:
    model, parts = MODELS[case]
    outcomes = FitWorld().outcomes(3, fit_model, model)
    errors = {outcome.error for outcome in outcomes}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error.startswith("ValueError: ")
    for part in parts:
        assert part in error


def fit_model(model: type[L.LightningModule]) -> None:
    fit(make("local_sgd"), model())


@pytest.mark.parametrize("name", ["allreduce", "local_sgd"])
def test_an_optimizer_may_have_its_parameters_in_another_order_on_each_rank(name: str) -> None:
    """They meet their own, not those that happen to stand in the same place."""
    ordered, shuffled = (FitWorld().run(3, train, name, model) for model in (Ordered, Shuffled))
    assert shuffled == ordered


class Ordered(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(name: str, model: type[L.LightningModule]) -> list[float]:
    torch.manual_seed(rank())
    trained = model()
    fit(make(name), trained)
    return weights(trained).tolist()


DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "hyperparameters": (
        lambda rank: make("local_sgd", sync_period=8 if rank == 1 else 4),
        [
            'strategy="local_sgd" with sync_period=4',
            "on ranks 0 and 2",
            'strategy="local_sgd" with sync_period=8',
            "on rank 1",
        ],
    ),
    "algorithms": (
        lambda rank: make(ASYNCHRONOUS[rank]),
        [
            'strategy="no_sync" with ',
            "on rank 0",
            'strategy="local_sgd" with sync_period=8',
            "on rank 1",
            "strategy=\"dpsgd\" with topology='ring'",
            "on rank 2",
        ],
    ),
    "what is evaluated": (
        lambda rank: make("no_sync", evaluate="local" if rank == 2 else "consensus"),
        ["evaluate='consensus'", "on ranks 0 and 1", "evaluate='local'", "on rank 2"],
    ),
    "buffers": (
        lambda rank: make("no_sync", average_buffers=rank == 0),
        ["average_buffers=True", "on rank 0", "average_buffers=False", "on ranks 1 and 2"],
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_strategies_that_differ_between_ranks_are_refused_on_all(case: str) -> None:
    """Else some would wait for messages that never come, or take one kind for another."""
    outcomes = FitWorld().outcomes(3, fit_different, case)
    errors = {outcome.error for outcome in outcomes}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error.startswith("ValueError: the strategy must be the same on all ranks, got ")
    assert error.endswith("; give every rank the same arguments")
    for part in DIFFERENT[case][1]:
        assert part in error


def fit_different(case: str) -> None:
    fit(DIFFERENT[case][0](rank()))


def test_a_configuration_that_one_rank_alone_cannot_serve_ends_the_others() -> None:
    """They do not wait for it."""
    outcomes = FitWorld().outcomes(3, fit_with_finder_on_one)
    assert outcomes[1].error.startswith("ValueError: a learning rate must be searched")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("PeerLost: rank 1 failed: ValueError: a learning rate must")


def fit_with_finder_on_one() -> None:
    callbacks = [LearningRateFinder()] if rank() == 1 else []
    fit(make("local_sgd"), callbacks=callbacks)
