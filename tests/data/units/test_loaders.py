"""A loader loads its rank's own units ahead, and another's when it is asked for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from lightning_dsgd.data.units.loaders import UnitLoader, check_can_draw_for_others
from lightning_dsgd.data.units.plan import Plan


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        return 10 * index


def begun(num_workers: int, **options: Any) -> tuple[UnitLoader, Plan]:
    """Rank 0's, of two: its batches are 0 to 5, 12 to 17 and so on."""
    loader = UnitLoader(
        DataLoader(Numbers(), batch_size=6, num_workers=num_workers, **options), rank=0
    )
    drawn = loader.draws()(0)
    packed = [
        (torch.tensor([s for batch in drawn[r::2] for s in batch]), [6] * len(drawn[r::2]))
        for r in (0, 1)
    ]
    plan = Plan(packed, limit=4, num_slots_of_step=2, num_parts=2)
    loader.begin_epoch(plan)
    return loader, plan


@pytest.mark.parametrize("num_workers", [0, 2])
def test_units_come_in_whatever_order_they_are_granted(num_workers: int) -> None:
    loader, plan = begun(num_workers)
    for step, order in enumerate([[0, 1, 7, 2], [3, 0, 6, 4, 1]]):
        units = plan.units(step)
        loader.begin_step(step, units)
        for unit in order:
            assert loader.load(unit).tolist() == [10 * s for s in units[unit].samples]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_load_epoch_after_epoch(persistent: bool) -> None:
    loader, plan = begun(1, persistent_workers=persistent, prefetch_factor=2)
    for _ in range(2):
        for step in range(plan.num_steps):
            units = plan.units(step)
            loader.begin_step(step, units)
            assert loader.load(3).tolist() == [10 * s for s in units[3].samples]
        loader.begin_epoch(plan)


def test_own_units_are_loaded_ahead_but_not_without_end() -> None:
    loader, plan = begun(1, prefetch_factor=2)
    loader.begin_step(0, plan.units(0))
    for unit in (2, 3, 6, 7):  # all of the other rank's
        loader.load(unit)
    order = loader._order
    assert len(order.under_way) + order.num_loaded <= 4
    assert loader._loaded or order.under_way


def test_what_others_have_computed_is_dropped() -> None:
    loader, plan = begun(1, prefetch_factor=2)
    loader.begin_step(0, plan.units(0))
    loader.load(2)
    loader.begin_step(1, plan.units(1))
    assert all(key[0] == 1 for key in loader._loaded)
    assert loader.load(0).tolist() == [10 * s for s in plan.units(1)[0].samples]


def test_samples_without_numbers_are_refused() -> None:
    loader = UnitLoader(DataLoader(Numbers(), batch_sampler=[["a"]]), rank=0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"samplers must give whole numbers.*got 'a'"):
        loader.draws()(0)


def test_a_stream_is_refused_with_the_way_out() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ValueError, match='"allreduce" or "ddp" for a stream'):
        UnitLoader(DataLoader(Stream()), rank=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": None}, [0, 10, 20]),
        ({"batch_size": None, "sampler": np.arange(3)}, [0, 10, 20]),
        ({"batch_size": 2, "sampler": torch.arange(3)}, [[0, 10], [20]]),
        ({"batch_sampler": [(0, 1), (2,)]}, [[0, 10], [20]]),
        ({"batch_sampler": torch.tensor([[0, 1], [2, 3]])}, [[0, 10], [20, 30]]),
    ],
    ids=["one by one", "numpy", "tensor", "tuples", "tensor of batches"],
)
def test_whatever_numbers_a_sampler_gives(options: dict[str, Any], expected: list[Any]) -> None:
    loader = UnitLoader(DataLoader(Numbers(), **options), rank=0)
    drawn = loader.draws()(0)
    packed = torch.tensor([sample for batch in drawn for sample in batch])
    plan = Plan(
        [(packed, list(map(len, drawn)))],
        limit=len(expected),
        num_slots_of_step=4,
        num_parts=1,
    )
    loader.begin_epoch(plan)
    loader.begin_step(0, plan.units(0))
    loaded = [loader.load(unit) for unit in range(len(expected))]
    assert [each.tolist() if isinstance(each, Tensor) else each for each in loaded] == expected


@pytest.mark.parametrize("collates", [True, False])
def test_a_rank_draws_the_batches_of_a_lost_one(collates: bool) -> None:
    def loader_of(rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(Numbers(), 3, rank, seed=1)
        sampler.set_epoch(2)
        return DataLoader(Numbers(), 5 if collates else None, sampler=sampler)

    own, lost = UnitLoader(loader_of(0), 0), UnitLoader(loader_of(2), 2)
    check_can_draw_for_others(own.source, 3)
    draw = own.draws()
    assert draw(2) == lost.draws()(2) != draw(0)
    assert draw(0) == own.draws()(0)


def test_a_sampler_draws_for_another_rank_from_the_same_chance() -> None:
    """Lightning wraps a sampler so: each rank draws all samples, and keeps its own."""
    drawn = []
    for rank in (0, 1):
        torch.manual_seed(3)
        sampler = DistributedSamplerWrapper(RandomSampler(Numbers()), num_replicas=2, rank=rank)
        draw = UnitLoader(DataLoader(Numbers(), 4, sampler=sampler), rank).draws()
        drawn.append([draw(rank), draw(1 - rank)])
    assert drawn[0] == drawn[1][::-1]


def test_a_sampler_that_cannot_draw_for_a_lost_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="must have a DistributedSampler, got RandomSampler"):
        check_can_draw_for_others(DataLoader(Numbers(), 4, shuffle=True), 3)
    among_two = DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 0))
    with pytest.raises(ValueError, match="got num_replicas=2; make it with"):
        check_can_draw_for_others(among_two, 3)
