"""What messages of rounded values hold, and how long they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.primitives import quantised, rounding
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import TransportError

UNITS = {"bfloat16": 2**-8, "int8": 2**-6, "int4": 2**-2, "e3m0": 0.5, "2bit": 1.0}
"""The largest error, in units of the largest value of a block."""
ROUNDED = pytest.mark.parametrize("wire_dtype", UNITS)
BITS = {"bfloat16": 16, "int8": 8.25, "int4": 4.25, "e3m0": 4.25, "2bit": 2.25}


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@ROUNDED
@pytest.mark.parametrize("n", [0, 1, 31, 32, 256, 1000])
def test_a_message_holds_the_values_rounded_and_the_rest_is_exact(wire_dtype: str, n: int) -> None:
    x = values(n) * torch.logspace(-40, 30, n)
    code = rounding.encode(x, wire_dtype)
    rounded = rounding.decode(code, like=x)
    if wire_dtype != "2bit":  # whose magnitudes are means
        assert torch.equal(rounded + (x - rounded), x)
    assert torch.equal(rounding.decode(code, like=x.double()).float(), rounded)
    size = rounding.BLOCKS.get(wire_dtype, 32)
    for block, error in zip(x.split(size), (x - rounded).abs().split(size), strict=True):
        assert (error <= UNITS[wire_dtype] * max(block.abs().tolist(), default=0.0) + 2**-126).all()
    assert code.nbytes == sum(rounding.planes(n, wire_dtype, x.dtype))
    if n % size == 0:
        assert code.nbytes * 8 == BITS[wire_dtype] * n


@pytest.mark.parametrize("wire_dtype", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(wire_dtype: str, bad: float) -> None:
    x = values(96)
    x[40] = bad
    found = rounding.decode(rounding.encode(x, wire_dtype), like=x)
    assert found[32:64].isnan().all()
    assert found[:32].isfinite().all()
    assert found[64:].isfinite().all()


def test_a_power_of_two_is_the_nearest_one() -> None:
    """Of 1, 1/2, ... 1/64 and 0, also at the two halves of the way, where either is as near."""
    levels = torch.tensor([0.0, *(0.5**k for k in range(7))])
    levels = torch.cat([levels, -levels])
    halves = (levels.sort().values[1:] + levels.sort().values[:-1]) / 2
    x = torch.cat([levels, halves, halves * 1.001, halves * 0.999, torch.linspace(-1.4, 1.4, 999)])
    for piece in x.split(31):
        block = torch.cat([torch.tensor([1.4]), piece])  # sets the exponent
        found = rounding.decode(rounding.encode(block, "e3m0"), like=block)
        nearest = (block[:, None] - levels).abs().amin(1)
        assert torch.equal((block - found).abs(), nearest)


def test_two_bits_hold_the_means_of_small_and_large_magnitudes() -> None:
    """Each block's error is orthogonal to what is sent: feeding it back cannot grow it."""
    x = torch.cat([torch.tensor([1.0, -3.0, 8.0, -10.0, 0.0, 2.0]).repeat(50)[:256], values(300)])
    rounded = rounding.decode(rounding.encode(x, "2bit"), like=x)
    small, large = float(rounded[0]), float(rounded[2])
    assert (small, large) == (pytest.approx(1.5, abs=0.02), pytest.approx(9, abs=0.02))
    assert rounded[:4].tolist() == [small, -small, large, -large]
    for a, q in zip(x.split(256), rounded.split(256), strict=True):
        assert float(q @ (a - q)) == pytest.approx(0.0, abs=1e-3)
        assert (a - q).norm() < a.norm()


def test_a_message_of_another_length_names_the_setting() -> None:
    x = values(64)
    with pytest.raises(TransportError, match="wire_dtype must be the same on all ranks"):
        rounding.decode(rounding.encode(x, "int8")[:-1], like=x)


# ---- rounded averages: what they send, that all get the same, that nothing is lost ----
def average(net: Any, n: int, wire_dtype: str, rounds: int) -> tuple[list[Tensor], Tensor, int]:
    kept = quantised.residual_of(net, torch.zeros(n).double(), wire_dtype)
    means = []
    for k in range(rounds):
        x = values(n, 10 * k + net.rank).double()
        quantised.average(net, x, kept, wire_dtype)
        means.append(x)
    return means, torch.zeros(n) if kept is None else kept, net.counters.bytes_sent


@ROUNDED
@pytest.mark.parametrize(("world_size", "n"), [(1, 50), (3, 1040), (4, 2)])
def test_averages_are_alike_and_with_what_is_kept_exact(
    wire_dtype: str, world_size: int, n: int
) -> None:
    ranks = SimulatedWorld(world_size).run(average, n, wire_dtype, 4)
    for k in range(4):
        assert all(torch.equal(means[k], ranks[0][0][k]) for means, _, _ in ranks)
    given = [values(n, 10 * k + rank) for k in range(4) for rank in range(world_size)]
    arrived = sum(ranks[0][0]) * world_size + sum(kept for _, kept, _ in ranks)
    torch.testing.assert_close(arrived, torch.stack(given).double().sum(0), rtol=0, atol=1e-13)


def sums_in_groups(net: Any, wire_dtype: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """All ranks, then pairs that change, then all again; near each other, and far from zero."""
    n = 256 * 4
    sums, y = quantised.GroupSums(wire_dtype), values(n).double() * 1000
    pairs = [sorted({net.rank, net.rank ^ distance}) for distance in (1, 2)]
    before, after, sent = [], [], []
    for k, group in enumerate([range(4), *pairs, range(4)]):
        y += values(n, 100 * k + net.rank).double()
        before.append(y.clone())
        begin = net.counters.bytes_sent
        sums.all_reduce(net, y, group)
        y /= len(group)
        sent.append(net.counters.bytes_sent - begin)
        after.append(y.clone())
    return before, after, sent


@ROUNDED
def test_sums_of_groups_conserve_the_mean_and_are_near_it(wire_dtype: str) -> None:
    befores, afters, sents = zip(*SimulatedWorld(4).run(sums_in_groups, wire_dtype), strict=True)
    for k in range(4):
        given, got = (torch.stack([each[k] for each in all_]) for all_ in (befores, afters))
        torch.testing.assert_close(got.mean(0), given.mean(0), rtol=0, atol=1e-10)
    ends = torch.stack([each[3] for each in afters])
    assert (ends - ends.mean(0)).abs().max() < 10 * UNITS[wire_dtype]  # and not 1000
    n, bits = len(ends[0]), BITS[wire_dtype]
    for sent in sents:
        assert [each * 8 for each in sent[1:]] == [n * bits, n * bits, 2 * 3 / 4 * n * bits]
        assert sent[0] * 8 == 2 * 3 / 4 * n * 64  # in full: there is no reference yet
