"""A loader's twin, and what stands in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd.data.loaders import StandIn, has_indices, load_more, sampler_of, twin
from tests.data.units.test_loaders import Numbers


class Doubling(DataLoader[Any]):
    """A loader of the user's own, which does not iterate as torch's."""

    def __iter__(self) -> Iterator[Any]:
        return (2 * batch for batch in super().__iter__())


class Two(StandIn):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter("ab")


def test_a_twin_is_of_the_users_class_and_loads_what_its_sampler_says() -> None:
    loader = Doubling(Numbers(), batch_size=4)
    other = twin(loader, [[3, 1], [2]])
    assert [batch.tolist() for batch in other] == [[60, 20], [40]]
    assert len(loader) == len(list(sampler_of(loader))) == 12


def test_a_twin_of_a_loader_without_batches_loads_sample_by_sample() -> None:
    other = twin(DataLoader(Numbers(), batch_size=None), [3, 1])
    assert [int(sample) for sample in other] == [30, 10]


def test_a_loader_with_an_iterator_of_its_own_gets_no_more_from_workers() -> None:
    with pytest.raises(ValueError, match="whose __iter__ returns a generator; leave __iter__ out"):
        load_more(iter(Doubling(Numbers())))


def test_a_stand_in_has_a_length_of_its_own_and_all_else_of_its_source() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(), batch_size=3)
    stand_in = Two(loader)
    assert (len(stand_in), list(stand_in), stand_in.batch_size) == (2, ["a", "b"], 3)
    assert has_indices(stand_in)
    stand_in.worker_init_fn = print  # as Lightning does once the loader is there
    assert loader.worker_init_fn is print
    assert Two(stand_in).source is loader
