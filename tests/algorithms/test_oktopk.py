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
from lightning_dsgd.primitives.step_scaling import ScaledSteps, StepScaling, made_for
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
    "oktopk_int8": partial(OFTEN, wire_dtype="int8", rule="paper"),
    "oktopk_paper": partial(OFTEN, rule="paper"),
    "oktopk_int4_balanced": partial(OFTEN, wire_dtype="int4", balance_ratio=1.0),
    "topk_allgather": TopkAllgather,
    "topk_dsa": TopkDSA,
    "gtopk": GTopk,
    "gaussian_topk": GaussianTopk,
}
NOW = ("oktopk", "oktopk_int8", "oktopk_int4_balanced", "gtopk")
EVERY = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=() if name in NOW else LATER, id=name) for name, make in ALL.items()],
)


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
    trace: dict[str, Any] = {"given": [], "bytes": [], "left": [], "selected": []}
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


RULES = pytest.mark.parametrize("rule", ["shared", "paper"])


@SIZES
@RULES
@pytest.mark.parametrize("k", [1, 300])
def test_with_exact_thresholds_a_step_is_the_dense_one(world_size: int, k: int, rule: str) -> None:
    """Also where entries are spread evenly before they are sent to all."""
    options: dict[str, Any] = {"repartition_period": 2, "balance_ratio": 1.0, "rule": rule}
    make = partial(OkTopk, density=k / 1000, threshold_period=1, **options)
    ranks = simulate(world_size, make, coarse, 1000, 6)
    residuals = [torch.zeros(1000) for _ in range(world_size)]
    for step in range(6):
        for rank, residual in enumerate(residuals):
            residual += coarse(rank, step, 1000, world_size)
        u = exchange_densely(residuals, k, rule)
        for found, residual in zip(ranks, residuals, strict=True):
            assert torch.equal(found["given"][step], u / world_size)
            assert torch.equal(found["left"][step], residual)


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
    counts = [32, *[30] * 3]
    made, given, left = zip(
        *SimulatedWorld(4).run(drive_unevenly, partial(make, density=0.01), counts), strict=True
    )
    norms = torch.stack(given[0]).norm(dim=1)
    assert norms[30] < 2 * norms[20:30].mean()
    means = [torch.stack([g[step] for g in made if step < len(g)]).mean(0) for step in range(32)]
    rest = torch.stack(means).sum(0) - torch.stack(given[0]).sum(0) - torch.stack(left).mean(0)
    assert rest.abs().max() < 1e-4


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
def test_nan_and_inf_are_found_before_a_send(make: Make) -> None:
    for bad in (torch.nan, torch.inf):
        gradient = partial(diverging, bad=bad)
        outcomes = SimulatedWorld(3).outcomes(drive, make, gradient, 1000, 9)
        assert "NaN or inf on rank 2 at step 6" in str(outcomes[2])
        assert [o.rank for o in outcomes if isinstance(o, PeerLost)] == [2, 2]


def diverge_locally(net: Any, make: Make) -> None:
    rank = Rank(net, make(local_steps=2), torch.zeros(100))
    for step in range(6):
        rank.step(torch.nan if (net.rank, step) == (1, 2) else 1.0)


@EVERY
def test_weights_that_diverged_in_local_steps_are_found_before_a_send(make: Make) -> None:
    with pytest.raises(RankFailed, match="weights must be finite, got NaN or inf on rank 1 at"):
        SimulatedWorld(2).run(diverge_locally, make)


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
    assert SimulatedWorld(3).run(drive_overflowing, make) == [expected] * 3


# ---- what goes over the wire ----
NUM = 100_000


