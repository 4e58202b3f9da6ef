"""The kernels of `sparse_triton` against plain torch, and when they are taken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd.primitives import sparse
from lightning_dsgd.primitives.sparse_choice import VARIABLE

ROOT = Path(__file__).parents[2]


def run_oracle(device: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "tests/support/scripts/triton_oracle.py", device],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)
def test_the_kernels_equal_plain_torch_in_tritons_interpreter() -> None:
    run_oracle("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_equal_plain_torch_on_a_gpu() -> None:
    run_oracle("cuda")


class OnGPU(torch.Tensor):
    """Says of itself that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor, OnGPU])
def test_tensors_on_a_gpu_take_the_kernels_where_triton_is_there(
    has_triton: bool, kind: type[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def by_kernel(x: Any, least: Any, g: Any) -> Any:
        taken.append("kernel")
        return sparse.select_plainly(x, least, g)

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (has_triton or None) if name == "triton" else find_spec(name),
    )
    stub = SimpleNamespace(select=by_kernel)
    monkeypatch.setitem(sys.modules, "lightning_dsgd.primitives.sparse_triton", stub)  # type: ignore[misc]
    monkeypatch.setattr("lightning_dsgd.primitives.sparse_triton", stub, raising=False)
    monkeypatch.setenv(VARIABLE, "triton" if has_triton else "torch")
    x, g = torch.tensor([1.0, -3.0, 0.0]), torch.tensor([0.0, 0.0, 2.0])
    r = x.clone().as_subclass(kind)
    values, indices = sparse.accumulate_and_select(r, g, torch.tensor(2.0))
    assert (values.tolist(), indices.tolist()) == ([-3.0, 2.0], [1, 2])
    assert r.tolist() == [1.0, -3.0, 2.0]
    assert not g.any()
    assert taken == ["kernel"] * (kind is OnGPU and has_triton)
