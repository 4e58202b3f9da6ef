"""A checkpoint: a file that plain Lightning loads, and beside it what each rank needs to go on."""

from __future__ import annotations

import importlib.abc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import every_strategy
from tests.support.heard import Heard
from tests.support.models import Regression, loader, trainer
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome, ParentWorld, ProcessWorld

LATER = pytest.mark.exhaustive


def make(name: str) -> Any:
    """A save after a whole number of epochs, of 8 steps with two ranks, is between two averages."""
    return strategy_of(name, **({"sync_period": 5} if name == "local_sgd" else {}))


# ---- what runs on the ranks ----
class SavesUnderItsOwnName(L.Callback):
    """And loads, where torch must pickle nothing."""

    def __init__(self, folder: str) -> None:
        self.folder, self.loaded = Path(folder), ""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        original = torch.distributed.broadcast_object_list
        torch.distributed.broadcast_object_list = None
        path = self.folder / f"ü\udcff_{trainer.global_rank}.ckpt"  # not every name is text
        trainer.save_checkpoint(path)
        self.loaded = str(trainer.strategy.load_checkpoint(path)["global_step"])
        torch.distributed.broadcast_object_list = original


def fit_and_save_under_own_names(folder: str) -> str:
    callback = SavesUnderItsOwnName(folder)
    trainer("local_sgd", 2, max_steps=3, callbacks=[callback]).fit(Regression(), loader())
    return callback.loaded


class Noisy(Regression):
    """With dropout, a learning rate that changes, and a frozen parameter of no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1)
        )
        self.scale = nn.Parameter(torch.rand(64), requires_grad=False)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        trained = (p for p in self.parameters() if p.requires_grad)
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Watch(L.Callback):
    begin: dict[str, Any]
    end: dict[str, Any]
    own: dict[str, Any] | None = None
    """The rank's own weights and buffers after its last epoch, before all hold the consensus."""

    def __init__(self) -> None:
        self.evaluated: list[dict[str, Any]] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluated.append(plain(pl_module.state_dict()))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin = own_state(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.own = plain(pl_module.state_dict())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = own_state(trainer, pl_module)


def plain(value: Any) -> Any:
    """Tensors as lists: equal to the bit if they were, and fit for a pipe."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def own_state(trainer: Any, pl_module: Any) -> dict[str, Any]:
    session = getattr(trainer.strategy, "session", None)
    algorithms = session.training.replica if session is not None else None
    return plain(
        {
            "weights and buffers": pl_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "schedulers": [
                config.scheduler.state_dict() for config in trainer.lr_scheduler_configs
            ],
            "algorithms": algorithms.state_dict() if algorithms is not None else None,
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "random": torch.get_rng_state(),
        }
    )


def train(
    name: Any,
    epochs: int,
    folder: str,
    resume: str | None = None,
    *,
    save: dict[str, Any] | None = None,
    validate: bool = True,
    data: Any = None,
    callbacks: Any = (),
    model: Any = None,
    weights_only: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1 + rank)
    log, watch = Heard("lightning.pytorch", "pytorch_lightning"), Watch()
    strategy = make(name) if name in ALL_ALGORITHMS else name
    defaults = {"filename": "{epoch}", "save_top_k": -1, "save_on_train_epoch_end": True}
    saver = ModelCheckpoint(dirpath=folder, **{**defaults, **(save or {})})
    runner = trainer(
        strategy,
        world_size,
        max_epochs=epochs,
        callbacks=[watch, *(c() if isinstance(c, partial) else c for c in callbacks), saver],
        enable_checkpointing=True,
        use_distributed_sampler=data is None,
        num_sanity_val_steps=0,
        **options,
    )
    runner.fit(
        model or Noisy(),
        data() if data else loader(shuffle=True),
        loader(32) if validate else None,
        ckpt_path=resume,
        weights_only=weights_only,
    )
    return {
        "begin": watch.begin,
        "end": watch.end,
        "own": watch.own,
        "evaluated": watch.evaluated,
        "log": "\n".join(log.lines),
        "finished": plain(runner.lightning_module.state_dict()),
        "best": saver.best_model_path,
        "last": saver.last_model_path,
    }


def shared_file(path: str | Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def replica(path: str | Path, rank: int) -> dict[str, Any]:
    return torch.load(f"{path}.replicas/rank_{rank:05d}.pt", weights_only=True)


def run(world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return FitWorld().run(world_size, call, args, kwargs)


def outcomes(world_size: int, *args: Any, **kwargs: Any) -> list[Outcome]:
    return FitWorld().outcomes(world_size, call, args, kwargs)


def call(args: Any, kwargs: Any) -> Any:
    return train(*args, **kwargs)


def resume_each(
    world_size: int, name: str, epochs: int, folder: Path, *paths: Path
) -> list[list[dict[str, Any]]]:
    results = FitWorld().run(world_size, train_from_each, name, epochs, folder, paths)
    return [list(each) for each in zip(*results, strict=True)]


def train_from_each(
    name: str, epochs: int, folder: Path, paths: tuple[Path, ...]
) -> list[dict[str, Any]]:
    results = []
    for number, path in enumerate(paths):
        try:
            results.append(train(name, epochs, str(folder / f"resumed-{number}"), str(path)))
        except ValueError as error:
            results.append({"error": str(error)})
    return results


def mean(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the ranks; rank 0's of what are no floats."""
    return {
        key: torch.stack([state[key] for state in states]).mean(0) if x.is_floating_point() else x
        for key, x in states[0].items()
    }


# ---- the file that everyone can read ----
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "lightning_dsgd":
            raise ModuleNotFoundError(name)


def ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "lightning_dsgd"]


