"""Ok-Topk and the sparse all-reduces beside it: oracles, what is conserved, what is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.simulated import RankFailed, SimulatedWorld
from lightning_dsgd.transport import PeerLost
from tests.support.rank import Rank
from tests.support.thorough import cases

LATER = pytest.mark.exhaustive
SIZES = cases("world_size", now=[3], later=[1, 8])
Make = Callable[..., ErrorFeedback]
OFTEN = partial(OkTopk, threshold_period=4, repartition_period=8)
ALL: dict[str, Make] = {
    "oktopk": OFTEN,
    "oktopk_balanced": partial(OFTEN, balance_ratio=1.0),
    "oktopk_bfloat16": partial(OFTEN, wire_dtype="bfloat16"),
    "oktopk_int8": partial(OFTEN, wire_dtype="int8", rule="paper"),
    "oktopk_paper": partial(OFTEN, rule="paper"),
    "oktopk_int4_balanced": partial(OFTEN, wire_dtype="int4", balance_ratio=1.0),
    "topk_allgather": TopkAllgather,
    "topk_dsa": TopkDSA,
    "gtopk": GTopk,
    "gaussian_topk": GaussianTopk,
}
NOT_NOW = [f"oktopk_{how}" for how in ("balanced", "bfloat16", "int8", "paper")]
EVERY = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=LATER if name in NOT_NOW else (), id=name)
        for name, make in ALL.items()
    ],
)


def rounds(make: Make) -> bool:
    return isinstance(make, partial) and "wire_dtype" in make.keywords


Gradient = Callable[[int, int, int, int], Tensor]
"""Of rank, step, n and P."""


def normal(rank: int, step: int, n: int, world_size: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + rank))


def coarse(rank: int, step: int, n: int, world_size: int) -> Tensor:
    """Whose sums are exact in fp32, in any order, with many that are equal."""
    return (normal(rank, step, n, world_size) * 64).round() / 64


def in_one_region(rank: int, step: int, n: int, world_size: int) -> Tensor:
    """All large entries among the first fiftieth."""
    g = 1e-3 * normal(rank, step, n, world_size)
    g[: n // 50] *= 1e6
    return g


def on_one_rank(rank: int, step: int, n: int, world_size: int) -> Tensor:
    """Each rank's large entries are spread evenly, but the largest of all are in one region.

    No two ranks have an entry in common there, so the region of one rank holds the whole top-k.
    """
    k, region = n // 100, n // world_size
    generator = torch.Generator().manual_seed(step)
    g = 1e-3 * normal(rank, step, n, world_size)
    first = torch.randperm(region, generator=generator)[:k][rank::world_size]
    g[first] = 100 + torch.rand(len(first), generator=generator)
    rest = region + torch.randperm(n - region, generator=generator)[: k * world_size]
    rest = rest[rank::world_size][: k - len(first)]
    g[rest] = 10 + torch.rand(len(rest), generator=generator)
    return g


GRADIENTS = {"normal": normal, "in one region": in_one_region, "on one rank": on_one_rank}


def drive(net: Any, make: Make, gradient: Gradient, n: int, num_steps: int) -> dict[str, Any]:
    """What a rank accumulated, was given and has left, and what it sent in each step."""
    algorithm = make()
    algorithm.start(net, torch.zeros(n))
    accumulated, applied = torch.zeros(2, n, dtype=torch.float64)
    trace: dict[str, Any] = {"given": [], "bytes": [], "left": [], "selected": [], "balanced": []}
    if isinstance(algorithm, OkTopk):
        algorithm.balance = noted(algorithm.balance, trace["balanced"])  # type: ignore[method-assign]
    for step in range(num_steps):
        g = gradient(net.rank, step, n, net.world_size)
        accumulated += g
        before = net.counters.bytes_sent
        algorithm.before_update(torch.empty(0), g)
        trace["bytes"].append(net.counters.bytes_sent - before)
        applied += net.world_size * g.double()
        trace["given"].append(g)
        trace["left"].append(algorithm.residual.clone())
        trace["selected"].append(algorithm.num_applied)
    return {"accumulated": accumulated, "applied": applied, **trace}


def noted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, whose arguments are appended to a list at each call."""
    return lambda *args: calls.append(args) or function(*args)


