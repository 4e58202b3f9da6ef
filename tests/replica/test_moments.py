"""What optimizers keep is averaged with the weights, on simulated ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.primitives import topology
from lightning_dsgd.primitives.periodic import PeriodicAverage
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import RankFailed, SimulatedWorld

OPTIMIZERS: dict[str, Callable[[Sequence[Any]], torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.01),
}
KEPT = {"momentum": ["momentum_buffer"], "AdamW": ["exp_avg", "exp_avg_sq"]}
PERIOD = 2
GOSSIP = {
    "sgp": "sgp:average_momentum=true",
    "sgp_peers": "sgp:num_peers=2:average_momentum=true",
    "sgp_random": "sgp:topology=random:average_momentum=true",
    "popsgd": "popsgd:blocking=true:average_momentum=true",
    "popsgd_int8": "popsgd:blocking=true:wire_dtype=int8:average_momentum=true",
}
"""What a rank averages with another rank, and not with all."""
Weights = list[Tensor]
Kept = list[list[Tensor]]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 4)).double()


def loss(of: nn.Module, number: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    return (of(x) - rank).square().mean()


def step(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    replica.before_update(optimizer)
    optimizer.step()
    replica.after_update(optimizer)


def train(
    net: Any, name: str, num_steps: Sequence[int], spec: str = "local_sgd", **options: Any
) -> tuple[Weights, Kept]:
    """Returns the weights and what is kept for them, in the order of the module."""
    mine = model()
    optimizer = OPTIMIZERS[name](list(mine.parameters())[:: -1 if net.rank == 1 else 1])
    algorithm = make_algorithm(spec)
    if spec == "local_sgd":
        algorithm = LocalSGD(sync_period=PERIOD, average_momentum=True, **options)
    replica = Replica(net, mine, [optimizer], algorithm)
    replica.synchronize()
    for number in range(num_steps[net.rank]):
        net.compute(0.1 + (number * 7 + net.rank * 3) % 5 / 10)
        optimizer.zero_grad()
        loss(mine, number, net.rank).backward()
        step(replica, optimizer)
    replica.finish()
    parameters = list(mine.parameters())
    kept = [[optimizer.state[p][key].clone() for p in parameters] for key in KEPT[name]]
    return [p.detach().clone() for p in parameters], kept


def mixing(name: str, num_ranks: int, step: int) -> Tensor:
    """Returns how much each rank (column) counts for each (row) after a step, in lockstep."""
    matrix = torch.eye(num_ranks, dtype=torch.float64)
    if name == "local_sgd":
        is_due = step % PERIOD == PERIOD - 1
        return torch.full_like(matrix, 1 / num_ranks) if is_due else matrix
    if name.startswith("popsgd"):
        others = [[rank] for rank in topology.random_partners(step, num_ranks, "complete", 0)]
    else:
        num_peers = 2 if name == "sgp_peers" else 1
        graph = "random" if name == "sgp_random" else "exponential"
        others = [
            topology.in_peers(graph, step, rank, num_ranks, num_peers) for rank in range(num_ranks)
        ]
    for rank, peers in enumerate(others):
        for peer in peers:
            matrix[rank, peer] += 1
    return matrix / matrix.sum(0)


def by_hand(
    name: str, num_ranks: int, num_steps: int, algorithm: str
) -> list[tuple[Weights, Kept]]:
    """All ranks in one process: x and w move as by push-sum, and moments as x / w does."""
    models = [copy.deepcopy(model()) for _ in range(num_ranks)]
    optimizers = [OPTIMIZERS[name](list(each.parameters())) for each in models]
    columns = [*zip(*(each.parameters() for each in models), strict=True)]
    w = torch.ones(num_ranks, dtype=torch.float64)
    for number in range(num_steps):
        before = [[p.detach().clone() for p in each.parameters()] for each in models]
        for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(each, number, rank).backward()
            optimizer.step()
        matrix = mixing(algorithm, num_ranks, number)
        with torch.no_grad():
            for index, column in enumerate(columns):
                for rank, z in enumerate(column):
                    z.add_(before[rank][index], alpha=float(w[rank]) - 1)
                mix(list(column), matrix, matrix @ w)
                for key in KEPT[name]:
                    tensors = [o.state[p][key] for o, p in zip(optimizers, column, strict=True)]
                    mix(tensors, matrix * w, matrix @ w)
        w = matrix @ w
    with torch.no_grad():
        for column in columns:
            mix(list(column), (w / num_ranks).expand(num_ranks, -1), torch.ones(num_ranks))
    return [
        (
            [p.detach() for p in each.parameters()],
            [[optimizer.state[p][key] for p in each.parameters()] for key in KEPT[name]],
        )
        for each, optimizer in zip(models, optimizers, strict=True)
    ]


def mix(tensors: list[Tensor], matrix: Tensor, totals: Tensor) -> None:
    mixed = torch.einsum("ij,j...->i...", matrix, torch.stack(tensors))
    for each, sums, total in zip(tensors, mixed, totals, strict=True):
        each.copy_(sums / total)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ["local_sgd", *GOSSIP])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_go_on_with_the_mean_of_their_momentum(
    name: str, algorithm: str, num_ranks: int
) -> None:
    spec = GOSSIP.get(algorithm, algorithm)
    atol = 5e-3 if algorithm == "popsgd_int8" else 1e-12  # rounded weights have other gradients
    steps = (6,) * num_ranks
    ours = SimulatedWorld(num_ranks, latency_s=1e-3).run(train, name, steps, spec)
    expected = by_hand(name, num_ranks, 6, algorithm)
    for (weights, kept), (weights_by_hand, kept_by_hand) in zip(ours, expected, strict=True):
        torch.testing.assert_close(weights, weights_by_hand, rtol=0, atol=atol)
        torch.testing.assert_close(kept, kept_by_hand, rtol=0, atol=atol)


def test_ranks_that_stop_go_on_to_give_their_momentum() -> None:
    ranks = SimulatedWorld(3, latency_s=1e-3).run(train, "momentum", (8, 2, 6))
    _, (first,) = ranks[0]
    for _, (kept,) in ranks[1:]:
        torch.testing.assert_close(kept, first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", GOSSIP.values())
def test_gossip_of_ranks_that_stop_mixes_momentum(spec: str) -> None:
    """All gradients are 1, so a mean is between the momenta of those that took part in it."""

    def run(net: Any) -> Tensor:
        mine = model()
        optimizer = OPTIMIZERS["momentum"](list(mine.parameters()))
        replica = Replica(net, mine, [optimizer], make_algorithm(spec))
        replica.synchronize()
        for number in range((8, 2, 6, 7, 3)[net.rank]):
            net.compute(0.1 + (number * 7 + net.rank * 3) % 5 / 10)
            for parameter in mine.parameters():
                parameter.grad = torch.ones_like(parameter)
            step(replica, optimizer)
        replica.finish()
        return torch.cat([s["momentum_buffer"].flatten() for s in optimizer.state.values()])

    alone = [sum(0.9**k for k in range(num)) for num in (2, 8)]
    momenta = SimulatedWorld(5, latency_s=1e-3).run(run)
    for momentum in momenta:
        assert float(momentum.max() - momentum.min()) < 1e-12
        assert alone[0] - 1e-12 <= float(momentum[0]) <= alone[1] + 1e-12


def test_momentum_is_averaged_with_the_fragment_of_its_weights() -> None:
    """Of two fragments the second one's turn is after the last step."""
    world = SimulatedWorld(2, latency_s=1e-3)
    ranks = world.run(lambda net: train(net, "momentum", (4, 4), num_fragments=2))
    (_, (first,)), (_, (other,)) = ranks
    assert torch.equal(first[-1], other[-1])
    assert not torch.equal(first[0], other[0])