def use_without_this_package(path: str) -> dict[str, Any]:
    for name in ours():
        del sys.modules[name]
    sys.meta_path.insert(0, Blocker())
    content = torch.load(path, weights_only=True)
    loaded = plain(Regression.load_from_checkpoint(path, weights_only=True).state_dict())
    (validated,) = trainer("auto", 1).validate(
        Regression(), loader(32), ckpt_path=path, verbose=False
    )
    model = Regression()
    runner = trainer("auto", 1, max_epochs=2, limit_train_batches=2)
    runner.fit(model, loader(), ckpt_path=path)
    return {
        "loaded": loaded,
        "steps": [content["global_step"], runner.global_step],
        "moved": loaded != plain(model.state_dict()),
        "val_loss": validated["val_loss"],
        "momentum": runner.optimizers[0].state_dict()["state"] != {},
        "ours": ours(),
    }


def train_and_measure(folder: str) -> dict[str, Any]:
    result = train("local_sgd", 1, folder, model=Regression())
    model = Regression()
    model.load_state_dict(
        {key: torch.tensor(value) for key, value in result["evaluated"][-1].items()}
    )
    model.eval()
    with torch.no_grad():
        losses = [model.loss(batch) for batch in loader(32)]
    return {**result, "val_loss": float(sum(losses)) / len(losses)}


def test_plain_lightning_uses_the_file_where_this_package_is_absent(tmp_path: Path) -> None:
    results = FitWorld().run(2, train_and_measure, str(tmp_path))
    (seen,) = ParentWorld().run(1, use_without_this_package, str(tmp_path / "epoch=0.ckpt"))
    assert seen["ours"] == []
    assert seen["loaded"] == results[0]["evaluated"][-1]
    assert seen["steps"] == [8, 10]
    assert seen["moved"]
    assert seen["momentum"]
    assert seen["val_loss"] == pytest.approx(results[0]["val_loss"], rel=1e-5)


def test_all_save_and_load_under_rank_0s_name_and_pickle_no_path(tmp_path: Path) -> None:
    assert FitWorld().run(2, fit_and_save_under_own_names, str(tmp_path)) == ["3", "3"]
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["ü\udcff_0.ckpt"]


# ---- exact resume ----
Straight = Callable[[str], list[dict[str, Any]]]
"""What each rank comes to with a strategy."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Four epochs without a break, on two ranks, made when they are first asked for."""

    @cache
    def make(name: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"straight_{name}")
        return run(2, name, 4, str(folder), callbacks=[saver_while_shown(folder)])

    return make


def saver_while_shown(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder,
        filename="shown-{epoch}",
        save_top_k=-1,
        every_n_epochs=2,
        save_on_train_epoch_end=False,
    )


