"""What optimizers keep is averaged with the weights, on simulated ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.primitives.periodic import PeriodicAverage
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import RankFailed, SimulatedWorld

OPTIMIZERS: dict[str, Callable[[Sequence[Any]], torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.01),
}
KEPT = {"momentum": ["momentum_buffer"], "AdamW": ["exp_avg", "exp_avg_sq"]}
PERIOD = 2


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 4)).double()


def loss(of: nn.Module, number: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    return (of(x) - rank).square().mean()


def train(
    net: Any, name: str, num_steps: Sequence[int], **options: Any
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the weights and what is kept for them, in the order of the module."""
    mine = model()
    optimizer = OPTIMIZERS[name](list(mine.parameters())[:: -1 if net.rank == 1 else 1])
    algorithm = LocalSGD(sync_period=PERIOD, average_momentum=True, **options)
    replica = Replica(net, mine, [optimizer], algorithm)
    replica.synchronize()
    for number in range(num_steps[net.rank]):
        optimizer.zero_grad()
        loss(mine, number, net.rank).backward()
        replica.before_update(optimizer)
        optimizer.step()
        replica.after_update(optimizer)
    replica.finish()
    parameters = list(mine.parameters())
    kept = [[optimizer.state[p][key].clone() for p in parameters] for key in KEPT[name]]
    return [p.detach().clone() for p in parameters], kept


def by_hand(name: str, num_ranks: int, num_steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """All ranks in one process, with weights and moments averaged every PERIOD-th step."""
    models = [copy.deepcopy(model()) for _ in range(num_ranks)]
    optimizers = [OPTIMIZERS[name](list(each.parameters())) for each in models]
    columns = [*zip(*(each.parameters() for each in models), strict=True)]
    for number in range(num_steps):
        for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(each, number, rank).backward()
            optimizer.step()
        if number % PERIOD != PERIOD - 1:
            continue
        with torch.no_grad():
            for column in columns:
                average(list(column))
                for key in KEPT[name]:
                    average([o.state[p][key] for o, p in zip(optimizers, column, strict=True)])
    first = [column[0] for column in columns]
    kept = [[optimizers[0].state[p][key] for p in first] for key in KEPT[name]]
    return [p.detach() for p in first], kept


def average(tensors: list[Tensor]) -> None:
    mean = torch.stack(tensors).mean(0)
    for each in tensors:
        each.copy_(mean)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_go_on_with_the_mean_of_their_momentum(name: str) -> None:
    expected, expected_kept = by_hand(name, 3, 6)
    for weights, kept in SimulatedWorld(3, latency_s=1e-3).run(train, name, (6, 6, 6)):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(kept, expected_kept, rtol=0, atol=1e-12)


def test_ranks_that_stop_go_on_to_give_their_momentum() -> None:
    ranks = SimulatedWorld(3, latency_s=1e-3).run(train, "momentum", (8, 2, 6))
    _, (first,) = ranks[0]
    for _, (kept,) in ranks[1:]:
        torch.testing.assert_close(kept, first, rtol=0, atol=1e-12)


def test_momentum_is_averaged_with_the_fragment_of_its_weights() -> None:
    """Of two fragments the second one's turn is after the last step."""
    world = SimulatedWorld(2, latency_s=1e-3)
    ranks = world.run(lambda net: train(net, "momentum", (4, 4), num_fragments=2))
    (_, (first,)), (_, (other,)) = ranks
    assert torch.equal(first[-1], other[-1])
    assert not torch.equal(first[0], other[0])


def test_a_rank_without_a_gradient_counts_in_no_mean() -> None:
    """Of 3 ranks the last never steps, and the second has no gradient for the last layer."""

    def run(net: Any) -> list[Tensor]:
        mine = model()
        optimizer = OPTIMIZERS["momentum"](list(mine.parameters()))
        replica = Replica(net, mine, [optimizer], LocalSGD(1, average_momentum=True))
        replica.synchronize()
        if net.rank < 2:
            for parameter in list(mine.parameters())[: 4 - 2 * net.rank]:
                parameter.grad = torch.full_like(parameter, net.rank + 1.0)
            replica.before_update(optimizer)
            optimizer.step()
            replica.after_update(optimizer)
        replica.finish()
        return [state["momentum_buffer"] for state in optimizer.state.values()]

    first, second, third = SimulatedWorld(3).run(run)
    assert [float(m.mean()) for m in first] == [1.5, 1.5, 1.0, 1.0]
    assert [float(m.mean()) for m in second] == [1.5, 1.5]
    assert third == []


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
            replica.before_update(optimizer)
            optimizer.step()
            replica.after_update(optimizer)
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


def test_momentum_is_averaged_only_where_ranks_wait() -> None:
    with pytest.raises(ValueError, match="average_momentum=True with overlap_steps=1"):
        LocalSGD(overlap_steps=1, average_momentum=True).check_hyperparameters()
    assert PeriodicAverage.num_copies(LocalSGD(average_momentum=True), 4) == 1
