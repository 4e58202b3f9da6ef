"""Units are what DDP's ranks would have computed, and weigh as much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dsgd.data.units.balancing import parts_of
from lightning_dsgd.data.units.plan import Plan, split


def batches(*lengths: int, first: int = 0) -> tuple[Tensor, list[int]]:
    return torch.arange(first, first + sum(lengths)), list(lengths)


def test_a_batch_is_split_evenly_and_never_into_more_parts_than_samples() -> None:
    assert split([1, 2, 3, 4, 5], 2, 1) == [[1, 2], [3, 4, 5]]
    assert split([1, 2], 4, 1) == [[1], [2]]
    assert split([1, 2, 3], 1, 1) == [[1, 2, 3]]


def test_no_part_has_one_sample_alone_unless_parts_of_a_full_batch_have() -> None:
    """BatchNorm cannot train on one sample, and an epoch's last batch may be short."""

    def lengths(num_parts: int, *of_batches: int) -> list[list[int]]:
        plan = Plan([batches(*of_batches)], limit=9, num_slots_of_step=1, num_parts=num_parts)
        steps = [plan.units(step) for step in range(plan.num_steps)]
        assert plan.homes() == [[0] * len(units) for units in steps]
        return [[len(unit.samples) for unit in units] for units in steps]

    assert lengths(4, 8, 5) == [[2, 2, 2, 2], [2, 3]]
    assert lengths(4, 8, 1) == [[2, 2, 2, 2], [1]]
    assert lengths(4, 4, 3) == [[1, 1, 1, 1], [1, 1, 1]]


def test_a_number_of_parts_that_nobody_chose_leaves_two_samples_a_part() -> None:
    found = {longest: parts_of(None, 1, longest) for longest in (16, 8, 7, 5, 3, 1, 0)}
    assert found == {16: 4, 8: 4, 7: 3, 5: 2, 3: 1, 1: 1, 0: 1}
    assert parts_of(None, 2, 16) == 1
    assert parts_of(8, 1, 5) == 8


def test_steps_have_all_batches_of_all_ranks_once() -> None:
    plan = Plan(
        [batches(4, 4, 4), batches(4, 4, 4, first=12)],
        limit=3,
        num_slots_of_step=2,
        num_parts=2,
    )
    assert (plan.num_slots, plan.num_steps) == (3, 2)
    assert [plan.begins_step(slot) for slot in range(3)] == [True, False, True]
    assert plan.homes() == [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1]]
    assert plan.homes() == [[unit.home for unit in plan.units(step)] for step in range(2)]
    samples = [s for step in range(2) for unit in plan.units(step) for s in unit.samples]
    assert sorted(samples) == list(range(24))
    assert {unit.weight for unit in plan.units(0)} == {0.5}


def test_a_mean_is_over_ranks_that_have_a_batch() -> None:
    plan = Plan([batches(2, 2), batches(2, first=4)], limit=9, num_slots_of_step=1, num_parts=1)
    assert [unit.weight for unit in plan.units(0)] == [1.0, 1.0]
    assert [(unit.home, unit.weight) for unit in plan.units(1)] == [(0, 2.0)]


def test_parts_weigh_by_their_samples() -> None:
    plan = Plan([batches(5)], limit=1, num_slots_of_step=1, num_parts=2)
    assert [unit.weight for unit in plan.units(0)] == pytest.approx([0.4, 0.6])


def test_an_epoch_goes_on_where_it_was_left() -> None:
    whole = Plan([batches(1, 1, 1, 1, 1)], limit=5, num_slots_of_step=2, num_parts=1)
    rest = Plan([batches(1, 1, 1, 1, 1)], limit=5, num_slots_of_step=2, num_parts=1, first_slot=3)
    assert rest.num_steps == 2
    assert rest.units(0) == whole.units(1)[1:]
    assert rest.units(1) == whole.units(2)
    assert [rest.begins_step(slot) for slot in (3, 4)] == [True, True]
