"""Every algorithm through the same properties in the simulated world.

One of `ALGORITHMS` that has no row in `TABLE` is tested with the properties that all share; a row
says what else it promises.
"""

from __future__ import annotations

import ctypes
import math
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.surviving import SurvivingReplica
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.simulated import SimulatedWorld
from lightning_dsgd.transport.view import View
from tests.support import matrices
from tests.support.thorough import times
from tests.support.worlds import ProcessWorld

N = 1040
K = 260
LR = 0.1


@dataclass
class Row:
    """What holds for one algorithm."""

    make: Callable[[], Algorithm]
    bytes_per_step: Callable[[int, int], float] | None = None
    """Of one rank, as a function of P and of |x| in bytes; averaged over `period` steps."""
    period: int = 1
    slack: float = 1e-6
    """What control messages may add to the formula."""
    mixes_weights: bool = True
    """Whether weights that differ between ranks are brought together."""
    is_synchronous: bool = True
    """Whether what is averaged does not depend on who is late: the mean is conserved then."""
    has_push_weights: bool = False
    """Whether the consensus gives the ranks weights that differ after late messages."""
    is_sparse: bool = False
    """Whether a step leaves out a part of the gradient, on one rank too."""
    held_back: Callable[[Any], Tensor] = lambda algorithm: torch.zeros(N).double()
    """What a rank has, when all stand still, of the gradients that it will apply later."""
    has_outer_optimizer: bool = False
    """Whether one rank alone is another optimizer than its own."""
    is_rounded: bool = False
    """Whether what is sent is rounded, and what is left of it kept for later."""
    rounding: float = 1e-12
    """How near its sums are to exact ones."""
    is_delayed: bool = False
    """Whether a gradient is applied a step later than on one rank alone."""
    accuracy: float = 1e-6
    """How near the constant learning rate comes to a minimum that is another one on every rank."""


def reduce_bytes(world_size: int, size: int) -> float:
    return 2 * (world_size - 1) / world_size * size


def flag_bytes(world_size: int) -> float:
    """One word is all-reduced by one of the ranks: the mean over ranks."""
    return 2 * (world_size - 1) / world_size * 8