def simulate(world_size: int, *args: Any) -> list[dict[str, Any]]:
    return SimulatedWorld(world_size).run(drive, *args)


# ---- the dense computation ----
def topk(x: Tensor, k: int) -> Tensor:
    """The k largest, the first of equal ones, in place; zeros elsewhere."""
    first = x.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(x).index_copy_(0, first, x[first])


def exchange_densely(residuals: list[Tensor], k: int, rule: str) -> Tensor:
    """What is applied, and taken out of the residuals, at the places of Topk(sum_i Topk(acc_i))."""
    local = [topk(acc, k) for acc in residuals]
    chosen = topk(torch.stack(local).sum(0), k) != 0
    given = [chosen & ((mine != 0) | (rule == "shared")) for mine in local]
    u = torch.stack([x.where(mask, 0) for x, mask in zip(residuals, given, strict=True)]).sum(0)
    for residual, mask in zip(residuals, given, strict=True):
        residual[mask] = 0
    return u


def dense(
    world_size: int, n: int, k: int, num_steps: int, rule: str
) -> list[tuple[Tensor, list[Tensor]]]:
    """u / P and the residuals after each step."""
    residuals = [torch.zeros(n) for _ in range(world_size)]
    history = []
    for step in range(num_steps):
        for rank, residual in enumerate(residuals):
            residual += coarse(rank, step, n, world_size)
        u = exchange_densely(residuals, k, rule)
        history.append((u / world_size, [residual.clone() for residual in residuals]))
    return history


RULES = pytest.mark.parametrize("rule", ["shared", "paper"])


@SIZES
@RULES
@pytest.mark.parametrize("k", [1, 13, 300, 1000])
def test_with_exact_thresholds_a_step_is_the_dense_one(world_size: int, k: int, rule: str) -> None:
    make = partial(OkTopk, density=k / 1000, threshold_period=1, repartition_period=2, rule=rule)
    ranks = simulate(world_size, make, coarse, 1000, 6)
    for step, (u, residuals) in enumerate(dense(world_size, 1000, k, 6, rule)):
        for rank, residual in zip(ranks, residuals, strict=True):
            assert torch.equal(rank["given"][step], u)
            assert torch.equal(rank["left"][step], residual)


def thresholds(net: Any, *, paper: bool) -> list[tuple[float, float]]:
    algorithm, found = OkTopk(density=0.05, threshold_period=4, paper=paper), []
    algorithm.start(net, torch.zeros(1000))
    for step in range(8):
        algorithm.before_update(torch.empty(0), normal(net.rank, step, 1000, net.world_size))
        found.append((float(algorithm.local_threshold), float(algorithm.global_threshold)))
    return found


@pytest.mark.parametrize("paper", [True, False])
def test_as_printed_thresholds_stay_for_their_period(paper: bool) -> None:
    for found in SimulatedWorld(2).run(partial(thresholds, paper=paper)):
        assert found[0] != found[4]
        assert (found == [found[0]] * 4 + [found[4]] * 4) == paper


@SIZES
def test_reused_thresholds_serve_while_their_counts_allow(world_size: int) -> None:
    make = partial(OkTopk, density=0.05, threshold_period=7)
    ranks = simulate(world_size, make, normal, 4000, 30)
    for rank in ranks:
        assert all(map(torch.equal, rank["given"], ranks[0]["given"]))
        assert all(133 <= count <= 250 for count in rank["selected"])
        assert rank["selected"][::7] == [200] * 5