@every_strategy
def test_resumed_training_equals_uninterrupted_training_to_the_bit(
    name: str, straight: Straight, tmp_path: Path
) -> None:
    """Four epochs are two and two more, with dropout, shuffled data, momentum and BatchNorm.

    Saved after the second epoch, and in its validation, while the consensus is in the module.
    """
    whole = straight(name)
    first = run(2, name, 2, str(tmp_path), callbacks=[saver_while_shown(tmp_path)])
    paths = [tmp_path / "epoch=1.ckpt", tmp_path / "shown-epoch=1.ckpt"]
    for path, second in zip(paths, resume_each(2, name, 4, tmp_path, *paths), strict=True):
        for rank, result in enumerate(first):
            own = replica(path, rank)  # which reads it with weights_only=True
            assert plain(own["state_dict"]) == result["own"]
            states = {"torch", "cuda", "python", "numpy"}
            assert own["lightning_dsgd"]["random_states"].keys() == states
        for one, other in zip(whole, second, strict=True):
            assert one["end"]["steps"] == 32
            assert other["end"] == one["end"]
            assert other["evaluated"] == one["evaluated"][2:]
            assert other["finished"] == one["finished"]
        if name == "local_sgd":
            assert replica(path, 0)["lightning_dsgd"]["algorithms"] == [{"steps_since_sync": 1}]


class StatefulLoader:
    """Batches of this rank, in an order of its own each epoch; goes on where it was."""

    def __init__(self) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batches = list(loader())[rank::world_size]
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        draw = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self), generator=draw).tolist()[self.position :]:
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            yield self.batches[index]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def test_a_save_within_an_epoch_resumes_to_the_bit_with_a_stateful_loader(tmp_path: Path) -> None:
    """Of 8 steps an epoch, 11 are done at the save, which is written in the background."""
    options: dict[str, Any] = {"validate": False, "data": StatefulLoader}
    options["save"] = {"every_n_train_steps": 11, "filename": "{step}"}
    plugins = [AsyncCheckpointIO(TorchCheckpointIO())]
    straight = run(2, "local_sgd", 3, str(tmp_path), plugins=plugins, **options)
    path = tmp_path / "step=11.ckpt"
    assert names(Path(f"{path}.replicas")) == REPLICAS
    resumed = run(2, "local_sgd", 3, str(tmp_path / "resumed"), str(path), **options)
    for one, other in zip(straight, resumed, strict=True):
        assert other["begin"]["steps"] == 11
        assert one["end"]["steps"] == 24
        assert other["end"] == one["end"]


