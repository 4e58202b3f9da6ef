"""The kernels of `sparse_triton` against plain torch, and when they are taken."""

from __future__ import annotations

import pytest

from tests.support.triton import needs_triton, run_oracle


@needs_triton
def test_the_kernels_equal_plain_torch_in_tritons_interpreter() -> None:
    run_oracle("triton_oracle.py", "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu("cuda")
def test_the_kernels_equal_plain_torch_on_a_gpu() -> None:
    run_oracle("triton_oracle.py", "cuda")
