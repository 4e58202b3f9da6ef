"""Every algorithm, one row each, through the same properties in the simulated world.

A new algorithm is one file and one row of `TABLE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd import topology
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
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
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.simulated import SimulatedWorld

N = 1040
LR = 0.1


@dataclass
class Row:
    """What holds for one algorithm."""

    make: Callable[[], Algorithm]
    bytes_per_step: Callable[[int, int], float]
    """Of one rank, as a function of P and of |x| in bytes; averaged over `period` steps."""
    period: int = 1
    slack: float = 1e-6
    """What control messages may add to the formula."""
    mixes_weights: bool = True
    """Whether weights that differ between ranks are brought together."""
    is_synchronous: bool = True
    """Whether what is averaged does not depend on who is late: the mean is conserved then."""
    steps_together: bool = True
    """Whether ranks that arrive at the same moment are all in time."""
    is_sparse: bool = False
    """Whether a step leaves out a part of the gradient, on one rank too."""
    accuracy: float = 1e-6
    """How near the constant learning rate comes to a minimum that is another one on every rank."""


def reduce_bytes(world_size: int, size: int) -> float:
    return 2 * (world_size - 1) / world_size * size


def flag_bytes(world_size: int) -> float:
    """One word is all-reduced by one of the ranks: the mean over ranks."""
    return 2 * (world_size - 1) / world_size * 8


def wagma_bytes(world_size: int, size: int, period: int) -> float:
    """Group sums, and a global one every `period` steps; the mean over ranks."""
    groups = [len(topology.groups(v, world_size, topology.near_sqrt(world_size))) for v in range(3)]
    group_sums = 2 * (world_size - sum(groups) / 3) / world_size * size
    return ((period - 1) * group_sums + reduce_bytes(world_size, size)) / period


def push_bytes(world_size: int, size: int, num_peers: int) -> float:
    """Shares of the weights, each with a push weight, to as many peers as there are."""
    return min(num_peers, (world_size - 1).bit_length()) * (size + 8)


def pair_bytes(world_size: int, size: float) -> float:
    """One message from each rank that has a partner; the mean over ranks."""
    return (world_size - world_size % 2) / world_size * size


def entry_bytes(count: int) -> float:
    """A message of values of 8 bytes with their indices, at densities above 1%."""
    return 24 + 8 * count + count - 1


TABLE = {
    "allreduce": Row(
        AllReduce,
        lambda p, size: reduce_bytes(p, size) + flag_bytes(p),
        mixes_weights=False,
    ),
    "no_sync": Row(NoSync, lambda p, size: 0.0),
    "local_sgd": Row(
        lambda: LocalSGD(sync_period=4),
        lambda p, size: (reduce_bytes(p, size) + flag_bytes(p)) / 4,
        period=4,
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
    "hpsgd": Row(
        HPSGD,
        lambda p, size: reduce_bytes(p, size) + 2 * flag_bytes(p),
        is_synchronous=False,
        accuracy=1.0,
    ),
    "hpsgd_bounded": Row(
        lambda: HPSGD(max_local_steps=1),
        lambda p, size: reduce_bytes(p, size) + 2 * flag_bytes(p),
        is_synchronous=False,
    ),
    "eager_solo": Row(
        lambda: EagerSGD(quorum="solo"),
        reduce_bytes,
        slack=0.05,
        mixes_weights=False,
        is_synchronous=False,
        steps_together=False,
        accuracy=1.0,
    ),
    "eager_majority": Row(
        lambda: EagerSGD(sync_period=5),
        lambda p, size: reduce_bytes(p, size) * 6 / 5,
        period=5,
        slack=0.05,
        mixes_weights=False,
        is_synchronous=False,
        accuracy=1.0,
    ),
    "wagma_synchronous": Row(
        lambda: WAGMA(sync_period=4, wait_avoiding=False),
        lambda p, size: wagma_bytes(p, size, 4),
        period=4,
        slack=0.05,
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
        accuracy=1.0,
    ),
    "popsgd": Row(PopSGD, lambda p, size: pair_bytes(p, size + 16)),
    "popsgd_local_steps": Row(
        lambda: PopSGD(local_steps=3, topology="cycle"),
        lambda p, size: pair_bytes(p, size + 16) / 3,
        period=3,
    ),
    "popsgd_bfloat16": Row(
        lambda: PopSGD(wire_dtype="bfloat16"), lambda p, size: pair_bytes(p, size / 4 + 16)
    ),
    "popsgd_int8": Row(
        lambda: PopSGD(wire_dtype="int8"),
        lambda p, size: pair_bytes(p, size + 16),  # a first meeting: in full
    ),
    "popsgd_not_blocking": Row(
        lambda: PopSGD(blocking=False),
        lambda p, size: pair_bytes(p, size + 32),
        is_synchronous=False,
        accuracy=1.0,
    ),
    "adpsgd": Row(ADPSGD, pair_bytes, is_synchronous=False, accuracy=1.0),
}
K = 260
# Errors that were fed back come in bursts: what is left moves around the minimum.
TABLE |= {
    "oktopk": Row(
        lambda: OkTopk(density=K / N, threshold_period=5, repartition_period=10),
        lambda p, size: 2 * (p - 1) / p * (entry_bytes(K) + 16 * 64 / 5),
        period=10,
        slack=0.15,
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


def rows(keep: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Runs a test for every row that promises what it tests."""
    kept = [pytest.param(row, id=name) for name, row in TABLE.items() if keep(row)]
    return pytest.mark.parametrize("row", kept)


