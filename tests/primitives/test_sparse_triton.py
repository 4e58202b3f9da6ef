"""The kernels of `sparse_triton` against plain torch, and when they are taken."""

from __future__ import annotations

import importlib.util
import sys

import pytest

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


@pytest.mark.gpu("cuda")
def test_the_kernels_equal_plain_torch_on_a_gpu() -> None:
    run_oracle("cuda")
