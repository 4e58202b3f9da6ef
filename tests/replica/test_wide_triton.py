"""The kernel of `wide_triton` against plain torch, and when it is taken."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd import devices, replica
from lightning_dsgd.replica import wide
from tests.support.triton import needs_triton, run_oracle

X, P = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)


@needs_triton
def test_the_kernel_equals_plain_torch_in_tritons_interpreter() -> None:
    run_oracle("wide_oracle.py", "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu("cuda")
def test_the_kernel_equals_plain_torch_on_a_gpu() -> None:
    run_oracle("wide_oracle.py", "cuda")


def no_compiler(x: Any, p: Any) -> None:
    raise RuntimeError("Failed to find C compiler")


def nothing(x: Any, p: Any) -> None:
    """A kernel that leaves x as it was."""


def test_the_kernel_is_taken_where_it_runs_and_makes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert wide.form_for(X, P) is wide.follow_plainly  # on a CPU
    made = SimpleNamespace(follow=lambda x, p: wide.follow_plainly(x, p))
    monkeypatch.setattr(devices, "runs_triton", lambda _: True)
    monkeypatch.setitem(sys.modules, "lightning_dsgd.replica.wide_triton", made)
    monkeypatch.setattr(replica, "wide_triton", made, raising=False)
    assert wide.form_for(X, P) is made.follow
    for made.follow, why in ((no_compiler, "Failed to find C"), (nothing, "its kernel gives")):
        with pytest.warns(UserWarning, match=f"in torch.bfloat16 .* ten kernels .*: {why}"):
            assert wide.form_for(X, P) is wide.follow_plainly
