"""The private names of Lightning's that are used exist, in both of Lightning's packages."""

from __future__ import annotations

import ast
import importlib
import inspect
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchmetrics import MeanMetric

from lightning_dsgd.elastic import taken_over
from lightning_dsgd.trainer import joint, names, seams

PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
pytestmark = pytest.mark.parametrize("package", PACKAGES)


def observer(package: str) -> Any:
    home = f"{PACKAGES[package]}.strategies.launchers.subprocess_script"
    return importlib.import_module(home)._ChildProcessObserver(main_pid=0, child_processes=[])


def trainer_of(package: str) -> Any:
    pl: Any = importlib.import_module(package)
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=1, val_check_interval="00:01:00:00", **options)


def owners(package: str) -> list[Any]:
    """All objects that may have one of the names, made as a user makes them."""
    pl: Any = importlib.import_module(package)
    launchers = f"{package}.strategies.launchers"
    trainer = trainer_of(package)
    return [
        trainer,
        trainer.precision_plugin,
        trainer._signal_connector,
        trainer._checkpoint_connector,
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        pl.callbacks.Timer(duration=timedelta(hours=1)),
        pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(hours=1)),
        pl.callbacks.ModelCheckpoint(every_n_train_steps=3),
        pl.LightningModule(),
        pl.loggers.CSVLogger("."),
        pl.loggers.WandbLogger(offline=True),
        importlib.import_module(f"{launchers}.multiprocessing")._MultiProcessingLauncher,
        importlib.import_module(f"{launchers}.subprocess_script")._SubprocessScriptLauncher(
            None, 1, 1
        ),
        observer(package),
        joint.JointEpochs(SimpleNamespace(training=None), trainer_of(package), list),  # type: ignore[arg-type]
        MeanMetric(),
    ]


def names_in(module: Any) -> set[str]:
    """Attributes that begin with "_", and what is looked for by getattr and hasattr."""
    tree = ast.parse(Path(module.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and isinstance(node.args[1], ast.Constant)
    }
    listed = {f"_{option}" for option in ("every_n_train_steps", "train_time_interval")}
    return {n for n in used if n.startswith("_") and not n.startswith("__")} | listed | {"procs"}


def test_every_name_exists(package: str) -> None:
    found = owners(package)
    names = names_in(seams) | names_in(joint) | names_in(taken_over)
    missing = {name for name in names if not any(hasattr(o, name) for o in found)}
    assert missing == set()


def test_the_observer_has_its_name(package: str) -> None:
    assert observer(package).name == "child-process-observer"


def test_the_names_of_the_trainers_refusal_exist(package: str) -> None:
    module = importlib.import_module(f"{package}.trainer.connectors.accelerator_connector")
    assert hasattr(module._AcceleratorConnector, "_check_config_and_set_final_flags")
    for name in ("_strategy_flag", "_registered_strategies"):
        assert name in inspect.getsource(module)
    typehints = importlib.import_module("jsonargparse._typehints")
    assert callable(typehints.resolve_class_path_by_name)
    assert inspect.isfunction(names.hint)


def test_what_is_taken_is_given_back(package: str) -> None:
    pl: Any = importlib.import_module(package)
    trainer = trainer_of(package)
    loop, kind = trainer.fit_loop.epoch_loop, type(trainer.fit_loop)
    taken = (trainer._signal_connector, loop, loop.val_loop, trainer.validate_loop)
    before = [dict(vars(owner)) for owner in taken]

    def handler(signum: int, frame: Any) -> None: ...

    seams.take_signals(trainer, handler, handler)
    seams.ask_nobody_for_sigterm(trainer)
    joint.take_validation_data(trainer, list.clear)
    joint.JointEpochs(SimpleNamespace(training=None), trainer, list)  # type: ignore[arg-type]
    assert type(trainer.fit_loop) is not kind
    assert trainer._signal_connector._sigterm_notifier_fn is handler
    seams.give_back(trainer)
    joint.give_back(trainer)
    assert type(trainer.fit_loop) is kind
    assert before == [dict(vars(owner)) for owner in taken]

    assert seams.validates_by_time(trainer)
    timer = pl.callbacks.Timer(duration=timedelta(seconds=5))
    assert seams.is_timer(timer)
    seams.take_timer(timer, lambda timer, trainer: None)
    seams.give_back_callback(timer)
    assert "_check_time_remaining" not in vars(timer)
    assert seams.current_hook(nn.Module()) is None


@pytest.mark.parametrize(("id_", "name"), [(None, "abc_view_1"), ("abc", None)])
def test_wandb_goes_on_in_its_run_or_in_one_that_names_it(package, id_, name, monkeypatch):
    pl: Any = importlib.import_module(package)
    monkeypatch.setattr(taken_over.rank_zero_only, "rank", 1, raising=False)
    logger = pl.loggers.WandbLogger(offline=True, id=id_)
    trainer = SimpleNamespace(loggers=[logger], progress_bar_callback=None)
    taken_over.take_over_logs(trainer, ["abc"], "view_1")
    assert logger._wandb_init["id"] == id_
    assert logger._wandb_init["name"] == name
    assert logger._wandb_init.get("group") == (None if id_ else "abc")