@pytest.mark.parametrize("world_size", [3, 5])
def test_spreading_entries_evenly_changes_only_where_they_travel(world_size: int) -> None:
    plain, always, never = (
        simulate(world_size, partial(OkTopk, balance_ratio=ratio), on_one_rank, 2000, 5)
        for ratio in (4.0, 1.0, 1e9)
    )
    for a, b, c in zip(plain, always, never, strict=True):
        assert all(map(torch.equal, a["given"], b["given"]))
        assert all(map(torch.equal, a["given"], c["given"]))
        assert bool(a["balanced"]) == (world_size > 4)
        assert c["balanced"] == []


@EVERY
@SIZES
@cases("density", now=[0.001, 0.3], later=[1.0])
def test_what_was_accumulated_is_what_was_applied_and_what_is_left(
    make: Make, world_size: int, density: float
) -> None:
    ranks = simulate(world_size, partial(make, density=density), normal, 1000, 11)
    accumulated = torch.stack([rank["accumulated"] for rank in ranks]).sum(0)
    left = torch.stack([rank["left"][-1].double() for rank in ranks]).sum(0)
    scale = torch.stack([rank["accumulated"].abs() for rank in ranks]).sum(0).max()
    for rank in ranks:
        assert all(map(torch.equal, rank["given"], ranks[0]["given"]))
        assert float((accumulated - rank["applied"] - left).abs().max() / scale) < 1e-6