class UnevenLoader(StatefulLoader):
    """Of 8 batches of each rank rank 0 has 6."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ["RANK"] == "0":
            del self.batches[6:]


@LATER
@pytest.mark.parametrize("file", ["step=4.ckpt", "step=6.ckpt", "step=6-v1.ckpt"])
def test_ranks_with_different_numbers_of_batches_resume_within_an_epoch(
    file: str, tmp_path: Path
) -> None:
    """Before rank 0 has done its batches; as it has; and as the other has too."""
    options: dict[str, Any] = {"data": UnevenLoader, "val_check_interval": 2}
    options["save"] = {
        "filename": "{step}",
        "monitor": "val_loss",
        "save_on_train_epoch_end": False,
    }
    straight = run(2, "local_sgd", 3, str(tmp_path), **options)
    resumed = run(2, "local_sgd", 3, str(tmp_path / "resumed"), str(tmp_path / file), **options)
    for one, other in zip(straight, resumed, strict=True):
        assert other["end"] == one["end"]
        assert other["evaluated"] == one["evaluated"][-len(other["evaluated"]) :]


# ---- a save is complete or absent ----
VERBS: dict[str, tuple[Any, str]] = {
    "save": (TorchCheckpointIO, "save_checkpoint"),
    "replace": (os, "replace"),
    "fsync": (os, "fsync"),
}
FULL = OSError(28, "No space left on device")


class At:
    """A function that does something at its n-th call: before it, within it or after it."""

    def __init__(self, verb: str, nth: int, when: str, act: Callable[[], None]) -> None:
        owner, name = VERBS[verb]
        self.real = getattr(owner() if verb == "save" else owner, name)
        self.nth, self.when, self.act = nth, when, act

    def __call__(self, *args: Any) -> None:
        self.nth -= 1
        if self.nth == 0 and self.when == "before":
            self.act()
        self.real(*args)
        if self.nth == 0 and self.when == "half-way":
            os.truncate(args[1], 1000)
        if self.nth == 0:
            self.act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise FULL


def train_and_die(rank: int, verb: str, nth: int, when: str, folder: str) -> None:
    if int(os.environ["RANK"]) == rank:
        setattr(*VERBS[verb], At(verb, nth, when, die))
    train("local_sgd", 2, folder, save=OVER_AND_OVER)


REPLICAS = ["rank_00000.pt", "rank_00001.pt"]
OVER_AND_OVER = {"filename": "same", "save_top_k": 1, "enable_version_counter": False}

# Of its second save: rank 0 writes its replica (3) and the consensus file (4), and renames the
# consensus file (3) and its replica (4); rank 1 writes its replica (2) and renames it (2).
MOMENTS = {
    "while a replica is written": (1, "save", 2, "half-way", 8),
    "while the consensus file is written": (0, "save", 4, "half-way", 8),
    "once the consensus file counts": (0, "replace", 3, "after", 16),
}
MORE_MOMENTS = {
    "before a replica is written": (1, "save", 2, "before", 8),
    "after a replica is written": (1, "save", 2, "after", 8),
    "before the consensus file is written": (0, "save", 4, "before", 8),
    "before the consensus file counts": (0, "replace", 3, "before", 8),
    "before a replica has its name": (1, "replace", 2, "before", 16),
}


@pytest.mark.parametrize(
    "moments",
    [pytest.param(MOMENTS, id="three"), pytest.param(MORE_MOMENTS, id="all others", marks=LATER)],
)
def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_or_the_newer_whole(
    moments: dict[str, Any], straight: Straight, tmp_path: Path
) -> None:
    """Both in one place; whichever it is, training goes on from it to the bit."""
    paths = []
    for moment, (rank, *script, _) in moments.items():
        folder = tmp_path / moment
        died = FitWorld().outcomes(2, train_and_die, rank, *script, str(folder))
        assert died[rank].exitcode == -signal.SIGKILL, moment
        assert f"rank {rank}" in died[1 - rank].error, moment
        paths.append(folder / "same.ckpt")
        if rank == 1 and "replica is" in moment:
            assert names(folder) == ["same.ckpt", "same.ckpt.replicas"], moment
            assert names(folder / "same.ckpt.replicas") == REPLICAS, moment
    resumed = resume_each(2, "local_sgd", 4, tmp_path, *paths)
    for (moment, (*_, steps)), results in zip(moments.items(), resumed, strict=True):
        for one, other in zip(straight("local_sgd"), results, strict=True):
            assert other["begin"]["steps"] == steps, moment
            assert other["end"] == one["end"], moment


BREAKS = {
    "rank 1's replica": (1, "save", 1, "half-way"),
    "rank 0's replica": (0, "save", 1, "half-way"),
    "the consensus file": (0, "save", 2, "half-way"),
    "syncing rank 2's replica": (2, "fsync", 1, "before"),
    "syncing rank 2's folder": (2, "fsync", 2, "before"),
    "syncing the consensus file": (0, "fsync", 4, "before"),
    "renaming the consensus file": (0, "replace", 1, "before"),
}


def save_and_break(net: Any, folder: Path) -> dict[tuple[str, bool], tuple[str, bool]]:
    """What this rank raised, and whether the folder is as it was: over an older save, and alone."""
    seen = {}
    for older in (True, False):
        for what, (rank, verb, *where) in BREAKS.items():
            path = folder / f"{what}, {older}" / "x.ckpt"
            content = record.with_record({"state_dict": {"w": torch.ones(1000)}}, {})
            if older:
                files.save(TorchCheckpointIO(), net, path, content, content)
                net.barrier().wait()
            before = contents(path.parent)
            net.barrier().wait()
            with pytest.MonkeyPatch.context() as patch:
                if net.rank == rank:
                    patch.setattr(*VERBS[verb], At(verb, *where, fail))
                with pytest.raises((OSError, RuntimeError)) as caught:
                    files.save(TorchCheckpointIO(), net, path, content, content)
            net.barrier().wait()
            error = f"{type(caught.value).__name__}: {caught.value}"
            seen[what, older] = error, contents(path.parent) == before
    return seen


def contents(folder: Path) -> dict[str, Any]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_a_save_that_fails_on_one_rank_leaves_nothing_on_any(tmp_path: Path) -> None:
    """The older checkpoint of that name stays to the bit; every rank hears who could not write."""
    seen = ProcessWorld().run(3, save_and_break, tmp_path)
    for what, (failing, *_) in BREAKS.items():
        for older in (True, False):
            for rank, result in enumerate(seen):
                error, is_as_before = result[what, older]
                assert is_as_before, what
                if rank == failing:
                    assert error == f"OSError: {FULL}", what
                else:
                    assert error.startswith("RuntimeError: every rank must be able to write"), what
                    assert f"got OSError: {FULL} on rank {failing}; nothing is left" in error, what


def save_and_watch(net: Any, path: Path) -> list[str]:
    """Which files and folders a save syncs and renames, in order."""
    events = []
    root = path.parents[1]
    fsync, replace = os.fsync, os.replace

    def watched_fsync(opened: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{opened}').readlink().relative_to(root)}")
        fsync(opened)

    def watched_replace(old: Any, new: Any) -> None:
        events.append(f"replace {Path(old).relative_to(root)} {Path(new).relative_to(root)}")
        replace(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "replace", watched_replace)
        content = record.with_record({"state_dict": {}}, {})
        files.save(TorchCheckpointIO(), net, path, content, content)
    return events


def test_what_a_save_renames_is_on_the_disk_before(tmp_path: Path) -> None:
    """Files and their folders; and the new name of the consensus before those of the replicas."""
    ((*events,),) = ProcessWorld().run(1, save_and_watch, tmp_path / "new" / "x.ckpt")
    replica = "new/x.ckpt.replicas/rank_00000.pt"
    assert events == [
        f"fsync {replica}.new",
        "fsync new/x.ckpt.replicas",
        "fsync new",
        "fsync new/x.ckpt.new",
        "replace new/x.ckpt.new new/x.ckpt",
        "fsync new",
        f"replace {replica}.new {replica}",
    ]


def save_alone(net: Any, folder: Path) -> None:
    content = record.with_record({"state_dict": {"w": torch.ones(10)}}, {})
    files.save(files.TorchFiles(), net, folder / "x.ckpt", content, content)


def test_a_save_of_fewer_ranks_removes_the_others_replicas(tmp_path: Path) -> None:
    """Also what a lost rank has left of its replica, and nothing else."""
    folder = tmp_path / "x.ckpt.replicas"
    SimulatedWorld(4).run(save_alone, tmp_path)
    assert len(names(folder)) == 4
    (folder / "rank_00004.pt.new").touch()
    (folder / "rank_00006.pt").touch()  # of no save before: there is no rank 5
    (folder / "notes").touch()
    SimulatedWorld(2).run(save_alone, tmp_path)
    assert names(folder) == ["notes", *REPLICAS, "rank_00006.pt"]
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["lightning_dsgd"]["world_size"] == 2


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- with other ranks, or without replicas ----
@pytest.fixture(scope="module")
def saved_by_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with epoch=0.ckpt and epoch=1.ckpt of three ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    return folder, run(3, "local_sgd", 2, str(folder))


@pytest.fixture
def three(saved_by_three: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of epoch=1.ckpt with its replicas, in a folder with spaces."""
    folder = tmp_path / "with spaces and ü"
    shutil.copytree(saved_by_three[0], folder)
    return folder / "epoch=1.ckpt"


