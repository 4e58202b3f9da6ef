"""The kernel of `wide_triton` against plain torch, and when it is taken."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dsgd import devices, replica
from lightning_dsgd.replica import wide
from tests.support.mpi import ended

X, P = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)


def run_oracle(device: str, **environment: str) -> None:
    command = [sys.executable, "tests/support/scripts/wide_oracle.py", device]
    done = ended(command, **environment)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)
def test_the_kernel_equals_plain_torch_in_tritons_interpreter() -> None:
    run_oracle("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu("cuda")
def test_the_kernel_equals_plain_torch_on_a_gpu() -> None:
    run_oracle("cuda")


def test_the_kernel_is_taken_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def follow(x: Any, p: Any) -> None:
        tried.append(len(x))
        if len(tried) > 1:
            raise RuntimeError("Failed to find C compiler")

    assert wide.form_for(X, P) is wide.follow_plainly  # on a CPU
    made = SimpleNamespace(follow=follow)
    monkeypatch.setattr(devices, "runs_triton", lambda _: True)
    monkeypatch.setitem(sys.modules, "lightning_dsgd.replica.wide_triton", made)
    monkeypatch.setattr(replica, "wide_triton", made, raising=False)
    assert wide.form_for(X, P) is follow
    with pytest.warns(UserWarning, match="in torch.bfloat16 .* ten kernels .*: Failed to find C"):
        assert wide.form_for(X, P) is wide.follow_plainly
    assert tried == [1, 1]
