"""Which form of selection a device runs: with a clock that the forms themselves turn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.primitives import sparse
from lightning_dsgd.primitives.sparse import VARIABLE, FasterForm


class Clock:
    """Forms that take as long as is said, and the time."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.called: list[tuple[str, int, float]] = []
        self.forms = {name: self._form(name, each) for name, each in seconds.items()}

    def _form(self, name: str, seconds: float) -> Callable[..., tuple[Tensor, Tensor]]:
        def form(x: Tensor, least: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
            values, indices = sparse.select_plainly(x, least, g)
            first = not any(known[0] == name for known in self.called)
            self.called.append((name, len(x), len(values) / max(1, len(x))))
            self.now += 100.0 if first else seconds  # a kernel is compiled first
            return values, indices

        return form

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("torch_s", "triton_s", "taken"), [(3, 2, "triton"), (2, 3, "torch")])
def test_the_faster_form_is_measured_once_a_size(
    torch_s: float, triton_s: float, taken: str
) -> None:
    clock = Clock(torch=torch_s, triton=triton_s)
    choice, x = FasterForm(clock), torch.randn(1000)
    as_given = x.clone()
    assert choice.among(clock.forms, x) is clock.forms[taken]
    assert [name for name, *_ in clock.called] == ["torch"] * 4 + ["triton"] * 4
    assert {(n, share) for _, n, share in clock.called} == {(1000, 0.01)}
    assert x.equal(as_given)
    for same in (x, torch.zeros(600), x[:513]):
        assert choice.among(clock.forms, same) is clock.forms[taken]
    assert len(clock.called) == 8
    for other in (torch.zeros(2000), torch.zeros(1000).double(), torch.zeros(5), torch.zeros(0)):
        clock.called.clear()
        choice.prepare(clock.forms, other)
        assert choice.among(clock.forms, other) is clock.forms[taken]
        assert {n for _, n, _ in clock.called} == {len(other)}


def test_a_variable_sets_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, x = Clock(torch=1, triton=2), torch.zeros(10)
    for name in ("triton", "torch"):
        monkeypatch.setenv(VARIABLE, name)
        assert FasterForm(clock).among(clock.forms, x) is clock.forms[name]
    assert clock.called == []
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match=f"{VARIABLE}=triton needs Triton and a GPU.*on cpu"):
        FasterForm(clock).among({"torch": clock.forms["torch"]}, x)
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f'{VARIABLE} must be "triton" or "torch", got \'cuda\''):
        FasterForm(clock).among(clock.forms, x)


def test_kernels_that_cannot_run_are_left_out_with_a_warning() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    clock, choice = Clock(torch=1), FasterForm()
    forms = clock.forms | {"triton": fail}
    with pytest.warns(UserWarning, match="triton cannot run on cpu, RuntimeError: Failed to find"):
        assert choice.among(forms, torch.zeros(10)) is forms["torch"]
    assert choice.among(forms, torch.zeros(10)) is forms["torch"]  # is not tried again
    with pytest.raises(RuntimeError, match="C compiler"):
        FasterForm().among({"torch": fail, "triton": fail}, torch.zeros(10))


@pytest.mark.gpu("cuda")
def test_a_form_is_measured_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1_000_000, device="cuda")
    choice, forms = FasterForm(), sparse.forms(x)
    with caplog.at_level(logging.INFO, "lightning_dsgd"):
        choice.prepare(forms, x, is_told=True)
    assert choice.among(forms, x) in forms.values()
    assert len(caplog.messages) == (len(forms) > 1)
    assert not x.any()