def test_the_file_holds_the_consensus_that_was_evaluated(
    saved_by_three: tuple[Path, list[dict[str, Any]]],
) -> None:
    """On three ranks, where a mean of three equal numbers need not be that number."""
    folder, results = saved_by_three
    for epoch in range(2):
        state = shared_file(folder / f"epoch={epoch}.ckpt")["state_dict"]
        assert state._metadata["net.1"] == {"version": 2}, (
            "BatchNorm's, as plain Lightning saves it"
        )
        saved = plain(state)
        assert [result["evaluated"][epoch] for result in results] == [saved] * 3


def assert_all_start_from_the_file(results: list[dict[str, Any]], path: Path, why: str) -> None:
    shared = plain(shared_file(path)["state_dict"])
    for result in results:
        assert result["begin"]["weights and buffers"] == shared
        assert result["end"]["steps"] > result["begin"]["steps"] == shared_file(path)["global_step"]
    sentence = f"All ranks start from the one model in {path}: {why}"
    assert sentence in results[0]["log"]
    assert all(sentence not in result["log"] for result in results[1:])


@cases("world_size", now=[4], later=[1])
def test_another_number_of_ranks_starts_from_the_consensus_and_says_so(
    world_size: int, three: Path, tmp_path: Path
) -> None:
    results = run(world_size, "local_sgd", 3, str(tmp_path / "resumed"), str(three))
    momentum = plain(replica(three, 0)["optimizer_states"][0])
    assert [result["begin"]["optimizer"] for result in results] == [momentum] * world_size
    assert plain(replica(three, 1)["optimizer_states"][0]) != momentum
    why = f"it was saved from 3 ranks and there are {world_size} now."
    assert_all_start_from_the_file(results, three, why)