def drive_unevenly(
    net: Any, make: Make, counts: list[int]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What this rank has computed and was given in each of its steps, and what it has left."""
    algorithm, made, given = make(), [], []
    rank = Rank(net, algorithm, torch.zeros(1000))
    for step in range(counts[net.rank]):
        g = normal(net.rank, step, 1000, net.world_size)
        made.append(g.clone())
        rank.descend(g)
        given.append(g)
    rank.settle()
    return made, given, algorithm.residual


@EVERY
def test_the_last_rank_makes_steps_of_the_usual_size(make: Make) -> None:
    """And a gradient counts as one of those that were made with it, whenever it is applied."""
    counts = [32, *[30] * 7]
    made, given, left = zip(
        *SimulatedWorld(8).run(drive_unevenly, partial(make, density=0.01), counts), strict=True
    )
    norms = torch.stack(given[0]).norm(dim=1)
    assert norms[30] < 2 * norms[20:30].mean()
    means = [torch.stack([g[step] for g in made if step < len(g)]).mean(0) for step in range(32)]
    rest = torch.stack(means).sum(0) - torch.stack(given[0]).sum(0) - torch.stack(left).mean(0)
    assert rest.abs().max() < 1e-4


@EVERY
@pytest.mark.parametrize("n", [1, 5])
def test_there_may_be_fewer_entries_than_ranks(make: Make, n: int) -> None:
    ranks = simulate(4, partial(make, density=0.01), normal, n, 9)
    assert any(g.any() for g in ranks[0]["given"])


def equal_ones(rank: int, step: int, n: int, world_size: int) -> Tensor:
    return torch.full((n,), -2.0)


@EVERY
@SIZES
def test_equal_entries_take_turns(make: Make, world_size: int) -> None:
    ranks = simulate(world_size, partial(make, density=0.1), equal_ones, 100, 10)
    given = torch.stack(ranks[0]["given"])
    limit = 100 if make is GaussianTopk else 12
    assert all(0 < int((g != 0).sum()) <= limit for g in given)
    # -2 for each of 10 steps, but for what the residual still has
    left = torch.stack([rank["left"][-1] for rank in ranks]).mean(0)
    torch.testing.assert_close(given.sum(0) + left, torch.full((100,), -20.0))


def zeros_between(rank: int, step: int, n: int, world_size: int) -> Tensor:
    return normal(rank, step, n, world_size) if step in (3, 9) else torch.zeros(n)


@EVERY
@SIZES
def test_zero_gradients_send_what_is_left(make: Make, world_size: int) -> None:
    ranks = simulate(world_size, partial(make, density=0.5), zeros_between, 200, 20)
    given = ranks[0]["given"]
    assert not any(g.any() for g in given[:3])
    assert given[3].any()
    for rank in ranks:
        if not rounds(make):
            assert not given[-1].any()
            assert not rank["left"][-1].any()


def test_the_warm_up_reduces_the_whole_gradient() -> None:
    for rank in simulate(3, partial(OkTopk, warmup_steps=2), coarse, 500, 4):
        for step in range(2):
            mean = torch.stack([coarse(r, step, 500, 3) for r in range(3)]).sum(0) / 3
            assert torch.equal(rank["given"][step], mean)
            assert not rank["left"][step].any()
        assert rank["selected"] == [500, 500, 5, 5]


# ---- what may go wrong ----
def diverging(rank: int, step: int, n: int, world_size: int, bad: float = torch.nan) -> Tensor:
    g = normal(rank, step, n, world_size)
    if (rank, step) == (2, 5):
        g[7] = bad
    return g


@EVERY
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_found_before_a_send(make: Make, bad: float) -> None:
    gradient = partial(diverging, bad=bad)
    with pytest.raises(RankFailed, match="NaN or inf on rank 2 at step 6"):
        simulate(4, make, gradient, 1000, 9)
    outcomes = SimulatedWorld(4).outcomes(drive, make, gradient, 1000, 9)
    assert [o.rank for o in outcomes if isinstance(o, PeerLost)] == [2, 2, 2]


def drive_overflowing(net: Any, make: Make) -> list[bool]:
    algorithm = make()
    algorithm.start(net, torch.zeros(1000), Conditions(skips_overflow=True))
    skipped = []
    for step in range(9):
        g = diverging(net.rank, step, 1000, net.world_size)
        algorithm.before_update(torch.empty(0), g)
        skipped.append(not bool(g.isfinite().all()))
        assert algorithm.residual.isfinite().all()
    return skipped


@EVERY
def test_an_overflow_is_left_to_be_skipped_by_all(make: Make) -> None:
    expected = [step == 5 for step in range(9)]
    assert SimulatedWorld(4).run(drive_overflowing, make) == [expected] * 4


# ---- what goes over the wire ----
NUM = 100_000
WORDS = 4
"""Bytes of a value, and of an index."""


def bound(world_size: int, k: int) -> float:
    """6k (P-1)/P words."""
    return 6 * k * (world_size - 1) / world_size * WORDS


@RULES
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@cases("world_size", now=[3], later=[2, 8, 16])
def test_no_step_sends_more_than_6k_words(world_size: int, gradient: Gradient, rule: str) -> None:
    make = partial(OkTopk, threshold_period=4, rule=rule)
    for rank in simulate(world_size, make, gradient, NUM, 6):
        assert max(rank["bytes"]) <= bound(world_size, NUM // 100)


def entry_bytes(count: int, density: float = 0.01) -> float:
    """Of a message with so many entries of 4 bytes, spread evenly."""
    escapes = 1 / (torch.tensor(255 * density).exp().item() - 1)
    return 24 + count * (4 + 1 + escapes)


def log2(world_size: int) -> int:
    return (world_size - 1).bit_length()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_baselines_send_what_table_1_says(world_size: int) -> None:
    """In entries, of 5.09 bytes instead of two words."""
    k, p = NUM // 100, world_size
    flags = 64 * p
    sent = {
        make: [r["bytes"][0] for r in simulate(p, make, normal, NUM, 1)]
        for make in (TopkAllgather, TopkDSA, GTopk)
    }
    for count in sent[TopkAllgather]:
        assert count == pytest.approx((p - 1) * entry_bytes(k), rel=0.01, abs=flags)
        assert count <= 2 * k * (p - 1) * WORDS
    # Up the tree each rank but the root sends once, and down it each but the root is sent to.
    assert sum(sent[GTopk]) == pytest.approx(2 * (p - 1) * entry_bytes(k), rel=0.01, abs=p * flags)
    assert sent[GTopk][0] == pytest.approx(log2(p) * entry_bytes(k), rel=0.01, abs=flags)
    assert 2 * sent[GTopk][0] <= 4 * k * log2(p) * WORDS + flags  # what it receives is as much
    union = 1 - 0.99**p
    for count in sent[TopkDSA]:
        expected = (p - 1) / p * (entry_bytes(k) + NUM * (4 * union + min(union, 1 / 8)))
        assert count == pytest.approx(expected, rel=0.03, abs=60 * p)
        assert count <= (2 * k + NUM) * (p - 1) / p * WORDS


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_gaussian_threshold_lets_through_more_than_3k_4(world_size: int) -> None:
    def heavy(rank: int, step: int, n: int, world_size: int) -> Tensor:
        return normal(rank, step, n, world_size).pow(5)

    k = NUM // 100
    for rank in simulate(world_size, GaussianTopk, normal, NUM, 1):
        count = rank["bytes"][0] / (world_size - 1) / (entry_bytes(k) / k)
        assert count == pytest.approx(k, rel=0.05)  # which a normal distribution has exactly
    for rank in simulate(world_size, GaussianTopk, heavy, NUM, 1):
        assert rank["bytes"][0] > 0.75 * 4.9 * k * (world_size - 1)


ENTRIES = {"paper": (10.18, 6.18, 4.24, 3.24), "shared": (14.18, 8.18, 5.27, 3.77)}
"""The bytes that an exchange takes for each entry of k (P-1)/P."""


@RULES
def test_rounded_values_take_fewer_bytes(rule: str) -> None:
    k = 4 * NUM // 100
    for wire, each in zip(("float32", "bfloat16", "int8", "int4"), ENTRIES[rule], strict=True):
        make = partial(OkTopk, wire_dtype=wire, rule=rule)
        ranks = simulate(4, make, normal, 4 * NUM, 2)
        mean = sum(rank["bytes"][1] for rank in ranks) / len(ranks) / (k * 3 / 4)
        assert 0.75 * each <= mean <= 1.25 * 1.1 * each  # by a count near k; blocks are filled up


# ---- local steps ----
def change_of(rank: int, step: int, n: int, world_size: int) -> Tensor:
    """Changes of the weights: sums of a few are exact in fp32."""
    return coarse(rank, step, n, world_size) / 4


def drive_locally(net: Any, make: Make, counts: list[int], num_epochs: int = 1) -> dict[str, Any]:
    """Moves the weights by known changes, and settles after as many steps as this rank has."""
    algorithm, x = make(), torch.full((1000,), 3.0)
    rank, changed = Rank(net, algorithm, x), torch.zeros(1000, dtype=torch.float64)
    bytes_sent, owns, means = [], [], []
    for _ in range(num_epochs):
        for _ in range(counts[net.rank]):
            change = change_of(net.rank, len(bytes_sent), 1000, net.world_size)
            changed += change
            before = net.counters.bytes_sent
            rank.step(-change)
            bytes_sent.append(net.counters.bytes_sent - before)
        owns.append(rank.settle())
        means.append(algorithm.consensus(x))
    found = {"changed": changed, "bytes": bytes_sent, "own": owns, "mean": means}
    found["left"] = algorithm.residual.clone()
    return {**found, "x": rank.finish(), "round": algorithm.round}


@EVERY
@pytest.mark.parametrize("counts", [[7], [8, 3, 6], [0, 5, 5, 11]], ids=str)
def test_no_local_change_is_lost(make: Make, counts: list[int]) -> None:
    """The mean = the start - all changes + what the residuals have, which the end applies too."""
    local = partial(make, density=0.05, local_steps=4)
    ranks = SimulatedWorld(len(counts)).run(drive_locally, local, counts, 2)
    changed = torch.stack([rank["changed"] for rank in ranks]).mean(0)
    left = torch.stack([rank["left"].double() for rank in ranks]).mean(0)
    for rank in ranks:
        torch.testing.assert_close(rank["mean"][-1].double(), 3 - changed + left, rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["x"].double(), 3 - changed, rtol=0, atol=1e-5)
        assert torch.equal(rank["x"], ranks[0]["x"])
        assert rank["round"] == ranks[0]["round"] > 0


@EVERY
def test_nothing_is_sent_nor_changed_between_exchanges(make: Make) -> None:
    local = partial(make, density=0.05, local_steps=4)
    often = SimulatedWorld(3).run(drive_locally, local, [3] * 3, 6)
    once = SimulatedWorld(3).run(drive_locally, local, [18] * 3, 1)
    for one, other in zip(often, once, strict=True):
        assert torch.equal(one["own"][-1], other["own"][-1])
        assert torch.equal(one["x"], other["x"])
        assert [num > 0 for num in other["bytes"]] == [step % 4 == 3 for step in range(18)]


@RULES
def test_local_steps_with_exact_thresholds_equal_the_dense_computation(rule: str) -> None:
    """SparseLoCo on Topk(sum_i Topk(e_i)), to the bit."""
    world_size, period, num_steps, k = 4, 3, 12, 40
    make = partial(OkTopk, density=k / 1000, local_steps=period, threshold_period=1, rule=rule)
    ranks = SimulatedWorld(world_size).run(drive_locally, make, [num_steps] * world_size)
    x, residuals = torch.full((1000,), 3.0), [torch.zeros(1000) for _ in range(world_size)]
    for begin in range(0, num_steps, period):
        for rank, residual in enumerate(residuals):
            mine = x.clone()
            for step in range(begin, begin + period):
                mine -= change_of(rank, step, 1000, world_size)
            residual += x - mine
        x = x - exchange_densely(residuals, k, rule) / world_size
    for rank, residual in zip(ranks, residuals, strict=True):
        assert torch.equal(rank["own"][-1], x)
        assert torch.equal(rank["left"], residual)


def test_the_warm_up_of_local_steps_exchanges_whole_changes() -> None:
    """Its five steps end in the second period of four."""
    make = partial(OkTopk, density=0.05, local_steps=4, warmup_steps=5)
    for rank in SimulatedWorld(2).run(drive_locally, make, [16] * 2):
        dense_ones = [num > 2000 for num in rank["bytes"]]
        assert dense_ones == [step in (3, 7) for step in range(16)]


def resume_with(net: Any, before: int, after: int) -> tuple[int, int]:
    """Saves after five steps; the steps since the last exchange, then and two steps later."""
    rank = Rank(net, OkTopk(density=0.1, local_steps=before), torch.zeros(100))
    for _ in range(5):
        rank.descend(torch.ones(100))
    rank.settle()
    resumed = OkTopk(density=0.1, local_steps=after)
    rank.resume(resumed)
    then = resumed.steps_since
    for _ in range(2):
        rank.descend(torch.ones(100))
    return then, resumed.steps_since


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(4, 4, (1, 3)), (8, 4, (5, 1)), (4, 2, (1, 1)), (5, 1, (0, 0)), (1, 4, (0, 2))],
)
def test_a_resume_may_change_local_steps(
    before: int, after: int, expected: tuple[int, int]
) -> None:
    assert SimulatedWorld(2).run(resume_with, before, after) == [expected] * 2


def test_a_save_between_two_exchanges_does_not_resume_without_local_steps() -> None:
    with pytest.raises(RankFailed, match="local_steps=1 and 1 steps since the last exchange"):
        SimulatedWorld(2).run(resume_with, 4, 1)


def diverge_locally(net: Any) -> None:
    rank = Rank(net, TopkAllgather(0.1, local_steps=2), torch.zeros(100))
    for step in range(6):
        rank.step(torch.nan if (net.rank, step) == (1, 2) else 1.0)


def test_weights_that_diverged_in_local_steps_are_found_before_they_are_sent() -> None:
    with pytest.raises(RankFailed, match="weights must be finite, got NaN or inf on rank 1 at"):
        SimulatedWorld(2).run(diverge_locally)
