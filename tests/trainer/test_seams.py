"""The private names of Lightning's that are used exist, in both of Lightning's packages."""

from __future__ import annotations

import ast
import importlib
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchmetrics import MeanMetric

from lightning_dsgd.elastic import handover
from lightning_dsgd.trainer import claimed, joint, seams

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
        trainer._logger_connector,
        trainer.fit_loop.epoch_loop._results,
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
        importlib.import_module(f"{package}.trainer.call"),
        importlib.import_module(f"{package}.trainer.connectors.data_connector"),
        importlib.import_module(f"{package}.utilities.combined_loader").CombinedLoader([]),
        joint.JointEpochs(SimpleNamespace(training=None), trainer_of(package), list),  # type: ignore[arg-type]
        MeanMetric(),
    ]


def names_in(module: Any) -> set[str]:
    """Attributes of others that begin with "_", and what getattr and hasattr look for."""
    tree = ast.parse(Path(module.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used -= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used -= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
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
    names = set().union(*map(names_in, (seams, joint, claimed, handover)))
    missing = {name for name in names if not any(hasattr(o, name) for o in found)}
    assert missing == set()
    assert observer(package).name == "child-process-observer"


@pytest.mark.parametrize(("id_", "name"), [(None, "abc_view_1"), ("abc", None)])
def test_wandb_goes_on_in_its_run_or_in_one_that_names_it(package, id_, name, monkeypatch):
    pl: Any = importlib.import_module(package)
    monkeypatch.setattr(handover.rank_zero_only, "rank", 1, raising=False)
    logger = pl.loggers.WandbLogger(offline=True, id=id_)
    trainer = SimpleNamespace(loggers=[logger], progress_bar_callback=None)
    handover.take_over_logs(trainer, ["abc"], "view_1")
    assert logger._wandb_init["id"] == id_
    assert logger._wandb_init["name"] == name
    assert logger._wandb_init.get("group") == (None if id_ else "abc")


def test_a_trainer_of_a_class_of_its_own_has_the_parts_of_its_package(package: str) -> None:
    """As scvi-tools has one."""
    trainer = trainer_of(package)
    trainer.__class__ = type("Mine", (type(trainer),), {"__module__": "mine.train"})
    found = seams.interruption(trainer, signal.SIGTERM), seams._call(trainer)
    exceptions = importlib.import_module(f"{package}.utilities.exceptions")
    assert found == (
        exceptions.SIGTERMException,
        importlib.import_module(f"{package}.trainer.call"),
    )
