"""MLflow and TensorBoard with real servers on this machine: `make test-trackers`.

W&B has no server that can be installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from wandb.wandb_agent import Agent

from lightning_dsgd import CheckpointArtifacts, CommunicationMonitor, StepTrace
from lightning_dsgd.lab.trackers import takes_pages
from tests.support.fits import Plain, run, strategy
from tests.support.models import loader, trainer, weights
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
LIMIT_S = 250


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return json.loads(text) if text[:1] in "[{" else text


def answers(url: str) -> bool:
    try:
        get(url)
    except OSError:
        return False
    return True


@contextmanager
def server(url: str, health: str, *command: str) -> Iterator[str]:
    """A server, until the tests are done with it."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LIMIT_S
        while not answers(f"{url}/{health}"):
            assert time.monotonic() < end, f"{command} does not answer within {LIMIT_S} s"
            with suppress(subprocess.TimeoutExpired):  # which is a pause, too
                raise AssertionError(f"{command} has ended with {process.wait(0.5)}")
        yield url
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def fit_epochs(
    folder: Path, kind: str, where: str, epochs: int, checkpoint: Path | None = None
) -> tuple[torch.Tensor, str]:
    """The weights in the end, and the run's name."""
    logger: Any = (
        MLFlowLogger("tests", tracking_uri=where)
        if kind == "mlflow"
        else TensorBoardLogger(where, name="", version="")
    )
    callbacks = [CommunicationMonitor(per_rank=True), StepTrace(folder / "trace")]
    callbacks += [CheckpointArtifacts()] if takes_pages(logger) else []
    callbacks.append(ModelCheckpoint(folder / "saved"))
    options = {"max_epochs": epochs, "enable_checkpointing": True, "log_every_n_steps": 2}
    fitted = trainer(strategy("local_sgd"), 2, logger=logger, callbacks=callbacks, **options)
    model = Plain()
    fitted.fit(model, loader(), ckpt_path=checkpoint)
    return weights(model), str(logger.version) if fitted.is_global_zero else ""


def test_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    port = free_port()
    stored = ["--backend-store-uri", f"sqlite:///{tmp_path}/runs.db"]
    stored += ["--artifacts-destination", str(tmp_path / "artifacts")]
    command = ["mlflow", "server", *stored, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    with server(f"http://127.0.0.1:{port}", "health", *command) as url:
        whole = run(2, fit_epochs, tmp_path / "whole", "mlflow", url, 2)
        (_, name), _ = run(2, fit_epochs, tmp_path / "part", "mlflow", url, 1)
        client = MlflowClient(url)
        found = client.get_run(name).data
        assert found.params["strategy/name"] == "local_sgd"
        assert {"dsgd/max/wait_s", "dsgd/rank_00001/wait_s"} <= found.metrics.keys()
        assert [each.path for each in client.list_artifacts(name)] == [
            *("checkpoints", "timeline.html")
        ]
        there = Path(client.download_artifacts(name, "checkpoints", str(tmp_path)))
        (checkpoint,) = there.rglob("*.ckpt")
        resumed = run(2, fit_epochs, tmp_path / "rest", "mlflow", url, 2, checkpoint)
    for (straight, _), (again, _) in zip(whole, resumed, strict=True):
        assert torch.equal(straight, again)


def test_tensorboard(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run(2, fit_epochs, tmp_path, "tensorboard", str(logs), 1)
    port = free_port()
    command = ["tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    with server(f"http://127.0.0.1:{port}", "data/environment", *command) as url:
        while not (tags := get(f"{url}/data/plugin/scalars/tags")):
            pass  # it has not read the files yet
        layout = get(f"{url}/data/plugin/custom_scalars/layout")
        texts = get(f"{url}/data/plugin/text/tags")
    ((_, scalars),) = tags.items()
    charts = [chart for each in layout["category"] for chart in each["chart"]]
    assert layout["category"][0]["title"] == "dsgd"
    patterns = [tag for chart in charts for tag in chart["multiline"]["tag"]]
    for pattern in ("dsgd/wait_share", "dsgd/max/wait_s", r"dsgd/rank_\d+/wait_s"):
        assert pattern in patterns
        assert any(re.fullmatch(pattern, name) for name in scalars)
    assert "dsgd/strategy/text_summary" in next(iter(texts.values()))


@pytest.mark.parametrize(
    "sweep", sorted(ROOT.glob("recipes/sweeps/*.yaml")), ids=lambda path: path.stem
)
def test_a_wandb_agent_starts_runs(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's own agent makes the command and starts it, but offline and told by no server."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    console_script = tmp_path / "bin" / "lightning-dsgd"  # which this environment may lack
    console_script.parent.mkdir()
    console_script.write_text(f'#!/bin/sh\nexec {sys.executable} -m lightning_dsgd "$@"\n')
    console_script.chmod(0o755)
    path = f"{console_script.parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = {"MODE": "offline", "SWEEP_ID": "s1", "DIR": str(tmp_path), "RUN_ID": "r1"}
    told["SWEEP_PARAM_PATH"] = ""  # which the agent sets, and nobody else takes back
    for name, value in (variables | {f"WANDB_{name}": text for name, text in told.items()}).items():
        monkeypatch.setenv(name, value)
    config = yaml.safe_load(sweep.read_text())
    chosen = {
        name: rule.get("values", [rule.get("min")])[-1]
        for name, rule in config["parameters"].items()
    }
    quick = {"trainer.devices": 2, "trainer.max_epochs": 1, "trainer.limit_train_batches": 4}
    quick["trainer.strategy.algorithm.group_size"] = 2
    args = {name: {"value": value} for name, value in (chosen | quick).items()}
    agent = Agent(None, None, sweep_id="s1")
    agent._sweep_command = config["command"]
    agent._command_run({"run_id": "r1", "args": args, "program": config["program"]})
    assert agent._run_processes["r1"].wait(timeout=250) == 0
    (file,) = tmp_path.glob("wandb/offline-run-*/run-r1.wandb")
    record = file.read_bytes()
    for text in ("s1", config["metric"]["name"], '"sync_period":100', "recipe.yaml"):
        assert text.encode() in record, text
