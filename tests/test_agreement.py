"""What all ranks find out together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd import agreement
from lightning_dsgd.simulated import SimulatedWorld

STEPS = (3, 7, 5, 7, 1)


def test_all_take_over_the_weights_of_the_first_with_the_most_steps() -> None:
    def take_over(net: Any, steps: tuple[int, ...]) -> tuple[int, float]:
        x = torch.tensor([float(net.rank)])
        return agreement.take_over_newest(net, x, steps[net.rank]), float(x)

    assert SimulatedWorld(5).run(take_over, STEPS) == [(7, 1.0)] * 5
    # Where all have made as many, each has what it has.
    assert SimulatedWorld(5).run(take_over, (4,) * 5) == [(4, float(rank)) for rank in range(5)]


def test_the_newest_weights_are_given_also_where_all_have_made_as_many_steps() -> None:
    def give(net: Any, steps: tuple[int, ...]) -> float:
        x = torch.tensor([float(net.rank)])
        agreement.give_newest(net, x, steps[net.rank])
        return float(x)

    assert SimulatedWorld(5).run(give, STEPS) == [1.0] * 5
    assert SimulatedWorld(3).run(give, (2, 2, 2)) == [0.0] * 3


def test_who_goes_on_and_what_is_counted_beside_is_the_sum_of_all() -> None:
    def count(net: Any) -> tuple[int, list[int]]:
        counts = torch.tensor([net.rank, 1])
        if net.rank == 2:
            agreement.zeroed(counts)
        active = agreement.num_active(net, active=net.rank < 2, counts=counts)
        return active, counts.tolist()

    assert SimulatedWorld(3).run(count) == [(2, [1, 2])] * 3


def test_a_mean_is_weighted_by_what_each_rank_has() -> None:
    def mean(net: Any) -> list[float]:
        x = torch.full((4,), float(net.rank))
        own = torch.tensor([1 + 2 * net.rank, 0 if net.rank else 5])
        agreement.weigh_pieces(net, x, own, (0, 2, 4))
        agreement.average(net, x)
        return x.tolist()

    assert SimulatedWorld(2).run(mean) == [[0.75, 0.75, 0.0, 0.0]] * 2


def test_the_largest_of_each_value_is_known_to_all() -> None:
    def largest(net: Any) -> list[int]:
        return agreement.largest(net, net.rank * net.rank, -net.rank)

    for world_size in (1, 2, 3, 5, 8):
        expected = [(world_size - 1) ** 2, 0]
        assert SimulatedWorld(world_size).run(largest) == [expected] * world_size


def test_texts_that_differ_are_refused_on_every_rank() -> None:
    def refuse(net: Any) -> None:
        agreement.refuse_unless_alike(net, "the same", "it", "mend it")
        mine = "this" if net.rank != 1 else "that"
        with pytest.raises(ValueError, match="got this on ranks 0 and 2, that on rank 1; mend it"):
            agreement.refuse_unless_alike(net, mine, "it", "mend it")

    SimulatedWorld(3).run(refuse)
