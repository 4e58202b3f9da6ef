"""Triton's kernels beside plain torch: a script compares them in a process of its own."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.mpi import ended

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


def run_oracle(script: str, device: str, **environment: str) -> None:
    command = [sys.executable, f"tests/support/scripts/{script}", device]
    done = ended(command, **environment)
    assert done.stdout == "equal\n", done.stderr
