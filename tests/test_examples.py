"""The examples: each runs with two ranks, learns, and leaves one model."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import weights
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(set(ROOT.joinpath("examples").glob("*.py")) - {ROOT / "examples" / "demo.py"})
exhaustive = pytest.mark.exhaustive

# The metric that an example ends with, what it must be below, and how it is run for that.
LEARNS = {
    "gan": ("off_the_circle", 0.12, []),
    "byol": ("loss", 0.5, ["--epochs", "2"]),
    "simclr": ("loss", 2.0, ["--epochs", "2"]),
    "ema": ("val_loss", 0.2, []),
    "lora": ("loss", 0.1, []),
    "dqn": ("wrong_ways", 2.5, []),  # 6 before training
}
FAST = ("byol",)
IN_ALL = [
    pytest.param(path, marks=() if path.stem in FAST else exhaustive, id=path.stem)
    for path in EXAMPLES
]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def run_example(path: Path, args: list[str]) -> tuple[dict[str, float], Tensor, Tensor]:
    """What a rank has at the end: metrics, weights, buffers."""
    sys.argv = [str(path), *args]
    names = runpy.run_path(str(path), run_name="__main__")
    metrics = {key: float(value) for key, value in names["trainer"].callback_metrics.items()}
    model = names["model"]
    kept = [buffer.double().reshape(-1) for buffer in model.buffers()]
    return metrics, weights(model), torch.cat([torch.zeros(0), *kept])


def run(path: Path, args: list[str]) -> list[Any]:
    if path.stem == "lora" and find_spec("peft") is None:
        pytest.skip("peft is not installed: make test-peft installs it apart")
    return FitWorld().run(2, run_example, path, args)


@pytest.mark.parametrize("path", IN_ALL)
def test_an_example_learns_and_leaves_one_model_on_all_ranks(path: Path) -> None:
    metric, bound, args = LEARNS[path.stem]
    (metrics, x, buffers), (_, their_x, their_buffers) = run(path, args)
    assert metrics[metric] < bound
    assert torch.equal(x, their_x)
    assert torch.equal(buffers, their_buffers)


@exhaustive
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_the_other_strategy_that_it_names(path: Path) -> None:
    found = re.search(rf"python examples/{path.stem}.py \[--strategy (\w+)\]", docstring(path))
    assert found is not None
    ranks = run(path, ["--strategy", found[1], "--epochs", "1"])
    if path.stem == "simclr":  # negatives come from all ranks where these step together
        apart = run(path, ["--strategy", "wagma", "--epochs", "1"])
        assert [metrics["candidates"] for metrics, *_ in (*ranks, *apart)] == [128, 128, 64, 64]


def test_the_page_has_every_example() -> None:
    assert {path.stem for path in EXAMPLES} == set(LEARNS)
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in EXAMPLES:
        assert f"](../examples/{path.name})" in page
