"""Training in a notebook and at Python's prompt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from nbclient import NotebookClient

from lightning_dsgd.trainer.named import strategy_of
from tests.support.mpi import environment
from tests.support.worlds import ParentWorld

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/notebook.ipynb"
LIMIT_S = 250
FORKED = "An interactive session: the ranks are forked from this process."
FAILING = """
class Failing(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx >= 3:
            raise ValueError("no such luck")
        return super().training_step(batch, batch_idx)


try:
    new_trainer().fit(Failing(), data)
except torch.multiprocessing.ProcessRaisedException as error:
    print("raised:", str(error).strip().splitlines()[-1])
"""
REFUSED = """
for cause in (
    lambda: trainer.fit(model, data),
    lambda: L.Trainer(
        strategy=lightning_dsgd.DecentralizedStrategy("wagma", start_method="popen"), devices=2
    ),
):
    try:
        cause()
    except (ValueError, NotImplementedError) as error:
        print("refused:", error)
"""
LEFT = "import multiprocessing; print('left:', multiprocessing.active_children())"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(
        HOME=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path), IPYTHONDIR=str(tmp_path)
    ).items():
        monkeypatch.setenv(name, value)


def texts(notebook: Any) -> list[str]:
    return [
        "".join(output.get("text", "") for output in cell.get("outputs", []))
        for cell in notebook.cells
    ]


@pytest.mark.exhaustive
def test_the_example_runs_in_a_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, 4)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in (FAILING, REFUSED, LEFT)]
    client = NotebookClient(
        notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = texts(notebook)
    everything = "".join(printed)
    print(everything)
    assert everything.count(FORKED) == 1
    untrained, trained, more = (
        float(everything.split(f"{what}: ")[1].split()[0])
        for what in ("untrained", "\ntrained", "trained on")
    )
    assert more < trained < untrained / 10
    (validated,) = (
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "execute_result"
    )
    assert float(validated.split(":")[1].strip(" }]")) == pytest.approx(trained, rel=1e-5)
    assert "raised: ValueError: no such luck" in printed[-3]
    again, popened = printed[-2].strip().split("refused: ")[1:]
    assert "creating a new Trainer" in again
    assert "must be forked, got start_method='popen'; leave it out" in popened
    assert printed[-1] == "left: []\n"


# What is chosen, and what is refused
AT_A_PROMPT: list[tuple[Any, dict[str, Any], str]] = [
    (LightningEnvironment(), {}, "fork"),
    (LightningEnvironment(), {"start_method": "fork"}, "fork"),
    (
        LightningEnvironment(),
        {"start_method": "spawn"},
        "must be forked, got start_method='spawn'; leave it out",
    ),
    (
        SLURMEnvironment(),
        {},
        "must start its ranks itself, got the environment of SLURMEnvironment",
    ),
]


def strategies_at_a_prompt() -> list[str]:
    """How each starts its ranks, or why it refuses to."""
    sys.ps1, found = ">>> ", []
    os.environ.update(SLURM_NTASKS="2", SLURM_JOB_NAME="jupyter", SLURM_PROCID="0")
    for kind, options, _ in AT_A_PROMPT:
        strategy = strategy_of("dpsgd", **options)
        strategy.cluster_environment = kind
        strategy.parallel_devices = [torch.device("cpu")] * 2
        try:
            strategy._configure_launcher()
            found.append(strategy._start_method)
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_are_forked_at_a_prompt_or_refused() -> None:
    (found,) = ParentWorld().run(1, strategies_at_a_prompt)
    for said, (*_, expected) in zip(found, AT_A_PROMPT, strict=True):
        assert expected in said
