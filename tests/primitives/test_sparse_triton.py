"""The kernels of `sparse_triton` against plain torch, and when they are taken."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from lightning_dsgd import devices
from lightning_dsgd.primitives import sparse
from tests.support.mpi import ended


def run_oracle(device: str, **environment: str) -> None:
    command = [sys.executable, "tests/support/scripts/triton_oracle.py", device]
    done = ended(command, **environment)
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
def test_gpus_have_kernels_where_triton_is(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are then measured and taken: tests/primitives/test_sparse_choice.py."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_triton or None)
    x = torch.zeros(3)
    assert devices.runs_triton(x.as_subclass(OnGPU)) == has_triton
    assert not devices.runs_triton(x)
    assert [*sparse.forms(x)] == ["torch"]