ROWS = rows()
SYNCHRONOUS = rows(lambda row: row.is_synchronous)
TOGETHER = rows(lambda row: row.steps_together)
CONSERVING = rows(lambda row: row.is_synchronous and row.mixes_weights)
SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])


def start(net: Transport, row: Row, *, spread: float = 0.0) -> tuple[Algorithm, Tensor]:
    """An algorithm with weights that are the same on all ranks, or `spread` apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, generator=generator, dtype=torch.float64)
    x += spread * torch.randn(N, generator=torch.Generator().manual_seed(100 + net.rank)).double()
    algorithm = row.make()
    algorithm.start(net, x)
    return algorithm, x


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


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name) for name, row in TABLE.items() if not row.is_sparse]
)
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


@TOGETHER
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


@ROWS
@SIZES
def test_finds_the_minimum_of_a_quadratic(row: Row, world_size: int) -> None:
    optimum = torch.stack([target(rank) for rank in range(world_size)]).mean(0)
    for x, _ in SimulatedWorld(world_size, latency_s=0.01).run(train, row, 200, 0.0, True):
        torch.testing.assert_close(x, optimum, rtol=0, atol=row.accuracy)


@ROWS
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


@ROWS
@SIZES
def test_bytes_of_a_step_equal_the_formula(row: Row, world_size: int) -> None:
    counted = SimulatedWorld(world_size).run(count, row)
    mean = sum(sent for sent, _ in counted) / world_size / row.period
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
@pytest.mark.parametrize("counts", [[3, 11], [0, 5, 5], [1, 2, 3, 4], [9, 1, 1, 1, 4]])
def test_ranks_may_have_different_numbers_of_batches(row: Row, counts: list[int]) -> None:
    results = SimulatedWorld(len(counts)).run(unevenly, row, counts)
    assert [done for _, done in results] == [3 * c for c in counts]
    assert all(torch.equal(x, results[0][0]) for x, _ in results)
    assert torch.isfinite(results[0][0]).all()


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
    w = torch.tensor(topology.ring_matrix(world_size), dtype=torch.float64)
    goals = torch.stack([target(rank) for rank in range(world_size)])
    scale = torch.arange(1, world_size + 1).double()[:, None]
    x = torch.stack([xs[0] for xs in ranks])
    for k in range(1, 26):
        x = w @ x - LR * (x - goals) * scale
        torch.testing.assert_close(torch.stack([xs[k] for xs in ranks]), x, rtol=0, atol=1e-12)


@SIZES
def test_the_matrix_of_the_ring_is_symmetric_and_doubly_stochastic(world_size: int) -> None:
    w = torch.tensor(topology.ring_matrix(world_size), dtype=torch.float64)
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
