"""What messages of rounded values hold, and how long they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dsgd.primitives import rounding
from lightning_dsgd.transport import TransportError

ROUNDED = pytest.mark.parametrize("wire_dtype", ["bfloat16", "int8", "int4"])
UNITS = {"bfloat16": 2**-8, "int8": 2**-6, "int4": 2**-2}
"""The largest error, in units of the largest value of a block."""
BITS = {"bfloat16": 16, "int8": 8.25, "int4": 4.25}


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@ROUNDED
@pytest.mark.parametrize("n", [0, 1, 31, 32, 1000])
def test_a_message_holds_the_values_rounded_and_the_rest_is_exact(wire_dtype: str, n: int) -> None:
    x = values(n) * torch.logspace(-40, 30, n)
    code = rounding.encode(x, wire_dtype)
    rounded = rounding.decode(code, like=x)
    assert torch.equal(rounded + (x - rounded), x)
    assert torch.equal(rounding.decode(code, like=x.double()).float(), rounded)
    for block, error in zip(x.split(32), (x - rounded).abs().split(32), strict=True):
        assert (error <= UNITS[wire_dtype] * max(block.abs().tolist(), default=0.0) + 2**-126).all()
    assert code.nbytes == sum(rounding.planes(n, wire_dtype, x.dtype))
    if n % 32 == 0:
        assert code.nbytes * 8 == BITS[wire_dtype] * n


@ROUNDED
def test_what_is_rounded_once_stays_as_it_is(wire_dtype: str) -> None:
    once = rounding.decode(rounding.encode(values(100), wire_dtype), like=values(100))
    assert torch.equal(rounding.decode(rounding.encode(once, wire_dtype), like=once), once)


@pytest.mark.parametrize("wire_dtype", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(wire_dtype: str, bad: float) -> None:
    x = values(96)
    x[40] = bad
    found = rounding.decode(rounding.encode(x, wire_dtype), like=x)
    assert found[32:64].isnan().all()
    assert found[:32].isfinite().all()
    assert found[64:].isfinite().all()


def test_a_message_of_another_length_names_the_setting() -> None:
    x = values(64)
    with pytest.raises(TransportError, match="wire_dtype must be the same on all ranks"):
        rounding.decode(rounding.encode(x, "int8")[:-1], like=x)