def test_a_checkpoint_of_stock_ddp_starts_all_ranks_and_says_so(tmp_path: Path) -> None:
    run(2, "ddp", 1, str(tmp_path))
    path = tmp_path / "epoch=0.ckpt"
    results = run(2, "local_sgd", 2, str(tmp_path / "resumed"), str(path))
    assert_all_start_from_the_file(results, path, "it was saved by another strategy")
    momentum = plain(shared_file(path)["optimizer_states"][0])
    assert [result["begin"]["optimizer"] for result in results] == [momentum] * 2


# ---- what cannot be gone on with ----
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda file: os.truncate(file, 2000),
    "empty": lambda file: os.truncate(file, 0),
    "garbage": lambda file: file.write_bytes(b"no checkpoint" * 100),
    "no replica": lambda file: torch.save({"state_dict": {}}, file),
    "missing": lambda file: file.unlink(),
    "of another save": lambda file: shutil.copy(
        file.parents[1] / "epoch=0.ckpt.replicas" / file.name, file
    ),
    "swapped": lambda file: swap(file, file.with_name("rank_00002.pt")),
}
FAULTS = {
    "missing": "missing",
    "of another save": "from another save than the checkpoint",
    "swapped": "the replica of rank 2; {other}, the replica of rank 1; put the right",
}
"""What is said of them; of others, that they are damaged, and the reader's reason."""


def swap(one: Path, other: Path) -> None:
    """They are of the same save, and complete."""
    aside = one.rename(one.with_name("aside"))
    other.rename(one)
    aside.rename(other)


def test_a_damaged_or_missing_replica_is_named_on_every_rank(three: Path, tmp_path: Path) -> None:
    """Before training starts; the way out is in the text, and it is one."""
    paths = []
    for damage, do in DAMAGES.items():
        shutil.copytree(three.parent, tmp_path / damage)
        paths.append(tmp_path / damage / three.name)
        do(Path(f"{paths[-1]}.replicas/rank_00001.pt"))
    each = zip(DAMAGES, paths, resume_each(3, "local_sgd", 3, tmp_path, *paths), strict=True)
    for damage, path, results in each:
        for result in results:
            assert result["error"].startswith("every replica of a checkpoint must be complete and")
            other = f"{path}.replicas/rank_00002.pt"
            fault = FAULTS.get(damage, "damaged (").format(other=other)
            assert f"got {path}.replicas/rank_00001.pt, {fault}" in result["error"]
            assert "rank_00000" not in result["error"]
            assert f"remove {path}.replicas to start from the consensus" in result["error"]
        shutil.rmtree(f"{path}.replicas")
    (results,) = resume_each(3, "local_sgd", 3, tmp_path, paths[0])
    why = f"there is no replica in {paths[0]}.replicas."
    assert_all_start_from_the_file(results, paths[0], why)


def test_a_checkpoint_of_another_algorithm_is_refused(three: Path, tmp_path: Path) -> None:
    for outcome in outcomes(3, "dpsgd", 3, str(tmp_path / "resumed"), str(three)):
        assert outcome.error.startswith("ValueError: training must go on with the algorithm")
        assert f"got strategy='dpsgd' for {three}, saved from 'local_sgd'" in outcome.error
        assert "use strategy='local_sgd', or start a new training" in outcome.error