def miss_a_gradient(net: Any, spec: str) -> list[float]:
    """The second rank has no gradient for the last layer, and a third one never steps."""
    mine = model()
    optimizer = OPTIMIZERS["momentum"](list(mine.parameters()))
    replica = Replica(net, mine, [optimizer], make_algorithm(spec))
    replica.synchronize()
    if net.rank < 2:
        for parameter in list(mine.parameters())[: 4 - 2 * net.rank]:
            parameter.grad = torch.full_like(parameter, net.rank + 1.0)
        step(replica, optimizer)
    replica.finish()
    return [float(state["momentum_buffer"].mean()) for state in optimizer.state.values()]


def test_a_rank_without_a_gradient_counts_in_no_mean() -> None:
    spec = "local_sgd:sync_period=1:average_momentum=true"
    ranks = SimulatedWorld(3).run(miss_a_gradient, spec)
    assert ranks == [[1.5, 1.5, 1.0, 1.0], [1.5, 1.5], []]


def test_an_optimizer_that_is_loaded_later_goes_on_to_be_averaged() -> None:
    def run(net: Any) -> Tensor:
        mine = model()
        optimizer = OPTIMIZERS["momentum"](list(mine.parameters()))
        replica = Replica(net, mine, [optimizer], LocalSGD(1, average_momentum=True))
        replica.synchronize()
        optimizer.load_state_dict(optimizer.state_dict())
        for number in range(2):
            optimizer.zero_grad()
            loss(mine, number, net.rank).backward()
            step(replica, optimizer)
        replica.finish()
        return torch.cat([s["momentum_buffer"].flatten() for s in optimizer.state.values()])

    ours, theirs = SimulatedWorld(2).run(run)
    assert torch.equal(ours, theirs)
    assert ours.any()


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (lambda weights: torch.optim.SGD(weights, 0.1), "got SGD without momentum"),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), "got amsgrad=True"),
        (lambda weights: torch.optim.Adagrad(weights), "got Adagrad"),
    ],
)
def test_an_optimizer_whose_momentum_is_not_known_is_refused(optimizer: Any, got: str) -> None:
    def build(net: Any) -> None:
        mine = model()
        Replica(net, mine, [optimizer(mine.parameters())], LocalSGD(average_momentum=True))

    with pytest.raises(RankFailed, match=got):
        SimulatedWorld(2).run(build)


