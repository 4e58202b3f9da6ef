"""`Balanced` in a loop in plain PyTorch, beside one process on all batches."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_dsgd as dsgd
from tests.support.fits import Plain, errors, run, same
from tests.support.models import weights

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(2 * 8 * 9, 10, generator=DRAW)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def sampler_of(rank: int) -> Any:
    return DistributedSampler(DATA, 2, rank, shuffle=False)


def loader_of(rank: int) -> DataLoader[Any]:
    return DataLoader(DATA, 8, sampler=sampler_of(rank))


def make() -> tuple[Any, Any]:
    model = Plain()
    return model, model.configure_optimizers()


def train(accumulate: int) -> tuple[Tensor, int]:
    model, optimizer = make()
    num_units = 0
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        loader = loader_of(replica.rank)
        for _ in range(2):
            for batches in replica.steps(loader, accumulate):
                optimizer.zero_grad()
                for batch in batches:
                    num_units += 1
                    if replica.rank == 1:
                        threading.Event().wait(0.02)
                    model.loss(batch).backward()
                optimizer.step()
    return weights(model), num_units


def train_alone(accumulate: int, samplers: list[Any]) -> Tensor:
    model, optimizer = make()
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [DataLoader(DATA, 8, sampler=sampler) for sampler in samplers]
        pairs = [*zip(*ranks, strict=True)]
        for first in range(0, len(pairs), accumulate):
            optimizer.zero_grad()
            for pair in pairs[first : first + accumulate]:
                for batch in pair:
                    (model.loss(batch) / 2 / accumulate).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_weights_are_those_of_one_process_on_all_batches(accumulate: int) -> None:
    ranks = run(2, train, accumulate)
    assert same([x for x, _ in ranks])
    torch.testing.assert_close(
        ranks[0][0], train_alone(accumulate, [sampler_of(0), sampler_of(1)]), rtol=1e-5, atol=1e-6
    )
    assert ranks[0][1] > ranks[1][1]


def train_late(seed: int) -> tuple[Tensor, int]:
    model, optimizer = make()
    chance, num_units = random.Random(), 0
    algorithm = dsgd.Balanced(deterministic=True)
    with dsgd.decentralized(model, optimizer, algorithm, timeout_s=30.0) as replica:
        chance.seed(10 * seed + replica.rank)
        for batches in replica.steps(loader_of(replica.rank), 4):
            optimizer.zero_grad()
            for batch in batches:
                num_units += 1
                threading.Event().wait(chance.choice([0.0, 0.0, 0.1]))
                model.loss(batch).backward()
            optimizer.step()
    return weights(model), num_units


def test_sums_in_order_are_equal_to_the_bit_whoever_was_late() -> None:
    runs = [run(2, train_late, seed) for seed in range(3)]
    assert same([x for ranks in runs for x, _ in ranks])
    assert len({num_units for ranks in runs for _, num_units in ranks}) > 1


def train_in_fabric() -> Tensor:
    fabric = Fabric(strategy="balanced", accelerator="cpu", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(*make())
    loader = fabric.setup_dataloaders(DataLoader(DATA, 8, shuffle=True))
    for _ in range(2):
        for batches in fabric.strategy.steps(loader, 4):  # type: ignore[attr-defined]
            optimizer.zero_grad()
            for batch in batches:
                fabric.backward(((model.net(batch[0]) - batch[1]) ** 2).mean())
            optimizer.step()
    fabric.strategy.finish()  # type: ignore[attr-defined]
    return weights(model)


def test_fabrics_weights_are_those_of_one_process_on_all_batches() -> None:
    samplers: list[Any] = [DistributedSampler(DATA, 2, rank, shuffle=True) for rank in (0, 1)]
    expected = train_alone(4, samplers)
    for x in run(2, train_in_fabric):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def train_with_units_that_are_dropped() -> Tensor:
    """The first micro-batch of each step is dropped, as if another rank's had entered the sum.

    No other has, so the dealer deals it again.
    """
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        steps = replica.steps(loader_of(replica.rank), 4)
        for batches in steps:
            dealing = replica._session.training.balancing._dealing
            optimizer.zero_grad()
            for number, batch in enumerate(batches):
                model.loss(batch).backward()
                if number == 0:
                    drop_what_is_in_hand(dealing)
            optimizer.step()
    return weights(model)


def drop_what_is_in_hand(dealing: Any) -> None:
    """Has the unit in hand enter no sum, and be free again."""
    finish = dealing.finish

    def drop(enter: Any) -> bool:
        dealing.finish = finish
        unit, dealer = dealing._hand.current, dealing._dealer
        with dealing._lock:
            dealer._free[0].append(unit)
            dealer._num_free += 1
            dealing._hand.finish(has_entered=False)
        dealing._send(dealing._lane.net)
        return False

    dealing.finish = drop


def train_alone_on_half() -> Tensor:
    model, optimizer = make()
    batches = list(loader_of(0))
    for first in range(0, len(batches), 4):
        optimizer.zero_grad()
        for batch in batches[first : first + 4]:
            (model.loss(batch) / 4).backward()
        optimizer.step()
    return weights(model)


def test_a_micro_batch_that_was_dropped_leaves_nothing_in_the_next() -> None:
    [x] = run(1, train_with_units_that_are_dropped)
    torch.testing.assert_close(x, train_alone_on_half(), rtol=1e-5, atol=1e-6)


def train_unevenly() -> tuple[Tensor, int]:
    """Rank 0 has five batches and rank 1 three: the steps that rank 1 has none for count alone."""
    model, optimizer = make()
    num_steps = 0
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        mine = range(40, 64) if replica.rank else range(40)
        for batches in replica.steps(DataLoader(DATA, 8, sampler=mine)):
            num_steps += 1
            optimizer.zero_grad()
            for batch in batches:
                model.loss(batch).backward()
            optimizer.step()
    return weights(model), num_steps


def test_ranks_may_have_different_numbers_of_batches() -> None:
    model, optimizer = make()
    for step in range(5):
        optimizer.zero_grad()
        firsts = [step * 8, 40 + step * 8] if step < 3 else [step * 8]
        for first in firsts:
            (model.loss(DATA[first : first + 8]) / len(firsts)).backward()
        optimizer.step()
    for x, num_steps in run(2, train_unevenly):
        assert num_steps == 5
        torch.testing.assert_close(x, weights(model), rtol=1e-5, atol=1e-6)


def leave_early() -> None:
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        for batches in replica.steps(loader_of(replica.rank)):
            model.loss(next(batches)).backward()


def step_alone() -> None:
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        for batch in replica.batches(loader_of(replica.rank)):
            model.loss(batch).backward()
            optimizer.step()


def accumulate_nothing() -> None:
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        next(iter(replica.steps(loader_of(replica.rank), 0)))


def ask_another() -> None:
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.AllReduce(), timeout_s=30.0) as replica:
        next(iter(replica.steps(loader_of(replica.rank))))


def share_other_data() -> None:
    model, optimizer = make()
    with dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica:
        own = TensorDataset(*DATA[: 64 + replica.rank])
        next(iter(replica.steps(DataLoader(own, 8))))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (share_other_data, "must have the same data set, got sets of [64, 65] samples"),
        (leave_early, "all micro-batches of a step must be computed"),
        (step_alone, "got a step without one; loop over"),
        (accumulate_nothing, "accumulate must be at least 1, got 0"),
        (ask_another, "got allreduce; use Balanced()"),
    ],
)
def test_what_is_no_step_is_refused(fn: Any, text: str) -> None:
    found = errors(2, fn)
    assert any(text in error for error in found), found