# ---- Lightning's ways to save ----
def test_the_best_are_kept_with_their_replicas_and_the_last_resumes_to_the_bit(
    straight: Straight, tmp_path: Path
) -> None:
    """Also through a link to a link."""
    folder = tmp_path / "first"
    save = {"monitor": "val_loss", "save_top_k": 2, "save_last": "link"}
    save |= {"save_on_train_epoch_end": False}
    results = run(2, "local_sgd", 3, str(folder), save=save)
    last = folder / "last.ckpt"
    assert last.is_symlink()
    kept = [path.name for path in folder.glob("*.ckpt") if not path.is_symlink()]
    assert len(kept) == 2
    replicas = [f"{name}.replicas" for name in kept]
    assert names(folder) == sorted([*kept, *replicas, last.name])
    assert all(names(folder / name) == REPLICAS for name in replicas)
    assert Path(results[0]["best"]).name in kept
    assert results[0]["best"] == results[1]["best"]
    link = tmp_path / "latest"
    link.symlink_to(last)
    second = run(2, "local_sgd", 4, str(tmp_path / "second"), str(link))
    for one, other in zip(straight("local_sgd"), second, strict=True):
        assert other["begin"]["steps"] == 24
        assert other["end"] == one["end"]


def test_save_weights_only_writes_the_consensus_alone(tmp_path: Path) -> None:
    results = run(2, "local_sgd", 1, str(tmp_path), save={"save_weights_only": True})
    assert names(tmp_path) == ["epoch=0.ckpt"]
    path = tmp_path / "epoch=0.ckpt"
    assert plain(shared_file(path)["state_dict"]) == results[0]["evaluated"][0]
    validated = FitWorld().run(2, validate, str(path))
    assert validated[0] == validated[1] == [results[0]["evaluated"][0]]


def validate(path: str) -> list[dict[str, Any]]:
    watch = Watch()
    trainer(make("local_sgd"), 2, callbacks=[watch]).validate(
        Noisy(), loader(32), ckpt_path=path, verbose=False
    )
    return watch.evaluated


class Opaque:
    """What torch.load does not read with weights_only=True."""


class WithOpaque(Noisy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opaque"] = Opaque()


@LATER
def test_weights_only_holds_for_the_replicas_too(tmp_path: Path) -> None:
    """A user who trusts the file gets back what is in it; one who does not is told by torch."""
    run(2, "local_sgd", 1, str(tmp_path), model=WithOpaque())
    arguments = (2, "local_sgd", 2, str(tmp_path / "resumed"), str(tmp_path / "epoch=0.ckpt"))
    for result in run(*arguments, model=WithOpaque(), weights_only=False):
        assert result["begin"]["steps"] == 8
        assert result["begin"]["algorithms"] == [{"steps_since_sync": 3}]
    for outcome in outcomes(*arguments, model=WithOpaque()):
        assert "weights_only" in outcome.error


# ---- other callbacks' weights ----
def test_a_moving_average_is_saved_as_the_mean_of_all_and_resumes(tmp_path: Path) -> None:
    """After an epoch, and in its validation, while the consensus is shown.

    Lightning's callback saves the average as the model, and the model under a name of its own.
    """

    def options(folder: Path) -> dict[str, Any]:
        return {"callbacks": [partial(EMAWeightAveraging, decay=0.9), saver_while_shown(folder)]}

    whole = run(2, "local_sgd", 3, str(tmp_path), **options(tmp_path))
    assert whole[0]["finished"] == whole[1]["finished"]
    for file in ("epoch=1.ckpt", "shown-epoch=1.ckpt"):
        path, folder = tmp_path / file, tmp_path / f"resumed from {file}"
        for key in ("state_dict", "current_model_state"):
            owns = [replica(path, rank)[key] for rank in range(2)]
            assert not torch.equal(owns[0]["net.0.weight"], owns[1]["net.0.weight"])
            torch.testing.assert_close(dict(shared_file(path)[key]), mean(owns))
        resumed = run(2, "local_sgd", 3, str(folder), str(path), **options(folder))
        for one, other in zip(whole, resumed, strict=True):
            assert other["end"] == one["end"]
            assert other["finished"] == one["finished"]