@pytest.mark.parametrize("spec", [GOSSIP["sgp"], GOSSIP["popsgd"]])
def test_a_rank_without_a_gradient_goes_on_without_momentum(spec: str) -> None:
    ranks = SimulatedWorld(2).run(miss_a_gradient, spec)
    assert ranks == [[1.5, 1.5, 1.0, 1.0], [1.5, 1.5]]


def test_sgp_with_averaged_momentum_waits_for_no_other_rank() -> None:
    """The first rank is late in one step: its neighbours wait in it, and theirs in the next."""

    def run(net: Any, spec: str) -> list[float]:
        mine = model()
        optimizer = OPTIMIZERS["AdamW"](list(mine.parameters()))
        replica = Replica(net, mine, [optimizer], make_algorithm(spec))
        replica.synchronize()
        ends = []
        for number in range(4):
            net.compute(1.0 if net.rank == number == 0 else 0.1)
            for parameter in mine.parameters():
                parameter.grad = torch.ones_like(parameter)
            step(replica, optimizer)
            ends.append(round(net.now(), 6))
        replica.finish()
        return ends

    without, with_momentum = (SimulatedWorld(8).run(run, spec) for spec in ("sgp", GOSSIP["sgp"]))
    assert with_momentum == without


def test_momentum_is_averaged_only_where_ranks_wait() -> None:
    with pytest.raises(ValueError, match="average_momentum=True with overlap_steps=1"):
        LocalSGD(overlap_steps=1, average_momentum=True).check_hyperparameters()
    assert PeriodicAverage.num_copies(LocalSGD(average_momentum=True), 4) == 1
