"""Selection, thresholds and the wire format, against what a few lines of plain torch give."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.primitives import rounding, sparse, sparse_format

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def randn(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def threshold(value: float) -> Tensor:
    return torch.tensor(value)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda x: x.double(),
    "few": lambda x: x[:7],
    "periodic": lambda x: x.index_fill(0, torch.arange(0, len(x), 61), 1e-6),
    "zeros": lambda x: x.where(torch.arange(len(x)) < 500, torch.zeros(())),
    "equal": lambda x: torch.full_like(x, -2.0),
    "one": lambda x: torch.zeros_like(x).index_fill(0, torch.tensor(len(x) - 1), 3.0),
    "sorted": lambda x: x.sort().values,
    "heavy": lambda x: x.pow(9),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kth_magnitude_is_exact_also_where_a_sample_misleads(shape: str) -> None:
    x = SHAPES[shape](randn(150_000))
    for k in (1, 7, 1500, 30_000):
        plain = x.abs().sort(descending=True).values[min(k, len(x)) - 1] * (k <= len(x))
        assert sparse.kth_magnitude(x, k) == plain


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 300_001])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_select_gives_all_from_the_threshold_on(n: int, density: float, dtype: torch.dtype) -> None:
    x = randn(n, 1, dtype)
    least = torch.quantile(x[:1000].abs(), 1 - density) if n else torch.zeros((), dtype=dtype)
    values, indices = sparse.select(x, least)
    (expected,) = (x.abs() >= least).nonzero(as_tuple=True)
    assert torch.equal(indices, expected)
    assert torch.equal(values, x[expected])
    plain_values, plain_indices = sparse.select_plainly(x, least)
    assert torch.equal(plain_indices, expected)
    assert torch.equal(plain_values, values)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("n", [9, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulating_and_selecting_is_both_in_one_also_by_threads(
    n: int, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "_THREADS_WORTH", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        residual, g = randn(n), randn(n, 1).to(dtype)
        total = residual + g
        values, indices = sparse.select(residual, threshold(2.0), g)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(residual, total)
    assert not g.any()
    assert torch.equal(indices, (total.abs() >= 2).nonzero().squeeze(1))
    assert torch.equal(values, total[indices])


@DTYPES
def test_a_threshold_separates_neighbouring_numbers(dtype: torch.dtype) -> None:
    at = torch.tensor([0.1, 1.0, 3e-38, 2.5758293], dtype=dtype)
    for least in at:
        x = torch.stack([torch.nextafter(least, 0 * least), least, -least]).repeat(11)
        assert sparse.select(x, least)[1].tolist() == [i for i in range(33) if i % 3]


@pytest.mark.parametrize("times", [1, 40])  # for what goes by vectors, and for what is left
def test_zeros_are_never_selected_and_nan_and_inf_always_are(times: int) -> None:
    x = [0.0, -0.0, 1.0, torch.nan, torch.inf, -torch.inf, 1e-42, -3.0]
    for least, expected in ((0.0, [2, 3, 4, 5, 7]), (2.0, [3, 4, 5, 7]), (torch.inf, [3, 4, 5])):
        _, indices = sparse.select(torch.tensor(x * times), threshold(least))
        assert indices.tolist() == [8 * i + place for i in range(times) for place in expected]


def test_the_largest_are_exactly_k_and_the_first_of_equal_ones() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 3.0, -2.0, 0.5])
    assert sparse.largest(x, 2).nonzero().squeeze(1).tolist() == [1, 3]
    assert sparse.largest(x, 3).nonzero().squeeze(1).tolist() == [1, 2, 3]
    assert sparse.largest(x, 6).all()
    assert sparse.largest(torch.ones(10), 4).nonzero().squeeze(1).tolist() == [0, 1, 2, 3]


def test_a_threshold_is_moved_gently_towards_its_count() -> None:
    assert 1.0 < sparse.corrected(threshold(1.0), 125, 100) < 1.03
    assert 0.95 < sparse.corrected(threshold(1.0), 67, 100) < 1.0


# ---- the wire ----
def pack(values: Tensor, indices: Tensor, cuts: list[int], wire: str) -> tuple[list[int], Tensor]:
    """The bytes of each part, and all of them, which have come back as they were."""
    parts, is_finite = sparse_format.measure(values, indices, torch.tensor(cuts), 1 << 62)
    assert is_finite
    message, rounded_off = sparse_format.pack(values, indices, parts, wire)
    theirs = sparse_format.lots_of(sparse_format.heads_of(parts))
    assert theirs == parts
    sizes = [part.num_bytes(wire, values.dtype) for part in theirs]
    back, places = sparse_format.unpack(torch.split(message, sizes), theirs, values, wire)
    assert torch.equal(places, indices)
    near = 1e-6 if wire == "2bit" else 0
    torch.testing.assert_close(
        back + rounded_off if len(rounded_off) else back, values, rtol=0, atol=near
    )
    expected = [rounding.encode(values[a:b], wire) for a, b in pairwise(cuts)]
    expected = [
        rounding.decode(x, values[a:b]) for x, (a, b) in zip(expected, pairwise(cuts), strict=True)
    ]
    assert torch.equal(back, torch.cat(expected))
    return sizes, message


def roundtrip(values: Tensor, indices: Tensor, wire: str = "float32") -> Tensor:
    """One message; parts that are packed together are each as long as alone."""
    cuts = [0, 0, len(indices) // 7, len(indices) // 2, len(indices)]
    sizes, _ = pack(values, indices, cuts, wire)
    for size, (a, b) in zip(sizes, pairwise(cuts), strict=True):
        assert [size] == pack(values[a:b], indices[a:b], [0, b - a], wire)[0]
    return pack(values, indices, [0, len(indices)], wire)[1]


INDICES = {
    "none": [],
    "one": [5],
    "first": [0],
    "neighbours": [0, 1, 2, 3],
    "just below an escape": [0, 254, 508],
    "an escape": [0, 255, 510, 511],
    "two escapes": [7, 7 + 2 * 255, 7 + 2 * 255 + 254],
    "around 16 bits": [0, 65534, 65534 + 65535, 65534 + 3 * 65535, 10**6],
    "around 31 bits": [0, 2**31 - 1, 2**32, 2**32 + 1],
    "beyond 32 bits": [2**33, 2**33 + 2**32 - 1, 2**33 + 2**34, 2**40],
    "far from zero": [2**40, 2**40 + 1, 2**40 + 300],
    "every third": [*range(0, 3000, 3)],
    "most, far from zero": [i for i in range(2**40, 2**40 + 3000) if i % 7],
}


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int4", "2bit"])
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_messages_come_back_as_they_were(indices: list[int], wire: str) -> None:
    for dtype in (torch.float32, torch.float64):
        roundtrip(randn(len(indices)).to(dtype), torch.tensor(indices, dtype=torch.int64), wire)


def test_an_entry_takes_as_many_bytes_as_is_said_at_1_percent() -> None:
    n = 2_000_000
    chance = torch.rand(n, generator=torch.Generator().manual_seed(0))
    (indices,) = (chance < 0.01).nonzero(as_tuple=True)
    # 1 byte, and 1 more for every 255 that lie between: geometric with mean 1 / (e^2.55 - 1).
    index = 1 + 1 / (math.exp(2.55) - 1)
    for wire, value in {"float32": 4, "bfloat16": 2, "int8": 33 / 32, "int4": 17 / 32}.items():
        mean = len(roundtrip(randn(len(indices)), indices, wire)) / len(indices)
        assert mean == pytest.approx(value + index, rel=0.002)
    count = len(indices)
    at_two_ends = torch.cat([torch.arange(count // 2), torch.arange(n - count // 2, n)])
    for others in (torch.arange(count) + n // 2, at_two_ends):
        assert len(roundtrip(randn(len(others)), others)) <= 5.4 * len(others)


def test_marks_of_what_is_dense_are_the_same_on_a_device() -> None:
    indices = (torch.rand(1003, generator=torch.Generator().manual_seed(0)) < 0.3).nonzero()[:, 0]
    message = roundtrip(randn(len(indices)), indices)
    with mock.patch.object(sparse_format.devices, "is_on_host", return_value=False):
        assert torch.equal(roundtrip(randn(len(indices)), indices), message)