def rounded_bytes(world_size: int, size: int, bits: int, num_fragments: int = 1) -> float:
    """Whole blocks of 32 values and an exponent, twice from and to each rank that sums a piece."""
    n = size // 8

    def lengths(whole: int, count: int) -> list[int]:
        return [whole * (i + 1) // count - whole * i // count for i in range(count)]

    pieces = [m for part in lengths(n, num_fragments) for m in lengths(part, world_size)]
    num_blocks = sum(-(-m // 32) for m in pieces)
    return 2 * (world_size - 1) / world_size * num_blocks * (1 + 4 * bits)


def block_bytes(size: int, bits: int) -> int:
    """Whole blocks of 32 values and an exponent."""
    return -(-size // 8 // 32) * (1 + 4 * bits)


def wagma_bytes(world_size: int, size: int, period: int) -> float:
    """Group sums, and a global one every `period` steps; the mean over ranks."""
    group_size = min(world_size, max(2, topology.near_sqrt(world_size)))
    groups = [len(topology.groups(v, world_size, group_size)) for v in range(3)]
    group_sums = 2 * (world_size - sum(groups) / 3) / world_size * size
    return ((period - 1) * group_sums + reduce_bytes(world_size, size)) / period


def push_bytes(world_size: int, size: int, num_peers: int) -> float:
    """Shares of the weights, each with a push weight, to as many peers as there are."""
    return min(num_peers, (world_size - 1).bit_length()) * (size + 8)


def pair_bytes(world_size: int, size: float) -> float:
    """One message from each rank that has a partner; the mean over ranks."""
    return (world_size - world_size % 2) / world_size * size


def pending_and_unapplied(algorithm: EagerSGD) -> Tensor:
    """The sums that a rank has not applied yet lack on one of P ranks."""
    return algorithm.pending + algorithm.unapplied / algorithm.net.world_size


def entry_bytes(count: float, span: float | None = None) -> float:
    """A message of values of 8 bytes, side by side or over so many places, with a bit for each."""
    return 24 + 8 * count + math.ceil((span or count) / 8)


def two_phase_bytes(p: int, span: int) -> float:
    """Of K entries over so many places: a region's to its owner, the owner's to all."""
    thresholds = 2 * (p - 1) / p * 16 * 64 / 5  # by digits, once in five exchanges
    return 2 * (p - 1) * entry_bytes(K / p, span / p) + thresholds


TABLE = {
    "allreduce": Row(
        AllReduce,
        lambda p, size: reduce_bytes(p, size) + flag_bytes(p),
        mixes_weights=False,
    ),
    "allreduce_int8": Row(
        lambda: AllReduce(wire_dtype="int8"),
        lambda p, size: rounded_bytes(p, size, 8) + flag_bytes(p),
        mixes_weights=False,
        is_rounded=True,
        accuracy=0.01,
    ),
    "allreduce_overlap": Row(
        lambda: AllReduce(overlap=True, num_buckets=3),
        lambda p, size: reduce_bytes(p, size) + flag_bytes(p),
        mixes_weights=False,
    ),
    "allreduce_delay": Row(
        lambda: AllReduce(delay=1),
        lambda p, size: reduce_bytes(p, size) + flag_bytes(p),
        mixes_weights=False,
        is_delayed=True,
    ),
    "allreduce_delay_overlap_int4": Row(
        lambda: AllReduce(delay=1, overlap=True, num_buckets=3, wire_dtype="int4"),
        lambda p, size: rounded_bytes(p, size, 4, 3) + flag_bytes(p),
        mixes_weights=False,
        is_rounded=True,
        accuracy=0.1,
    ),
    "no_sync": Row(NoSync, lambda p, size: 0.0),
    "local_sgd": Row(
        lambda: LocalSGD(sync_period=4),
        lambda p, size: (reduce_bytes(p, size) + flag_bytes(p)) / 4,
        period=4,
    ),
    "local_sgd_fragments": Row(
        lambda: LocalSGD(sync_period=4, num_fragments=3),
        lambda p, size: (reduce_bytes(p, size) + 3 * flag_bytes(p)) / 4,
        period=4,
    ),
    "local_sgd_overlap": Row(
        lambda: LocalSGD(sync_period=4, num_fragments=2, overlap_steps=2),
        lambda p, size: (reduce_bytes(p, size) + 2 * flag_bytes(p)) / 4,
        period=4,
        accuracy=1.0,
    ),
    "local_sgd_int8": Row(
        lambda: LocalSGD(sync_period=4, wire_dtype="int8"),
        lambda p, size: (rounded_bytes(p, size, 8) + flag_bytes(p)) / 4,
        period=4,
        is_rounded=True,
        accuracy=0.01,
    ),
    "diloco": Row(
        lambda: DiLoCo(sync_period=4, outer_momentum=0.5),
        lambda p, size: (reduce_bytes(p, size) + flag_bytes(p)) / 4,
        period=4,
        has_outer_optimizer=True,
    ),
    "diloco_streaming": Row(
        lambda: DiLoCo(
            sync_period=4,
            outer_momentum=0.5,
            num_fragments=2,
            overlap_steps=1,
            wire_dtype="int4",
        ),
        lambda p, size: (rounded_bytes(p, size, 4, 2) + 2 * flag_bytes(p)) / 4,
        period=4,
        has_outer_optimizer=True,
        is_rounded=True,
        accuracy=0.2,
    ),
    "dpsgd": Row(DPSGD, lambda p, size: len(topology.ring(0, p)) * size),
    "wagma": Row(
        lambda: WAGMA(sync_period=4, grace_s=0.05),
        lambda p, size: wagma_bytes(p, size, 4),
        period=4,
        slack=0.05,
        is_synchronous=False,
        accuracy=1.0,
    ),
    "wagma_overlap": Row(
        lambda: WAGMA(sync_period=4, grace_s=0.05, overlap=True),
        lambda p, size: wagma_bytes(p, size, 4),
        period=4,
        slack=0.05,
        is_synchronous=False,
        accuracy=1.0,
    ),
    "wagma_paper": Row(
        lambda: WAGMA(sync_period=4, grace_s=0.05, rule="paper"),
        lambda p, size: wagma_bytes(p, size, 4),
        period=4,
        slack=0.05,
        is_synchronous=False,
        accuracy=1.0,
    ),
    "wagma_int8": Row(
        lambda: WAGMA(sync_period=4, grace_s=0.05, wire_dtype="int8"),
        is_synchronous=False,
        is_rounded=True,
        accuracy=1.0,
    ),
    "wagma_overlap_int4": Row(
        lambda: WAGMA(sync_period=4, grace_s=0.05, overlap=True, wire_dtype="int4"),
        is_synchronous=False,
        is_rounded=True,
        accuracy=1.0,
    ),
    "wagma_synchronous_int8": Row(
        lambda: WAGMA(sync_period=4, wait_avoiding=False, wire_dtype="int8"),
        is_rounded=True,
        accuracy=0.01,
    ),
    "hpsgd": Row(
        HPSGD,
        lambda p, size: reduce_bytes(p, size) + 3 * flag_bytes(p),
        is_synchronous=False,
        accuracy=1.0,
    ),
    "hpsgd_bounded": Row(
        lambda: HPSGD(max_local_steps=1),
        lambda p, size: reduce_bytes(p, size) + 3 * flag_bytes(p),
        is_synchronous=False,
    ),
    "hpsgd_int8": Row(
        lambda: HPSGD(max_local_steps=1, wire_dtype="int8"),
        lambda p, size: rounded_bytes(p, size, 8) + 3 * flag_bytes(p),
        mixes_weights=False,  # if they differ from the start on
        is_synchronous=False,
        is_rounded=True,
        accuracy=0.01,
    ),
    "eager_solo": Row(
        lambda: EagerSGD(quorum="solo"),
        reduce_bytes,
        slack=0.05,
        mixes_weights=False,
        is_synchronous=False,
        held_back=pending_and_unapplied,
        accuracy=1.0,
    ),
    "eager_majority": Row(
        lambda: EagerSGD(sync_period=5),
        lambda p, size: reduce_bytes(p, size) * 6 / 5,
        period=5,
        slack=0.05,
        mixes_weights=False,
        is_synchronous=False,
        held_back=pending_and_unapplied,
        accuracy=1.0,
    ),
    "wagma_synchronous": Row(
        lambda: WAGMA(sync_period=4, wait_avoiding=False),
        lambda p, size: wagma_bytes(p, size, 4),
        period=4,
        slack=0.05,
    ),
    "wagma_group_period": Row(
        lambda: WAGMA(sync_period=4, group_period=2, grace_s=0.05),
        lambda p, size: wagma_bytes(p, size, 2) / 2,
        period=4,
        slack=0.05,
        is_synchronous=False,
        accuracy=1.0,
    ),
    "wagma_group_period_synchronous": Row(
        lambda: WAGMA(sync_period=4, group_period=2, wait_avoiding=False),
        lambda p, size: wagma_bytes(p, size, 2) / 2,
        period=4,
        slack=0.05,
        accuracy=0.1,
    ),
}
# What gossip leaves between the ranks moves their mean as soon as messages are late.
TABLE |= {
    "sgp": Row(SGP, lambda p, size: push_bytes(p, size, 1)),
    "sgp_two_peers": Row(lambda: SGP(num_peers=2), lambda p, size: push_bytes(p, size, 2)),
    "sgp_overlap": Row(
        lambda: SGP(overlap=1),
        lambda p, size: push_bytes(p, size, 1),
        is_synchronous=False,
        has_push_weights=True,
        accuracy=1.0,
    ),
    "sgp_int8": Row(
        lambda: SGP(wire_dtype="int8"),
        lambda p, size: push_bytes(p, block_bytes(size, 8), 1),
        is_rounded=True,
        accuracy=0.1,
    ),
    "sgp_overlap_bfloat16": Row(
        lambda: SGP(overlap=1, wire_dtype="bfloat16"),
        lambda p, size: push_bytes(p, size // 4, 1),
        is_synchronous=False,
        is_rounded=True,
        has_push_weights=True,
        accuracy=1.0,
    ),
    "popsgd_blocking": Row(lambda: PopSGD(blocking=True), lambda p, size: pair_bytes(p, size + 16)),
    "popsgd_blocking_local_steps": Row(
        lambda: PopSGD(blocking=True, local_steps=3, topology="cycle"),
        lambda p, size: pair_bytes(p, size + 16) / 3,
        period=3,
    ),
    "popsgd_blocking_bfloat16": Row(
        lambda: PopSGD(blocking=True, wire_dtype="bfloat16"),
        lambda p, size: pair_bytes(p, size / 4 + 16),
    ),
    "popsgd_blocking_int8": Row(
        lambda: PopSGD(blocking=True, wire_dtype="int8"),
        lambda p, size: pair_bytes(p, size + 16),  # a first meeting: in full
    ),
    "popsgd": Row(
        PopSGD,
        lambda p, size: pair_bytes(p, size + 32),
        is_synchronous=False,
        accuracy=1.0,
    ),
    "adpsgd": Row(ADPSGD, pair_bytes, is_synchronous=False, accuracy=1.0),
    "adpsgd_int8": Row(
        lambda: ADPSGD(wire_dtype="int8"),
        lambda p, size: pair_bytes(p, block_bytes(size, 8)),
        is_synchronous=False,
        is_rounded=True,
        accuracy=1.0,
    ),
}
# Errors that were fed back come in bursts: what is left moves around the minimum.
TABLE |= {
    "oktopk": Row(
        lambda: OkTopk(density=K / N, threshold_period=5, repartition_period=10),
        lambda p, size: two_phase_bytes(p, K),
        period=10,
        slack=0.1,
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
    "topk_allgather": Row(
        lambda: TopkAllgather(K / N),
        lambda p, size: (p - 1) * entry_bytes(K) + flag_bytes(p),
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
    "topk_dsa": Row(
        lambda: TopkDSA(K / N),
        lambda p, size: 2 * (p - 1) / p * entry_bytes(K),
        slack=0.1,
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
    "gtopk": Row(
        lambda: GTopk(K / N),
        lambda p, size: 2 * (p - 1) / p * entry_bytes(K) + flag_bytes(p),
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
    "gaussian_topk": Row(  # which takes all of equal entries
        lambda: GaussianTopk(K / N),
        lambda p, size: (p - 1) * entry_bytes(N) + flag_bytes(p),
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
}
# What local steps have changed is summed as gradients are, once per period.
TABLE |= {
    "oktopk_local_steps": Row(
        lambda: OkTopk(density=K / N, local_steps=3, threshold_period=5, repartition_period=10),
        lambda p, size: two_phase_bytes(p, N) / 3,  # of changes that are hardly ever equal
        period=30,
        slack=0.1,
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
    "gtopk_local_steps": Row(
        lambda: GTopk(K / N, local_steps=3),
        lambda p, size: (2 * (p - 1) / p * entry_bytes(K, N) + flag_bytes(p)) / 3,
        period=3,
        mixes_weights=False,
        is_sparse=True,
        accuracy=1.0,
    ),
}


def cautious(algorithm: type[Algorithm]) -> Row:
    """What may be asked of any algorithm."""
    mixes = not algorithm.uses_gradient
    return Row(algorithm, mixes_weights=mixes, is_synchronous=False, accuracy=1.0)


made = {type(row.make()) for row in TABLE.values()}
TABLE |= {name: cautious(a) for name, a in ALGORITHMS.items() if a not in made}


# One rank, an odd number and a power of two, and no rounded row, stand for all in `make test`.
LATER = pytest.mark.exhaustive
SIZES = pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=LATER), 3, 4, pytest.param(8, marks=LATER)]
)


def rows(
    keep: Callable[[Row], bool] = lambda row: True, later: Callable[[Row], bool] = lambda row: False
) -> pytest.MarkDecorator:
    """Runs a test for every row that promises what it tests."""
    kept = [
        pytest.param(row, id=name, marks=LATER if later(row) else ())
        for name, row in TABLE.items()
        if keep(row)
    ]
    return pytest.mark.parametrize("row", kept)


ROWS = rows()
ROUNDED_LATER = rows(later=lambda row: row.is_rounded)
COUNTED = rows(lambda row: row.bytes_per_step is not None)
SYNCHRONOUS = rows(lambda row: row.is_synchronous)
KEEPING = rows(lambda row: row.make().keeps_updates and not row.has_outer_optimizer)
EXACT = rows(lambda row: not (row.is_rounded or row.is_delayed))
LOSING = rows(lambda row: not row.make().keeps_updates)
CONSERVING = rows(lambda row: row.is_synchronous and row.mixes_weights and not row.is_rounded)
ALONE = rows(lambda row: not row.is_sparse and not row.has_outer_optimizer)


def start(net: Transport, row: Row, *, spread: float = 0.0) -> tuple[Algorithm, Tensor]:
    """An algorithm with weights that are the same on all ranks, or `spread` apart."""
    x = start_at(net.rank, spread)
    algorithm = row.make()
    algorithm.start(net, x)
    return algorithm, x


def start_at(rank: int, spread: float) -> Tensor:
    x = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = torch.randn(N, generator=torch.Generator().manual_seed(100 + rank)).double()
    return x.add_(own, alpha=spread)


def step(algorithm: Algorithm, x: Tensor, g: Tensor, lr: float = LR) -> None:
    algorithm.before_update(x, g)
    x.sub_(g, alpha=lr)
    algorithm.after_update(x)


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


def train(
    net: Any, row: Row, num_steps: int, spread: float = 0.0, delays: bool = False
) -> tuple[Tensor, float]:
    """Descends on |x - target_i|^2 / 2, whose minimum over all ranks is the mean of the targets."""
    algorithm, x = start(net, row, spread=spread)
    goal = target(net.rank)
    for k in range(num_steps):
        if delays:
            net.compute(0.1 + 0.3 * ((k * 7 + net.rank * 3) % 5 == 0))
        step(algorithm, x, x - goal)
    algorithm.settle(x)
    algorithm.finish(x)
    return x, net.now()


@ALONE
def test_one_rank_is_plain_sgd(row: Row) -> None:
    [(x, _)] = SimulatedWorld(1).run(train, row, 20)
    expected = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(20):
        expected.sub_(expected - target(0), alpha=LR)
    assert torch.equal(x, expected)


def keep_equal(net: Any, row: Row) -> Tensor:
    algorithm, x = start(net, row)
    for k in range(9):
        net.compute(0.1)
        g = torch.randn(N, generator=torch.Generator().manual_seed(k)).double()
        step(algorithm, x, g)
    own = x.clone()
    algorithm.settle(x)
    algorithm.finish(x)
    return own


@EXACT
@SIZES
def test_same_start_and_same_gradient_keep_all_ranks_in_consensus(
    row: Row, world_size: int
) -> None:
    xs = SimulatedWorld(world_size).run(keep_equal, row)
    [alone] = SimulatedWorld(1).run(keep_equal, row)
    for x in xs:
        torch.testing.assert_close(x, alone, rtol=1e-13, atol=1e-13)


def do_nothing(net: Any, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    algorithm, x = start(net, row, spread=1.0)
    before = x.clone()
    for k in range(11):
        net.compute(0.1 * ((net.rank + k) % 3))
        step(algorithm, x, torch.zeros(N).double())
    middle = x.clone()
    algorithm.settle(x)
    algorithm.finish(x)
    return before, middle, x


@CONSERVING
@SIZES
def test_zero_gradients_conserve_the_mean(row: Row, world_size: int) -> None:
    befores, middles, ends = zip(*SimulatedWorld(world_size).run(do_nothing, row), strict=True)
    mean = torch.stack(befores).mean(0)
    torch.testing.assert_close(torch.stack(middles).mean(0), mean, rtol=0, atol=1e-13)
    for end in ends:
        torch.testing.assert_close(end, mean, rtol=0, atol=1e-13)


SITUATIONS: dict[str, tuple[Callable[[random.Random, int], float], float]] = {
    "stragglers": (lambda chance, rank: chance.choice([0.1, 0.1, 0.5, 1.0]), 1e5),
    "slow link": (lambda chance, rank: chance.uniform(0.09, 0.11), 1e4),
    "slow rank": (lambda chance, rank: 0.1 if rank else 0.3, 1e5),
}
"""How long a step takes, and how many bytes a second pass; a message has some thousands."""


def add_to_all(net: Any, row: Row, situation: str) -> tuple[Tensor, Tensor, dict[str, float]]:
    """What this rank began with and added, but for what it holds back, and the consensus."""
    chance = random.Random(f"{situation}/{net.rank}")
    draw = torch.Generator().manual_seed(net.rank)
    step_s, _ = SITUATIONS[situation]
    algorithm, x = start(net, row, spread=float(row.mixes_weights))
    own = x.clone()
    for _ in range(2):
        # A mean of gradients is one over those who have any.
        for _ in range(chance.randrange(3, 12) if row.mixes_weights else 8):
            net.compute(step_s(chance, net.rank))
            update = 1 + torch.randn(N, generator=draw).double()
            own += update
            step(algorithm, x, -update, lr=1.0)
        algorithm.settle(x)
    own += row.held_back(algorithm)  # of -update
    rest = algorithm.held_back()
    if rest is not None:
        x -= rest
    algorithm.finish(x)
    return own, x, algorithm.metrics()


def run_in(situation: str, row: Row, world_size: int) -> tuple[Tensor, Tensor, list[Any]]:
    """The mean that no loss would lead to, the consensus, and the metrics."""
    bandwidth = SITUATIONS[situation][1]
    world = SimulatedWorld(world_size, latency_s=0.01, bandwidth_bytes_s=bandwidth)
    owns, ends, figures = zip(*world.run(add_to_all, row, situation), strict=True)
    return torch.stack(owns).mean(0), torch.stack(ends), list(figures)


@KEEPING
@SIZES
def test_no_update_is_lost(row: Row, world_size: int) -> None:
    for situation in SITUATIONS:
        mean, ends, _ = run_in(situation, row, world_size)
        for end in ends:
            torch.testing.assert_close(end, mean, rtol=0, atol=row.rounding, msg=situation)


@LOSING
def test_a_rule_that_loses_updates_says_so(row: Row) -> None:
    begin = torch.stack([start_at(rank, 1.0) for rank in range(4)]).mean(0)
    for situation in SITUATIONS:
        mean, ends, _ = run_in(situation, row, 4)
        moved, updates = ends[0] - begin, mean - begin
        assert float(torch.dot(moved, updates) / torch.dot(updates, updates)) < 0.9


@pytest.mark.parametrize("row", [pytest.param(TABLE["eager_majority"], id="eager_majority")])
def test_gradients_that_are_in_no_sum_yet_are_told(row: Row) -> None:
    for situation in SITUATIONS:
        *_, figures = run_in(situation, row, 4)
        assert all(0.8 < each["updates_kept"] <= 1 for each in figures)


def touch(net: Any, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Somebody else writes the weights where all stand still: before and after some steps."""
    algorithm, x = start(net, row)
    written = []
    for k in range(3):
        for _ in range(2 * (k == 1)):
            step(algorithm, x, torch.zeros_like(x))
        algorithm.settle(x)
        x.copy_(target(10 * k + net.rank))
        written.append(x.clone())
        algorithm.settle(x)
        written.append(algorithm.consensus(x))
    algorithm.finish(x)
    return (*written[-2:], x, written[1])


@ROWS
@SIZES
def test_who_writes_the_weights_between_steps_leaves_all_ranks_alike(
    row: Row, world_size: int
) -> None:
    results = SimulatedWorld(world_size, latency_s=0.01).run(touch, row)
    owns, consensus, ends, firsts = zip(*results, strict=True)
    mean = torch.stack(owns).mean(0)
    for k in range(world_size):
        assert torch.equal(ends[k], ends[0])
        assert torch.equal(consensus[k], consensus[0])
        assert torch.equal(firsts[k], firsts[0])
        if row.mixes_weights and not row.has_push_weights and not row.has_outer_optimizer:
            torch.testing.assert_close(ends[k], mean, rtol=0, atol=row.rounding)


@ROUNDED_LATER
@pytest.mark.parametrize(
    "world_size", [4, *(pytest.param(size, marks=LATER) for size in (1, 2, 3, 8))]
)
def test_finds_the_minimum_of_a_quadratic(row: Row, world_size: int) -> None:
    optimum = torch.stack([target(rank) for rank in range(world_size)]).mean(0)
    for x, _ in SimulatedWorld(world_size, latency_s=0.01).run(train, row, 200, 0.0, True):
        torch.testing.assert_close(x, optimum, rtol=0, atol=row.accuracy)


@ROUNDED_LATER
def test_two_runs_are_equal_to_the_bit(row: Row) -> None:
    def run() -> list[tuple[Tensor, float]]:
        world = SimulatedWorld(5, latency_s=0.003, bandwidth_bytes_s=1e4)
        return world.run(train, row, 30, 0.0, True)

    for (x, time), (y, again) in zip(run(), run(), strict=True):
        assert torch.equal(x, y)
        assert time == again


@ROWS
@SIZES
def test_all_ranks_end_with_the_same_weights_to_the_bit(row: Row, world_size: int) -> None:
    spread = 1.0 if row.mixes_weights else 0.0
    xs = [x for x, _ in SimulatedWorld(world_size).run(train, row, 7, spread, True)]
    assert all(torch.equal(x, xs[0]) for x in xs)


def resume(net: Any, row: Row, stop_at: int | None) -> Tensor:
    algorithm, x = start(net, row, spread=0.5 if row.mixes_weights else 0.0)
    goal = target(net.rank)
    for k in range(15):
        if k == stop_at:
            algorithm.settle(x)
            state = algorithm.state_dict()
            algorithm.stop()
            x = x.clone()
            algorithm = row.make()
            algorithm.start(net.sub("again"), x)
            algorithm.load_state_dict(state)
        step(algorithm, x, x - goal)
    own = x.clone()
    algorithm.settle(x)
    algorithm.finish(x)
    return own


@SYNCHRONOUS
@pytest.mark.parametrize("stop_at", [1, 6, 8])
def test_save_and_resume_equals_straight_through(row: Row, stop_at: int) -> None:
    straight = SimulatedWorld(4).run(resume, row, None)
    resumed = SimulatedWorld(4).run(resume, row, stop_at)
    for x, y in zip(straight, resumed, strict=True):
        assert torch.equal(x, y)


def count(net: Any, row: Row) -> tuple[int, int]:
    algorithm, x = start(net, row)
    sent = []
    for k in range(2 * row.period):
        net.compute(1.0)
        if k == row.period:
            sent.append(net.counters.bytes_sent)
        step(algorithm, x, torch.ones(N).double())
    net.compute(1.0)
    sent.append(net.counters.bytes_sent)
    algorithm.settle(x)
    algorithm.finish(x)
    return sent[1] - sent[0], x.nbytes


@COUNTED
@SIZES
def test_bytes_of_a_step_equal_the_formula(row: Row, world_size: int) -> None:
    counted = SimulatedWorld(world_size).run(count, row)
    mean = sum(sent for sent, _ in counted) / world_size / row.period
    assert row.bytes_per_step is not None
    assert mean == pytest.approx(row.bytes_per_step(world_size, N * 8), rel=row.slack)


def unevenly(net: Any, row: Row, counts: list[int]) -> tuple[Tensor, int]:
    algorithm, x = start(net, row)
    goal = target(net.rank)
    done = 0
    for _ in range(3):
        for _ in range(counts[net.rank]):
            net.compute(0.1)
            step(algorithm, x, x - goal)
            done += 1
        algorithm.settle(x)
        algorithm.consensus(x)
    algorithm.settle(x)
    algorithm.finish(x)
    return x, done


@ROWS
@pytest.mark.parametrize(
    "counts",
    [
        [0, 5, 5],
        pytest.param([9, 1, 1, 1, 4], marks=LATER),
        pytest.param([3, 11], marks=LATER),
        pytest.param([1, 2, 3, 4], marks=LATER),
    ],
)
def test_ranks_may_have_different_numbers_of_batches(row: Row, counts: list[int]) -> None:
    results = SimulatedWorld(len(counts)).run(unevenly, row, counts)
    assert [done for _, done in results] == [3 * c for c in counts]
    assert all(torch.equal(x, results[0][0]) for x, _ in results)
    assert torch.isfinite(results[0][0]).all()


# ---- a rank is lost ----


class Vector(nn.Module):
    """Weights that are the flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(start_at(0, 0.0))


def survive(net: Any, row: Row, num_steps: int) -> tuple[tuple[int, ...], Tensor, list[Any]]:
    """Trains, shows the consensus, and ends, whoever is lost or comes meanwhile."""
    module, goal = Vector(), target(net.rank)
    optimizer = torch.optim.SGD(module.parameters(), LR)
    begun = [-1 if net.is_newcomer else 0]

    def begin(view: View) -> None:
        told = [int(k) for k in everyones(view.sub("begun"), str(begun[0]))]
        old = [rank for rank, k in enumerate(told) if k >= 0]
        is_member, is_grown = begun[0] >= 0, len(old) < len(told)
        among = View(view.sub("old"), old, view.number) if is_grown and is_member else None
        replica.change_view(view.sub("replica"), among, old[0] if is_grown else -1)
        if not is_member:
            begun[0] = max(told)  # some may still be in the call that lets it in

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    inside = calls.view.sub("replica")
    replica = SurvivingReplica(inside, module, [optimizer], row.make(), is_newcomer=net.is_newcomer)
    shown: list[Any] = []
    if net.is_newcomer:
        net.join(within_s=60.0)
        calls.join()
    while begun[0] < num_steps:
        k = begun[0]
        net.compute(0.1 + 0.3 * ((k * 7 + net.rank * 3) % 5 == 0))
        module.x.grad = (module.x - goal).detach()
        calls.step(lambda: replica.before_update(optimizer), again=True)
        optimizer.step()
        calls.step(lambda: replica.after_update(optimizer), again=False)
        if k % 10 == 9:
            calls.together(replica.show_consensus, replica.show_as_shared)
            newcomers = sum(1 << n for n in calls.view.newcomers())
            mine = torch.tensor([k, newcomers])
            shown.append(calls.together(lambda mine=mine: calls.view.all_gather(mine).wait()))
            replica.show_own()
        begun[0] = k + 1
        newcomers = int(shown[-1][0][1]) if k % 10 == 9 else 0
        if newcomers:
            calls.admit([n for n in range(newcomers.bit_length()) if newcomers >> n & 1])
    calls.together(replica.finish, replica.finish_as_shared)
    calls.leave()
    return calls.view.members, module.x.detach(), shown


def lose(row: Row, world_size: int, seed: int, num_losses: int) -> None:
    """At any time of some steps, evaluations, and the end."""
    chance = random.Random(seed)
    world = SimulatedWorld(
        world_size, latency_s=0.01, bandwidth_bytes_s=3e5, detect_s=0.003, goes_on=True
    )
    lost = chance.sample(range(world_size), num_losses)
    for rank in lost:
        world.kill(rank, chance.uniform(0.05, 8.0))
    outcomes = world.outcomes(survive, row, 20)
    what = f"{seed}: ranks {lost} of {world_size}"
    ends = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    for end in ends:
        assert not isinstance(end, BaseException), f"{what}: {end!r}"
        members, x, shown = end
        assert set(range(world_size)) - set(lost) <= set(members), what
        assert torch.isfinite(x).all(), what
        assert torch.equal(x, ends[0][1]), what
        assert [[int(each[0]) for each in theirs] for theirs in shown] == [
            [9 + 10 * i] * len(theirs) for i, theirs in enumerate(shown)
        ], what
        assert len(shown) == 2, what


def lose_and_let_in(row: Row, world_size: int, seed: int) -> None:
    """One rank is lost, and two come, at any time until the last batch but ten."""
    chance = random.Random(seed)
    world = SimulatedWorld(
        world_size, latency_s=0.01, bandwidth_bytes_s=3e5, detect_s=0.003, goes_on=True
    )
    lost = chance.randrange(world_size)
    world.kill(lost, chance.uniform(0.05, 8.0))
    first_s = chance.uniform(0.0, 1.0)
    came = [world.join(first_s), world.join(first_s + chance.choice([0.0, 0.1]))]
    outcomes = world.outcomes(survive, row, 20)
    ends = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    for end in ends:
        assert not isinstance(end, BaseException), f"{seed}: {end!r}"
        members, x, shown = end
        assert set(came) <= set(members), seed
        assert torch.isfinite(x).all(), seed
        assert torch.equal(x, ends[0][1]), seed
        assert [int(theirs[0][0]) for theirs in shown] == [9, 19][-len(shown) :], seed


@pytest.mark.parametrize("name", ["allreduce", "wagma", "sgp", "popsgd", "hpsgd", "local_sgd"])
def test_a_rank_is_lost_and_two_come(name: str) -> None:
    for seed in range(2):
        lose_and_let_in(TABLE[name], 4, seed)


@ROWS
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_ranks_come_and_are_lost_at_any_moment(row: Row) -> None:
    for seed in times(8):
        lose_and_let_in(row, 3 + seed % 3, 500 + seed)


SCALED = {
    "wagma": Row(lambda: WAGMA(sync_period=4, grace_s=0.05, scale_steps=True)),
    "local_sgd": Row(lambda: LocalSGD(sync_period=4, scale_steps=True)),
}
"""Who drives these scales their steps."""


@pytest.mark.parametrize("name", [pytest.param("wagma"), pytest.param("local_sgd", marks=LATER)])
def test_a_rank_is_lost_and_others_come_where_steps_are_scaled(name: str) -> None:
    for seed in range(2):
        lose(SCALED[name], 4, seed, 1)
        lose_and_let_in(SCALED[name], 4, seed)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_ranks_are_lost_and_come_at_any_moment_where_steps_are_scaled(name: str) -> None:
    for seed in times(8):
        lose(SCALED[name], 3 + seed % 4, 1000 + seed, 1)
        lose_and_let_in(SCALED[name], 3 + seed % 3, 500 + seed)


@ROUNDED_LATER
def test_a_rank_is_lost_and_the_others_go_on(row: Row) -> None:
    for seed in range(3):
        lose(row, 4, seed, 1)


@ROWS
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_ranks_are_lost_at_any_moment_and_the_others_go_on(row: Row) -> None:
    for seed in times(16):
        lose(row, 3 + seed % 4, 1000 + seed, 1)
        lose(row, 5, 100_000 + seed, 2)


# ---- what only one of them promises ----


def dpsgd_trajectory(net: Any, num_steps: int) -> list[Tensor]:
    algorithm, x = start(net, TABLE["dpsgd"], spread=1.0)
    xs = [x.clone()]
    for _ in range(num_steps):
        step(algorithm, x, (x - target(net.rank)) * (1 + net.rank))
        xs.append(x.clone())
    algorithm.settle(x)
    algorithm.finish(x)
    return xs


@SIZES
def test_dpsgd_is_the_matrix_recursion(world_size: int) -> None:
    """X <- W X - lr G, in float64, to 1e-12."""
    ranks = SimulatedWorld(world_size).run(dpsgd_trajectory, 25)
    w = torch.tensor(matrices.ring_matrix(world_size), dtype=torch.float64)
    goals = torch.stack([target(rank) for rank in range(world_size)])
    scale = torch.arange(1, world_size + 1).double()[:, None]
    x = torch.stack([xs[0] for xs in ranks])
    for k in range(1, 26):
        x = w @ x - LR * (x - goals) * scale
        torch.testing.assert_close(torch.stack([xs[k] for xs in ranks]), x, rtol=0, atol=1e-12)


@SIZES
def test_the_matrix_of_the_ring_is_symmetric_and_doubly_stochastic(world_size: int) -> None:
    w = torch.tensor(matrices.ring_matrix(world_size), dtype=torch.float64)
    assert torch.equal(w, w.T)
    torch.testing.assert_close(w.sum(0), torch.ones(world_size).double())
    torch.testing.assert_close(w.sum(1), torch.ones(world_size).double())


def local_sgd_distances(net: Any, sync_period: int) -> list[float]:
    row = Row(lambda: LocalSGD(sync_period=sync_period), lambda p, size: 0.0)
    algorithm, x = start(net, row)
    distances = []
    for _ in range(3 * sync_period):
        step(algorithm, x, x - target(net.rank))
        everyone = net.sub("probe").all_gather(x).wait()
        distances.append(max(float((y - x).abs().max()) for y in everyone))
    algorithm.settle(x)
    algorithm.finish(x)
    return distances


@pytest.mark.parametrize("sync_period", [1, 3])
def test_local_sgd_is_in_consensus_exactly_every_period(sync_period: int) -> None:
    for distances in SimulatedWorld(4).run(local_sgd_distances, sync_period):
        zero = [k + 1 for k, distance in enumerate(distances) if distance == 0]
        assert zero == [sync_period, 2 * sync_period, 3 * sync_period]


def test_stragglers_cost_allreduce_the_maximum_and_no_sync_nothing() -> None:
    times = {
        name: max(time for _, time in SimulatedWorld(4).run(train, TABLE[name], 40, 0.0, True))
        for name in ("allreduce", "no_sync", "local_sgd")
    }
    alone = 40 * 0.1 + 8 * 0.3
    assert times["no_sync"] == pytest.approx(alone)
    assert times["allreduce"] > 1.5 * alone
    assert alone <= times["local_sgd"] < times["allreduce"]


def reduce_in_pieces(net: Any, algorithm: AllReduce) -> tuple[list[Tensor], float]:
    """The weights after each step; pieces of the gradient come during a step of 1 s."""
    x, goal = start_at(0, 0.0), target(net.rank)
    algorithm.start(net, x)
    xs = [x.clone()]
    for _ in range(6):
        g = x - goal
        for begin in range(N, -1, -N // 8):
            net.compute(1 / 9)
            if algorithm.takes_pieces:
                algorithm.gradient_made(g, begin)
        step(algorithm, x, g)
        xs.append(x.clone())
    seconds = net.now()
    algorithm.settle(x)
    algorithm.finish(x)
    return xs, seconds


def test_a_gradient_that_travels_in_pieces_is_the_same_and_sooner_there() -> None:
    def run(**options: Any) -> tuple[list[Tensor], float]:
        world = SimulatedWorld(2, latency_s=1e-3, bandwidth_bytes_s=N * 8)
        return world.run(lambda net: reduce_in_pieces(net, AllReduce(**options)))[0]

    (xs, after), (ys, during), (zs, delayed) = run(), run(overlap=True), run(delay=1)
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
    assert after == pytest.approx(6 * 2, rel=0.02)  # a step, and a sum that takes as long
    assert during == pytest.approx(6 * (1 + 1 / 4), rel=0.05)
    assert delayed == pytest.approx(6, rel=0.05)
    goal = torch.stack([target(rank) for rank in range(2)]).mean(0)
    for k in range(1, 6):  # step k applies the gradient at the weights before step k - 1
        expected = zs[k] - LR * (zs[k - 1] - goal)
        torch.testing.assert_close(zs[k + 1], expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"need gradients that are never scaled, got overlap=True"):
        AllReduce(overlap=True).check(2, Conditions(skips_overflow=True))


# ---- over real processes ----


def grow(net: Any, name: str, num_steps: int) -> float:
    """By how many MB this process has grown from a fifth of its steps to the last.

    The least of five sizes counts there, as something may be under way.
    """
    algorithm = ALGORITHMS[name]()
    x, g = torch.zeros(100_000), torch.ones(100_000)
    counts = torch.ones(1, dtype=torch.int64) if algorithm.counts_gradients else None
    algorithm.start(net.sub(name), x, Conditions(gradient_counts=counts))
    early, late = range(num_steps // 5, num_steps // 5 + 5), range(num_steps - 5, num_steps)
    sizes: dict[int, float] = {}
    for k in range(num_steps):
        if counts is not None:
            counts.fill_(1)
        algorithm.before_update(x, g.fill_(1.0) if algorithm.uses_gradient else x[:0])
        x -= 1e-3
        algorithm.after_update(x)
        if k in early or k in late:
            algorithm.settle(x)
            ctypes.CDLL(None).malloc_trim(0)  # what is free counts as the process's until then
            pages = Path("/proc/self/statm").read_text().split()[1]
            sizes[k] = int(pages) * resource.getpagesize() / 1e6
    algorithm.settle(x)
    algorithm.finish(x)
    return min(sizes[k] for k in late) - min(sizes[k] for k in early)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALGORITHMS)
def test_memory_is_flat_over_thousands_of_steps(name: str) -> None:
    """A copy of the weights is 0.4 MB: one that is kept every hundred steps would show.

    What is under way at the moment is up to 6 MB on a busy machine, however many steps there are.
    """
    assert max(ProcessWorld(timeout_s=60.0).run(2, grow, name, 3000)) < 9.0