@RULES
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@cases("world_size", now=[3], later=[2, 8, 16])
def test_no_step_sends_more_than_6k_words(world_size: int, gradient: Gradient, rule: str) -> None:
    """6k (P-1)/P words of 4 bytes."""
    make = partial(OkTopk, threshold_period=4, rule=rule)
    for rank in simulate(world_size, make, gradient, NUM, 6):
        assert max(rank["bytes"]) <= 6 * (NUM // 100) * (world_size - 1) / world_size * 4


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
    for epoch in range(num_epochs):
        for step in range(counts[net.rank]):
            change = change_of(net.rank, epoch * counts[net.rank] + step, 1000, net.world_size)
            changed += change
            rank.step(-change)
        own, mean = rank.settle(), algorithm.consensus(x)
    found = {"changed": changed, "own": own, "mean": mean, "left": algorithm.residual.clone()}
    return {**found, "x": rank.finish(), "round": algorithm.round}


@EVERY
@cases("counts", now=[[0, 5, 5, 11]], later=[[7]])
def test_no_local_change_is_lost(make: Make, counts: list[int]) -> None:
    """The mean = the start - all changes + what the residuals have, which the end applies too."""
    local = partial(make, density=0.05, local_steps=4)
    ranks = SimulatedWorld(len(counts)).run(drive_locally, local, counts, 2)
    changed = torch.stack([rank["changed"] for rank in ranks]).mean(0)
    left = torch.stack([rank["left"].double() for rank in ranks]).mean(0)
    for rank in ranks:
        torch.testing.assert_close(rank["mean"].double(), 3 - changed + left, rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["x"].double(), 3 - changed, rtol=0, atol=1e-5)
        assert torch.equal(rank["x"], ranks[0]["x"])
        assert rank["round"] == ranks[0]["round"] > 0


@RULES
@pytest.mark.parametrize("period", [1, 3])
def test_changes_with_exact_thresholds_equal_the_dense_computation(rule: str, period: int) -> None:
    """SparseLoCo on Topk(sum_i Topk(e_i)), to the bit."""
    world_size, num_steps, k = 4, 12, 40
    options = {"local_steps": period, "exchanges": "changes", "threshold_period": 1, "rule": rule}
    make = partial(OkTopk, density=k / 1000, **options)
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
        assert torch.equal(rank["own"], x)
        assert torch.equal(rank["left"], residual)


SCALED = partial(OkTopk, exchanges="changes", scale_steps=True, density=0.1)


def drive_scaled(net: Any, make: Make, num_steps: int, resumed_after: int) -> dict[str, Any]:
    """Changes weights by noise that is scaled, from a step on as resumed from what was saved."""
    rank = Rank(net, make(), torch.full((2000,), 3.0))
    scaling, changed = made_for(rank.algorithm, net.sub("steps"), rank.x), torch.zeros(2000)
    for step in range(num_steps):
        if step == resumed_after:
            rank.settle()
            known = scaling.state_dict()
            rank.resume(make())
            scaling = made_for(rank.algorithm, net.sub("more steps"), rank.x)
            scaling.load_state_dict(known)
        rank.algorithm.before_update(rank.x, rank.x[:0])
        before = rank.x.clone()
        scaling.update_begins(rank.x)
        rank.x += normal(net.rank, step, 2000, net.world_size)
        scaling.update_ends(rank.x)
        changed += rank.x - before
        rank.algorithm.after_update(rank.x)
    rank.settle()
    found = {"sent": net.counters.bytes_sent, "factors": scaling.metrics()}
    return {**found, "changed": changed, "x": rank.finish()}


@pytest.mark.parametrize("wire_dtype", ["float32", "int8"])
def test_changes_are_scaled_by_what_exchanges_tell(wire_dtype: str) -> None:
    """For no message more; all that was changed is applied, whatever each rank's factors were."""
    make = partial(SCALED, wire_dtype=wire_dtype, threshold_period=1)
    plain, scaled = (
        SimulatedWorld(4).run(drive_scaled, partial(make, scale_steps=each), 40, -1)
        for each in (False, True)
    )
    changed = torch.stack([rank["changed"] for rank in scaled]).mean(0)
    for rank, unscaled in zip(scaled, plain, strict=True):
        assert 1.5 < rank["factors"]["step_scale"] <= 2  # noise alone
        assert rank["sent"] == pytest.approx(unscaled["sent"], rel=0.05)  # with other places
        torch.testing.assert_close(rank["x"], 3 + changed, rtol=0, atol=1e-3)
        assert torch.equal(rank["x"], scaled[0]["x"])


def test_a_resume_goes_on_with_the_same_factors() -> None:
    through, resumed = (SimulatedWorld(3).run(drive_scaled, SCALED, 12, at) for at in (-1, 5))
    for rank, again in zip(through, resumed, strict=True):
        assert again["factors"] == rank["factors"]
        assert torch.equal(again["x"], rank["x"])


def factors_after(
    net: Any, make: Make, num_steps: list[int], samples: list[int] | None, *, alike: bool
) -> Tensor:
    """The factors of steps that the ranks make alike, or each of its own noise."""
    conditions = Conditions(samples=None if samples is None else torch.tensor(samples[net.rank]))
    rank = Rank(net, make(), torch.zeros(2000), conditions)
    scaling = made_for(rank.algorithm, net.sub("steps"), rank.x)
    for step in range(num_steps[net.rank]):
        rank.algorithm.before_update(rank.x, rank.x[:0])
        scaling.update_begins(rank.x)
        rank.x += normal(0 if alike else net.rank, step, 2000, net.world_size)
        scaling.update_ends(rank.x)
        rank.algorithm.after_update(rank.x)
    rank.settle()
    assert isinstance(scaling, ScaledSteps)
    return scaling.factors()


@pytest.mark.parametrize("warmup_steps", [0, 40])
@pytest.mark.parametrize(
    ("num_steps", "samples"), [([40] * 3, [4, 1, 1]), ([40, 10, 10], None), ([40, 10, 10], [2] * 3)]
)
def test_ranks_that_agree_are_not_scaled_where_they_count_differently(
    num_steps: list[int], samples: list[int] | None, warmup_steps: int
) -> None:
    """They have more samples than others, or others have run out of data."""
    make = partial(SCALED, warmup_steps=warmup_steps)
    for factors in SimulatedWorld(3).run(
        partial(factors_after, alike=True), make, num_steps, samples
    ):
        torch.testing.assert_close(factors, torch.ones(2), rtol=0, atol=0.02)


def test_dense_exchanges_tell_the_factors_too() -> None:
    make = partial(SCALED, warmup_steps=40)
    for factors in SimulatedWorld(3).run(partial(factors_after, alike=False), make, [40] * 3, None):
        torch.testing.assert_close(factors, torch.full((2,), 3**0.5), rtol=0.1, atol=0)


@pytest.mark.parametrize("options", [{"local_steps": 2}, {"rule": "paper"}])
def test_what_exchanges_do_not_tell_comes_by_messages(options: dict[str, Any]) -> None:
    def kind(net: Any) -> type:
        rank = Rank(net, SCALED(**options), torch.zeros(100))
        return type(made_for(rank.algorithm, net.sub("steps"), rank.x))

    assert SimulatedWorld(2).run(kind) == [StepScaling] * 2


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


def test_a_resume_may_change_local_steps() -> None:
    """But not between two exchanges to a setting without local steps."""
    assert SimulatedWorld(2).run(resume_with, 8, 4) == [(5, 1)] * 2
    assert SimulatedWorld(2).run(resume_with, 4, 2) == [(1, 1)] * 2
    with pytest.raises(RankFailed, match="local_steps=1 and 1 steps since the last exchange"):
        SimulatedWorld(2).run(resume_with, 4, 1)
